"""`keras.RematScope` under a distribution: layers that branch on `training`, with random state, averages and losses."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_dist as kd


class Block(keras.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(4, 4)
        self.dense = layers.Dense(16, kernel_regularizer="l2", activity_regularizer="l2")
        self.dropout, self.norm = layers.Dropout(0.2, seed=1), layers.BatchNormalization()

    def build(self, shape):
        self.attention.build(shape, shape)
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x, training=None):
        y = self.attention(x, x, use_causal_mask=True)
        y = self.dropout(self.dense(y), training=training) if training else self.dense(y)
        return self.norm(x + y, training=training)

    def compute_output_shape(self, shape):
        return shape


def losses_and_weights(scope):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((20, 8, 16))
    with keras.RematScope(**scope):
        inputs = keras.Input((8, 16))
        outputs = Block(name="block1")(Block(name="block0")(inputs))
        model = keras.Model(inputs, layers.Dense(1)(outputs))
    model.compile("sgd", "mse")
    history = model.fit(x, x[..., :1], batch_size=10, epochs=2, verbose=0).history["loss"]
    return history, [np.asarray(weight.value) for weight in model.weights]


@pytest.mark.parametrize("scope", [{"mode": "full"}, {"mode": "list_of_layers", "layer_names": ["block0", "block1"]}])
def test_numbers_are_those_without(scope):
    expected_losses, expected_weights = losses_and_weights({"mode": None})
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        losses, weights = losses_and_weights(scope)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for ours, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_less_memory_is_needed():
    def build(scope):
        with keras.RematScope(**scope):
            inputs = x = keras.Input((64, 256))
            for number in range(4):
                y = layers.Dense(1024, "gelu")(x)
                x = x + layers.Dense(256, name=f"down{number}")(layers.Dense(1024, "gelu")(y))
        block = keras.Model(inputs, x, name="block")
        with keras.RematScope(**scope):
            outputs = x = keras.Input((64, 256))
            x = block(x)
        model = keras.Model(outputs, layers.Dense(1)(x))
        model.compile("sgd", "mse")
        return model

    distribution = kd.FullyShardedDataParallel(min_shard_bytes=0)
    plans = [
        kd.plan(lambda scope=scope: build(scope), distribution, 64) for scope in ({"mode": None}, {"mode": "full"})
    ]
    assert plans[1].memory.temporaries < plans[0].memory.temporaries

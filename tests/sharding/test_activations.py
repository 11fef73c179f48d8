"""Rules whose keys end in `/input` shard what layers are called with."""

import contextlib

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.keras_scenarios import start_anew
from support.strategy_models import model_parallel

import keras_dist as kd

ROWS = 16
Y = np.random.default_rng(1).normal(size=(ROWS, 8)).astype("float32")


def with_input_rules(**rules):
    """The scope of a distribution with rules for the inputs of layers, by the layers' names."""
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:4,model:2"))
    for name, axes in rules.items():
        layout_map[f"{name}/input"] = axes
    return model_parallel(layout_map).scope()


@pytest.mark.slow
def test_inputs_keep_their_masks():
    def run(scope):
        start_anew()
        with scope:
            tokens = keras.Input((6,), dtype="int32")
            x = layers.Embedding(16, 8, mask_zero=True)(tokens)
            model = keras.Model(tokens, layers.SimpleRNN(8, name="recurrent")(layers.Dense(8, name="dense")(x)))
            model.compile("sgd", "mse")
            ids = np.random.default_rng(0).integers(0, 3, (ROWS, 6))
            return model.predict(ids, verbose=0), model.train_on_batch(ids, Y), np.asarray(model(ids))

    expected = run(contextlib.nullcontext())
    actual = run(with_input_rules(dense=("data", None, "model"), recurrent=("data", "model", None)))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5), actual, expected)


def test_rules_apply_to_positional_inputs_of_enough_dims():
    seen = {}

    class Sum(keras.Layer):
        def call(self, first, both, scale=None):
            leaves = [first, *both.values(), scale]
            seen[self.name] = [
                leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
            ]
            return ops.add(first, both["a"]) * both["b"] * scale

    with with_input_rules(sum=("data", "model")):
        x, scale = ops.ones((8, 4)), ops.ones((4,))
        y = Sum(name="sum")(x, {"a": x, "b": scale}, scale=x)
    np.testing.assert_allclose(y, 2)
    shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in seen["sum"]]
    assert shapes == [(2, 2), (2, 2), (4,), (8, 4)]  # fewer dims, or passed by name: unchanged


def test_an_error_names_the_input():
    with with_input_rules(dense=("data", "model")), pytest.raises(ValueError, match=r"the input of 'dense' .*size 3"):
        layers.Dense(4, name="dense")(np.ones((8, 3), "float32"))


def test_composite_layers_keep_masks():
    """Keras reads masks before a call, and gives them only to the outputs of layers that compute one."""

    class Block(layers.Layer):
        def __init__(self):
            super().__init__(name="block")
            self.dense, self.recurrent = layers.Dense(8, name="dense"), layers.SimpleRNN(8, return_sequences=True)

        def build(self, shape):
            self.dense.build(shape)
            self.recurrent.build(shape)

        def call(self, x):
            return x + self.recurrent(self.dense(x))

    def run(scope):
        start_anew()
        with scope:
            tokens = keras.Input((6,), dtype="int32")
            encoder = keras.Model(tokens, layers.Embedding(16, 8, mask_zero=True)(tokens), name="encoder")
            inputs = keras.Input((6,), dtype="int32")
            model = keras.Model(inputs, layers.GlobalAveragePooling1D()(Block()(encoder(inputs))))
            ids = np.random.default_rng(0).integers(0, 3, (ROWS, 6))
            return model.predict(ids, verbose=0), np.asarray(model(ids))

    expected = run(contextlib.nullcontext())
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:4,model:2"))
    for path in ("encoder/output", "block/input", "block/dense/input", "block/dense/output", "block/output"):
        layout_map[path] = ("data", None, None)
    actual = run(model_parallel(layout_map).scope())
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5), actual, expected)

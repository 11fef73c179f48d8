"""Steps that are not compiled: each device computes the whole batch, since XLA partitions single operations wrongly."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.applied_functions import WIDTH, Applied, distribution_of
from support.keras_scenarios import start_anew
from support.slow_cases import slow_unless
from support.strategy_models import assert_same_numbers, scope

import keras_dist as kd

KERNEL = np.random.default_rng(1).normal(size=(3, WIDTH, 1)).astype("float32")
CASES = {
    "groups of channels": ("tensor parallel", lambda x: ops.depthwise_conv(x, KERNEL * ops.mean(x), padding="same")),
    "maxima over windows": ("context parallel", lambda x: ops.max_pool(x, 3, 1, padding="same")),
    "median": ("context parallel", lambda x: x - ops.median(x, axis=1, keepdims=True)),
}


def trained_eagerly(function, distribution):
    start_anew()
    x = np.random.default_rng(0).normal(size=(8, 16, 4)).astype("float32")
    with scope(distribution):
        inputs = keras.Input((16, 4), batch_size=8)
        model = keras.Model(inputs, layers.Dense(3)(Applied(function)(inputs)))
        model.compile("sgd", "mse", run_eagerly=True)
        losses = [
            model.train_on_batch(x, x[..., :3]),
            model.fit(x, x[..., :3], batch_size=8, verbose=0).history["loss"],
        ]
        return losses, model.predict(x, verbose=0), model.get_weights()


@pytest.mark.parametrize("name", [slow_unless(name == "maxima over windows", name) for name in CASES])
def test_numbers_are_those_of_one_device(name):
    strategy, function = CASES[name]
    actual = trained_eagerly(function, distribution_of(strategy))
    assert_same_numbers(actual, trained_eagerly(function, None), 1e-5)


def test_the_batch_is_on_every_device():
    shards = []

    class Seen(layers.Layer):
        def call(self, x):
            if not isinstance(x, jax.core.Tracer):
                shards.append(x.sharding.shard_shape(x.shape))
            return x

    with kd.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), Seen(), layers.Dense(2)])
        model.compile("sgd", "mse", run_eagerly=True)
        shards.clear()
        model.predict_on_batch(np.ones((16, 4), "float32"))
    assert shards == [(16, 4)]

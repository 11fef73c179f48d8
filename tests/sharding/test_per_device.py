"""Functions of shards on each device, with rows in shards of unequal sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.strategy_models import assert_same_numbers

import keras_dist as kd
from keras_dist.sharding.per_device import call_per_device

ROWS = PartitionSpec("data")


@pytest.mark.parametrize("rows", [7, 8])
@pytest.mark.parametrize(
    ("function", "out_spec"),
    [
        pytest.param(lambda x: jnp.sin(x), ROWS, id="one output"),
        pytest.param(lambda x: {"waves": (jnp.sin(x), jnp.cos(x)), "sum": x.sum(-1)}, ROWS, id="one spec for all"),
        pytest.param(
            lambda x: {"waves": (jnp.sin(x), jnp.cos(x)), "sum": x.T},
            {"waves": ROWS, "sum": PartitionSpec(None, "data")},
            id="one spec for a part",
        ),
    ],
)
def test_outputs_and_gradients(function, out_spec, rows):
    mesh = kd.create_device_mesh("data:4,model:2").backend_mesh
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")

    def per_device(x):
        return call_per_device(function, mesh, (x,), (ROWS,), out_spec, ((),))

    def with_gradient(function):
        outputs, pullback = jax.vjp(function, x)
        return outputs, pullback(jax.tree.map(jnp.cos, outputs))

    actual, expected = jax.jit(lambda: with_gradient(per_device))(), with_gradient(function)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_same_numbers(actual, expected, 1e-5)

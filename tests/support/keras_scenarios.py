"""Scenarios that run on `keras.distribution` and on keras_dist: functions of the module that they run on (`api`)."""

import contextlib

import jax
import keras
import numpy as np
import pytest

import keras_dist as kd

KERAS = keras.distribution
OLDER_KERAS = hasattr(keras.src.backend.jax, "core")  # 3.15, and 3.16 until its operations became a package
DEVICES = 8

ROWS = 16
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def start_anew():
    """Resets the distribution, names and seed as in a new process, so that a scenario builds the same model again."""
    kd.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


def dense_model(optimizer="sgd"):
    """A compiled model of two layers, `a` (4 x 8) and `b` (8 x 1)."""
    layers = [keras.Input((4,)), keras.layers.Dense(8, name="a"), keras.layers.Dense(1, name="b")]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return model


def fit(model, **kwargs):
    """The losses of one `fit` on all rows in batches of 8, unshuffled."""
    return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **kwargs).history["loss"]


def data_parallel(api):
    """Data parallelism over all devices."""
    return api.DataParallel()


def model_parallel(api, rules=None, shape=(2, 4), batch_dim_name="data"):
    """A `ModelParallel` with some rules, on a mesh with the axes "data" and "model"."""
    layout_map = api.LayoutMap(api.DeviceMesh(shape, ["data", "model"]))
    for pattern, layout in (rules or {}).items():
        layout_map[pattern] = layout
    return api.ModelParallel(layout_map=layout_map, batch_dim_name=batch_dim_name)


def run(api, use, build=dense_model, distribution=data_parallel):
    """Builds a model under a module's distribution (None: one device); what `use` returns for it, and the weights."""
    start_anew()
    with distribution(api).scope() if api else contextlib.nullcontext():
        model = build()
        result = use(model)
        weights = model.get_weights()
        assert len(devices_of(model.weights[0])) == (DEVICES if api else 1)
    return result, weights


def check_as_on_one_device(use, build=dense_model, distribution=data_parallel):
    """Asserts that a scenario has the numbers of one device under a distribution of keras_dist."""
    assert_same_numbers(run(kd, use, build, distribution), run(None, use, build))


def assert_same_numbers(actual, expected):
    """Asserts equal trees of arrays, up to rounding errors of float32."""
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)


def devices_of(variable):
    """The devices that a variable is placed on."""
    return variable.value.sharding.device_set


def shard_shape(variable):
    """The shape of a variable's shard on one device."""
    return variable.value.sharding.shard_shape(tuple(variable.shape))


@contextlib.contextmanager
def raises_error_of_jax(name, match):
    """Expects an error of JAX by the name of its type, because JAX does not export the type."""
    with pytest.raises(Exception, match=match) as error:
        yield error
    assert error.type.__name__ == name


def raises_indivisible():
    """Expects JAX's error for an indivisible dim, which names a sharding but no variable or batch."""
    return raises_error_of_jax("IndivisibleError", "should evenly divide the shape")

"""Texts of `keras_dist/variables`."""

from unittest import mock

import keras

import keras_dist as kd
from keras_dist.variables.deferred import built


def small_model(name="small", inputs=True):
    layers = [keras.Input((4,))] if inputs else []
    return keras.Sequential([*layers, keras.layers.Dense(2, name="dense")], name=name)


def deferred_model(distribution=None):
    kd.set_distribution(distribution)
    with kd.deferred():
        return small_model()


def materialize_unbuilt():
    with kd.deferred():
        model = small_model("unbuilt", inputs=False)
    kd.materialize(model)


def materialize_on_absent_devices():
    mesh = kd.DeviceMesh((8,), ["data"], kd.mock_tpus("v5e:2x4"))
    kd.materialize(deferred_model(kd.DataParallel(mesh)))


def defer_with_nnx():
    with mock.patch.object(keras.config, "is_nnx_enabled", return_value=True), kd.deferred():
        pass


def build_nothing():
    return None


def use_builder(model_or_builder):
    with built(model_or_builder):
        pass


CASES = {
    "a deferred variable that is used": lambda: deferred_model().layers[0].kernel.numpy(),
    "a deferred model with NNX": defer_with_nnx,
    "materialize without a model": lambda: kd.materialize(3),
    "materialize of a model that is not built": materialize_unbuilt,
    "materialize on devices that are not attached": materialize_on_absent_devices,
    "a value in place of a model": lambda: use_builder(3),
    "a function that returns no model": lambda: use_builder(build_nothing),
    "a model that is not built": lambda: use_builder(small_model("unbuilt", inputs=False)),
    "redistribute without a model": lambda: kd.redistribute(3),
    "redistribute to something else than a distribution": lambda: kd.redistribute(small_model(), "data:8"),
}

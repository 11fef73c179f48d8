"""Texts of `keras_dist/variables`."""

from unittest import mock

import keras
import numpy as np

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


def in_inference_layout(use):
    with kd.DataParallel().scope():
        model = small_model()
        model.compile("sgd", "mse")
    with kd.inference_layout(model, kd.DataParallel()):
        use(model)


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
    "inference_layout without a model": lambda: kd.inference_layout(3, kd.DataParallel()),
    "inference_layout without a distribution": lambda: kd.inference_layout(small_model(), kd.DataParallel),
    "inference_layout of a model that is not distributed": lambda: kd.inference_layout(
        small_model(), kd.DataParallel()
    ),
    "inference_layout with a text in place of a number of bytes": lambda: kd.inference_layout(
        small_model(), kd.DataParallel(), max_bytes="1GB"
    ),
    "inference_layout in another one": lambda: in_inference_layout(
        lambda model: kd.inference_layout(model, kd.DataParallel())
    ),
    "training in inference_layout": lambda: in_inference_layout(
        lambda model: model.fit(np.ones((8, 4)), np.ones((8, 2)))
    ),
    "redistribute in inference_layout": lambda: in_inference_layout(kd.redistribute),
}

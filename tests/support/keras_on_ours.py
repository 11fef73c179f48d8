"""A pytest plugin: Keras's own test modules, imported after this one, find this package in the place of theirs."""

import os

import keras_dist as kd

kd.simulate_devices(8)

import jax  # noqa: E402
import keras  # noqa: E402
import keras.src.distribution  # noqa: E402
from keras.src.distribution import distribution_lib  # noqa: E402

jax.devices()  # JAX must have started: one of the tests clears os.environ
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

CLASSES = ("DeviceMesh", "TensorLayout", "LayoutMap", "Distribution", "DataParallel", "ModelParallel")
# `list_devices` and `get_device_count` call Keras's functions of these names, which its tests replace by mocks.
FUNCTIONS = ("initialize", "distribute_tensor", "distribution", "set_distribution")


def pytest_configure(config):
    config.addinivalue_line("markers", "multi_device: Keras's own marker")
    for module in (distribution_lib, keras.src.distribution, keras.distribution):
        for name in CLASSES + FUNCTIONS:
            if hasattr(module, name):
                setattr(module, name, getattr(kd, name))

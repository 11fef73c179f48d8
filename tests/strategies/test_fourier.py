"""Fourier transforms: each device transforms its rows, with the numbers of one device."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.keras_scenarios import start_anew
from support.strategy_models import assert_same_numbers, scope

import keras_dist as kd

ROWS, LENGTH, WIDTH = 8, 13, 8


def transposed(order):
    """A transform of transposed activations: XLA:CPU fails for some layouts of what it gathers."""

    def transform(x):
        x = ops.transpose(x, order)
        return ops.transpose(sum(ops.fft((x, ops.sin(x)))), np.argsort(order).tolist())

    return transform


TRANSFORMS = {
    "fft": lambda x: sum(ops.fft((x, ops.sin(x)))),
    "fft of sequences": transposed((0, 2, 1)),
    "fft of rows": transposed((1, 2, 0)),
    "fft2": lambda x: sum(ops.fft2((x, ops.sin(x)))),
    "ifft2": lambda x: sum(ops.ifft2((x, ops.sin(x)))),
    "rfft": lambda x: sum(ops.rfft(x, fft_length=10)),
    "irfft": lambda x: ops.irfft((x, ops.sin(x))),
    "stft": lambda x: sum(ops.stft(x, 4, 2, 4)),
    "istft": lambda x: ops.istft((x, ops.sin(x)), 8, 4, 14),
    "of each row": lambda x: ops.vectorized_map(lambda row: sum(ops.rfft(row)), x),
}


def trained(transform, distribution):
    """Losses and weights of two steps of a model that transforms activations."""
    start_anew()
    with scope(distribution):
        inputs = keras.Input((LENGTH, WIDTH), batch_size=ROWS)
        x = layers.Dense(WIDTH, activation="tanh", name="up")(inputs)
        x = layers.Dense(3, name="head")(layers.Lambda(transform, name="transformed")(x))
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
        random = np.random.default_rng(0)
        batch = (random.normal(size=tensor.shape).astype("float32") for tensor in (inputs, x))
        x, y = batch
        return [model.train_on_batch(x, y) for _ in range(2)], model.get_weights()


def tensor_parallel(axes, **options):
    layout_map = kd.LayoutMap(kd.create_device_mesh(axes))
    positions = ("context", "model") if options else "model"
    layout_map["up/kernel"] = (None, "model")
    layout_map["up/output"] = ("data", positions, None) if options else ("data", None, positions)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", **options)


DISTRIBUTIONS = {
    "data parallel": kd.DataParallel,
    "tensor parallel": lambda: tensor_parallel("data:2,model:4"),
    "context parallel": lambda: kd.DataParallel(kd.create_device_mesh("data:2,context:4"), sequence_dim_name="context"),
    "all": lambda: tensor_parallel("data:2,context:2,model:2", sequence_dim_name="context"),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_same_numbers(name, distribution):
    transform = TRANSFORMS[name]
    assert_same_numbers(trained(transform, DISTRIBUTIONS[distribution]()), trained(transform, None), 1e-5)


@pytest.mark.parametrize("name", ["fft", "fft2", "irfft", "stft"])
def test_rows_are_not_gathered(name):
    """XLA would gather a batch on every device, and transform all of it there."""

    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        x = layers.Lambda(TRANSFORMS[name])(layers.Dense(WIDTH)(inputs))
        model = keras.Model(inputs, layers.Dense(3)(x))
        model.compile("sgd", "mse")
        return model

    assert {each.kind for each in kd.plan(build, kd.DataParallel(), ROWS).traffic} == {"all-reduce"}


def test_arrays_outside_of_a_step():
    signals = np.random.default_rng(0).normal(size=(ROWS, 16)).astype("float32")
    expected = ops.rfft(signals), ops.rfft(signals[0]), ops.stft(signals, 4, 2, 4, window=np.ones(4, "float32"))
    distribution = kd.DataParallel()
    with distribution.scope():
        for x in (signals, distribution.distribute_batch(signals)):
            window = ops.ones(4)
            assert_same_numbers((ops.rfft(x), ops.rfft(x[0]), ops.stft(x, 4, 2, 4, window=window)), expected, 1e-5)

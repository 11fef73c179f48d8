"""Fourier transforms: each device transforms its rows, with the numbers of one device."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.applied_functions import ROWS, WIDTH, distribution_of, trained
from support.keras_scenarios import start_anew
from support.slow_cases import crossed
from support.strategy_models import assert_same_numbers, scope

import keras_dist as kd

LENGTH = 13


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
    "istft": lambda x: ops.istft((x, ops.sin(x)), 16, 8, 30)[..., None],
    "of each row": lambda x: ops.vectorized_map(lambda row: sum(ops.rfft(row)), x),
}

DISTRIBUTIONS = {
    "data parallel": kd.DataParallel,
    "tensor parallel": lambda: distribution_of("tensor parallel"),
    "context parallel": lambda: distribution_of("context parallel"),
    "sequence and context parallel": lambda: distribution_of(
        "sequence and context parallel", ["applied/up", "applied"]
    ),
}


@pytest.mark.parametrize(("name", "distribution"), crossed(TRANSFORMS, DISTRIBUTIONS))
def test_same_numbers(name, distribution):
    transform = TRANSFORMS[name]
    actual = trained(transform, LENGTH, DISTRIBUTIONS[distribution]())
    assert_same_numbers(actual, trained(transform, LENGTH, None), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fft2", "rfft", "stft"])
def test_rows_that_the_devices_do_not_divide(name):
    transform = TRANSFORMS[name]
    actual = trained(transform, LENGTH, kd.DataParallel(), rows=11)
    assert_same_numbers(actual, trained(transform, LENGTH, None, rows=11), 1e-5)


def test_sequences_that_are_gathered_in_microbatches():
    """XLA:CPU chooses a layout for what it gathers in the loop in which it cannot compute the transform."""
    mesh, options = kd.create_device_mesh("data:2,context:4"), kd.StepOptions(microbatches=2)
    distribution = kd.DataParallel(mesh, sequence_dim_name="context", step_options=options)

    def filtered(x):
        return ops.irfft(tuple(0.5 * part for part in ops.rfft(x)))

    assert_same_numbers(trained(filtered, 8, distribution), trained(filtered, 8, None), 1e-5)


@pytest.mark.parametrize("length", [9, 8])
def test_signals_whose_samples_are_sharded(length):
    """Dim 1 is transformed, and sharded over the sequence axis before."""
    signals = np.random.default_rng(0).standard_normal((4, length)).astype("float32")
    mesh = kd.create_device_mesh("data:2,context:4")

    def of_signals(distribution):
        start_anew()
        with scope(distribution):
            inputs = keras.Input((length,))
            spectrum = ops.fft((inputs * 2.0, ops.zeros_like(inputs)))
            model = keras.Model(inputs, layers.Dense(3)(spectrum[0] + spectrum[1]))
            model.compile("sgd", "mse")
            return [model.train_on_batch(signals, signals[:, :3]) for _ in range(2)], model.get_weights()

    distribution = kd.DataParallel(mesh, sequence_dim_name="context")
    assert_same_numbers(of_signals(distribution), of_signals(None), 1e-5)


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


@pytest.mark.slow
def test_arrays_outside_of_a_step():
    signals = np.random.default_rng(0).normal(size=(ROWS, 16)).astype("float32")
    expected = ops.rfft(signals), ops.rfft(signals[0]), ops.stft(signals, 4, 2, 4, window=np.ones(4, "float32"))
    distribution = kd.DataParallel()
    with distribution.scope():
        for x in (signals, distribution.distribute_batch(signals)):
            window = ops.ones(4)
            assert_same_numbers((ops.rfft(x), ops.rfft(x[0]), ops.stft(x, 4, 2, 4, window=window)), expected, 1e-5)

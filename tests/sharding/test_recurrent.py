"""Recurrent layers that cuDNN computes on GPUs: each device computes its rows, with the numbers of one device.

There is no GPU here. For the numbers, JAX's reference implementation stands in for cuDNN's kernel.
"""

import functools
import importlib

import jax
import keras
import numpy as np
import pytest
from jax.experimental import rnn
from keras import layers
from support.compilers import needs_cuda
from support.keras_scenarios import start_anew
from support.slow_cases import slow
from support.strategy_models import fsdp, scope

import keras_dist as kd
from keras_dist.planning.compiling import compilation

LENGTH, WIDTH, UNITS = 6, 8, 16
keras_rnn = importlib.import_module("keras.src.backend.jax.rnn")  # `keras.src.backend.jax.rnn` is a function


def kernel(x, h_0, c_0, weights, input_size, hidden_size, num_layers, dropout, bidirectional):
    shape = input_size, hidden_size, num_layers, bidirectional
    unpacked = rnn.unpack_lstm_weights(weights, *shape)
    lengths = np.full(x.shape[0], x.shape[1], "int32")
    return rnn.lstm_ref(x, h_0, c_0, *unpacked, lengths, input_size, hidden_size, num_layers, dropout, bidirectional)


@pytest.fixture
def rows_of_calls(monkeypatch):
    """Makes Keras call cuDNN's LSTM, for which a reference stands in. Returns the numbers of rows that it was given."""
    rows = []

    @functools.wraps(rnn.lstm)
    def lstm(x, h_0, c_0, weights, seq_lengths, *settings, precision=None, **named_settings):
        rows.append(x.shape[0])
        return kernel(x, h_0, c_0, weights, *settings[:5], **named_settings)

    monkeypatch.setattr(rnn, "lstm", lstm)
    monkeypatch.setattr(keras_rnn, "_is_gpu_available", lambda: True)
    return rows


def recurrent():
    """A layer in both directions, and one in the other direction."""
    model = keras.Sequential(
        [
            keras.Input((LENGTH, WIDTH)),
            layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True), name="both"),
            layers.LSTM(UNITS, go_backwards=True, name="backward"),
            layers.Dense(4, name="head"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def trained(distribution, rows):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, LENGTH, WIDTH)).astype("float32")
    y = random.normal(size=(rows, 4)).astype("float32")
    start_anew()
    with scope(distribution):
        model = recurrent()
        losses = [float(np.ravel(model.train_on_batch(x, y))[0]) for _ in range(3)]
        return np.array(losses), model.predict_on_batch(x), [np.asarray(value) for value in model.get_weights()]


def tensor_parallel():
    mesh = kd.DeviceMesh((2, 4), ["data", "model"])
    layout_map = kd.LayoutMap(mesh)
    layout_map[".*/(recurrent_)?kernel"] = (None, "model")
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


@pytest.mark.parametrize(
    ("make", "rows", "local"),
    [
        slow(kd.DataParallel, 16, 2, id="data parallel"),
        slow(kd.DataParallel, 6, 6, id="rows that the axis does not divide"),
        slow(fsdp, 16, 2, id="FSDP"),
        pytest.param(tensor_parallel, 16, 8, id="tensor parallel"),
    ],
)
def test_numbers_are_those_of_one_device(make, rows, local, rows_of_calls, monkeypatch):
    with monkeypatch.context() as on_cpu:
        on_cpu.setattr(keras_rnn, "_is_gpu_available", lambda: False)
        expected = trained(None, rows)
    assert rows_of_calls == []
    found = trained(make(), rows)
    assert rows_of_calls[-2:] == [local, local]
    for of_one_device, of_eight in zip(expected, found, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), of_one_device, of_eight)


def test_other_dtypes_are_computed_by_a_loop(rows_of_calls):
    """JAX's call of cuDNN fails for them when it is lowered, without a layer's being able to do something else."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with kd.DataParallel().scope():
            model = recurrent()
            assert model.predict_on_batch(np.ones((8, LENGTH, WIDTH))).shape == (8, 4)
    finally:
        keras.config.set_dtype_policy("float32")
    assert rows_of_calls == []


def test_a_call_inside_shard_map_is_local_already(rows_of_calls):
    distribution = kd.DataParallel()
    sharding = distribution.batch_sharding((16, LENGTH, WIDTH))
    size = rnn.get_num_params_in_lstm(WIDTH, UNITS, 1, False)

    def step(x):
        state, lengths = jax.numpy.zeros((1, x.shape[0], UNITS)), jax.numpy.full(x.shape[0], LENGTH, "int32")
        outputs = rnn.lstm(x, state, state, jax.numpy.ones(size), lengths, WIDTH, UNITS, 1, 0.0, False)
        return jax.tree.leaves(outputs)[0]

    with distribution.scope():
        by_rows = jax.shard_map(
            step, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
        )
        assert by_rows(np.ones((16, LENGTH, WIDTH), "float32")).shape == (16, LENGTH, UNITS)
    assert rows_of_calls == [2]


@pytest.mark.compiler
@pytest.mark.usefixtures("full_compilation")
@needs_cuda
@pytest.mark.parametrize("axes", [slow("data:8"), "data:4,model:2"])
def test_compiled_for_gpus_cudnn_computes_the_rows_of_each_device(axes, monkeypatch):
    texts = []

    original = compilation._compile

    def compile_and_keep(*arguments):
        result = original(*arguments)
        texts.append(result[0].as_text())
        return result

    monkeypatch.setattr(compilation, "_compile", compile_and_keep)
    mesh = kd.create_device_mesh(axes, devices=kd.target("h100:8"))
    rows = 64 // mesh.axis_sizes["data"]
    planned = kd.plan(recurrent, kd.Distribution(mesh, "data"), 64)
    assert {(each.kind, each.axes) for each in planned.traffic} == {("all-reduce", ("data",))}
    gradients = 2 * planned.memory.weights * (1 - rows / 64)
    assert gradients <= planned.wire_bytes <= 1.05 * gradients  # cuDNN has a second bias, which has a gradient too
    forward = [line for line in texts[0].splitlines() if '"cudnn_rnn_ffi"' in line]
    backward = [line for line in texts[0].splitlines() if '"cudnn_rnn_bwd_ffi"' in line]
    assert len(forward) == len(backward) == 2
    assert sum(f"(f32[{rows},{LENGTH},{UNITS}]" in line for line in forward) == 1
    assert sum(f"(f32[{rows},{LENGTH},{2 * UNITS}]" in line for line in forward) == 1
    assert any("cudnn_rnn_ffi" in note for note in planned.notes)
    assert any("estimate" in note for note in planned.notes)

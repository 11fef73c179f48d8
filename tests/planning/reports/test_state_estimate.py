"""Estimates of state are what plans report, and the fewest devices are those whose memory holds it."""

import dataclasses

import keras
import pytest

import keras_dist as kd
from keras_dist._report.units import bytes_text
from keras_dist.planning.compiling.abstract_step import bytes_on_a_device, prepared_step
from keras_dist.planning.hardware.registry import HardwareRegistry
from keras_dist.planning.reports import state_estimate
from keras_dist.planning.reports.state_estimate import estimate_state, state_text
from keras_dist.planning.search.by_strategy import plans_by_strategy


def build():
    tokens = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(4096, 256, name="table")(tokens)
    x = keras.layers.Dense(1000, activation="relu", name="up")(x)  # 8 divides 1000, 16 does not
    x = keras.layers.BatchNormalization(name="norm")(x)
    model = keras.Model(tokens, keras.layers.Dense(48, name="head")(x), name="model")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def builder_under(dtype):
    def built_under():
        keras.config.set_dtype_policy(dtype)
        try:
            return build()
        finally:
            keras.config.set_dtype_policy("float32")

    return built_under


def step_state(builder, distribution) -> list[int]:
    """Bytes on a device of what a train step of a distribution has: trained and other weights, optimizer state."""
    with prepared_step(builder, distribution, 8, "train") as step:
        return [sum(map(bytes_on_a_device, part)) for part in step.state_specs()[:3]]


@pytest.mark.parametrize(("missing", "fewest"), [(0, 8), (1, 16)])
def test_fewest_devices_hold_what_a_step_under_fsdp_has(missing, fewest, monkeypatch):
    trained, others, optimizer = step_state(build, kd.FullyShardedDataParallel())
    needed = 2 * trained + others + optimizer  # weights, and gradients of those that are trained
    exact = dataclasses.replace(kd.hardware["h100"], name="exact", memory_bytes=needed - missing)
    tiny = dataclasses.replace(exact, name="tiny", memory_bytes=1)
    monkeypatch.setattr(state_estimate, "hardware", HardwareRegistry([exact, tiny, kd.hardware["cpu"]]))
    state = estimate_state(build, "train")
    assert state.devices == {"exact": fewest, "tiny": None}
    assert "more" in state_text({"float32": state})


def test_state_is_that_of_a_step_whose_state_is_not_sharded():
    states = {}
    for dtype in ("float32", "mixed_bfloat16", "bfloat16"):
        trained, others, optimizer = step_state(builder_under(dtype), kd.DataParallel())
        states[dtype] = state = estimate_state(builder_under(dtype), "train")
        assert (state.weights, state.gradients, state.optimizer_state) == (trained + others, trained, optimizer)
    assert states["mixed_bfloat16"] == states["float32"]
    assert 2 * states["bfloat16"].gradients == states["float32"].gradients
    assert states["float32"].weights - states["float32"].gradients == 4 * 2 * 1000  # moving means and variances
    assert (state.optimizer, state.parameters) == ("Adam", states["float32"].weights // 4)
    text = state_text(states)
    assert "sets its dtypes itself" not in text
    assert bytes_text(states["bfloat16"].optimizer_state) in text


def test_model_that_sets_its_own_dtypes_is_reported():
    text = state_text(dict.fromkeys(("float32", "bfloat16"), estimate_state(build, "predict")))
    assert "sets its dtypes itself" in text
    assert "gradients" not in text


def test_plans_of_strategies_are_those_of_the_mesh_with_the_least_state():
    plans, notes = plans_by_strategy(build, 8, "cpu:8", "train", ("fsdp", "tp"))
    assert [*plans] == ["FSDP", "TP"]
    states = {}
    for size in (2, 4, 8):
        mesh = kd.create_device_mesh({"data": 8 // size, "model": size})
        layout_map = kd.tensor_parallel_layout_map(build, mesh)
        states[size] = sum(step_state(build, kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")))
    assert plans["TP"].memory.weights + plans["TP"].memory.optimizer == min(states.values()) < max(states.values())
    assert states[plans["TP"].mesh.axis_sizes["model"]] == min(states.values())
    held = step_state(build, kd.FullyShardedDataParallel())
    assert plans["FSDP"].memory.weights + plans["FSDP"].memory.optimizer == sum(held)
    assert plans["FSDP"].memory.temporaries > 0
    assert notes == []

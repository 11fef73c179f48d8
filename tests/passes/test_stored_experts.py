"""Mixtures of experts of few tokens, outside of train steps: computed where the weights of experts are stored."""

import jax
import keras
import numpy as np
import pytest
from passes.test_experts import LAYERS, assert_same_numbers, computed
from support.expert_layers import CHOSEN, EXPERTS, WIDTH, inputs_and_layer
from support.keras_scenarios import start_anew
from support.slow_cases import slow_unless
from support.strategy_models import fsdp

import keras_dist as kd

MESH = "replica:4,fsdp:2"
FAST = {("ThreeOperands", (1, 1))}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=slow_unless((name, shape) in FAST, name).marks)
        for name in LAYERS
        for shape in ((1, 1), (8, 3), (13, 3))
    ],
)
def test_numbers_are_those_of_all_experts(name, shape):
    expected, _ = computed(LAYERS[name], (*shape, WIDTH), "dense")
    start_anew()
    found, (call,) = computed(LAYERS[name], (*shape, WIDTH), "auto", distribution=fsdp(MESH))
    num_rows = {(1, 1): 1, (8, 3): 8 * 3 // 8, (13, 3): 13 * 3 // 2}[shape]  # 13 rows are not sharded
    assert (call.form, call.rows // call.num_chosen) == ("chosen weights" if shape == (1, 1) else "blocks", num_rows)
    assert_same_numbers(found, expected)


def test_other_experts_do_not_count():
    """Each device looks up weights, also if it has none of the chosen experts."""
    start_anew()
    with fsdp(MESH).scope():
        x, layer = inputs_and_layer(LAYERS["ThreeOperands"], (1, 1, WIDTH), "same")
        model = keras.Sequential([layer])
        expected = model.predict(x, verbose=0)
        _, chosen = jax.lax.top_k(x[0, 0] @ np.asarray(layer.router), CHOSEN)
        others = [each for each in range(EXPERTS) if each not in chosen]
        for weight in (layer.up, layer.down):
            values = np.array(weight)
            values[others] = np.nan
            weight.assign(values)
        np.testing.assert_array_equal(model.predict(x, verbose=0), expected)


@pytest.mark.parametrize(
    ("up", "down", "shape"),
    [
        ((None, "model", None), ("model", None, None), (6, 1)),
        ((None, "model", None), (None, None, "model"), (6, 3)),
        ((None, "model", None), (None, None, "model"), (1, 1)),
    ],
)
def test_dims_that_rules_shard_and_devices_cannot_follow(up, down, shape):
    """The experts are sharded over the axis of the rules, too."""
    expected, _ = computed(LAYERS["ThreeOperands"], (*shape, WIDTH), "dense")
    start_anew()
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:3,model:2", devices=6))
    layout_map[".*up"], layout_map[".*down"] = up, down
    found, _ = computed(LAYERS["ThreeOperands"], (*shape, WIDTH), "auto", distribution=fsdp(layout_map=layout_map))
    assert_same_numbers(found, expected)

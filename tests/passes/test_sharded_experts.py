"""Mixtures of experts whose weights are sharded over an axis of the mesh (tensor parallelism)."""

import pytest
from passes.test_experts import LAYERS, assert_near, assert_same_numbers, computed
from support.expert_layers import CHOSEN, EXPERTS, HIDDEN, WIDTH, inputs_and_layer, rules_for_width_and_experts
from support.keras_scenarios import start_anew
from support.slow_cases import slow_unless

import keras_dist as kd

SHAPE = 8, 9, WIDTH
NUM_ROWS = 8 * 9  # of one choice, on all devices
BY_WIDTH = {
    "Mixtral",
    "Gemma 4",
    "GPT-OSS",
    "ThreeOperands",
    "MaskedProbabilities",
    "MaskedScores",
    "OneExpert",
    "ChoiceByChoice",
}


def distribution_with(name, dims, mesh="data:4,model:2"):
    """Shards the dims of experts' weights that have one of some sizes: the first such dim of each."""
    start_anew()
    _, layer = inputs_and_layer(LAYERS[name], SHAPE)
    layout_map = kd.LayoutMap(kd.create_device_mesh(mesh))
    for variable in layer.weights:
        shape = tuple(variable.shape)
        dim = next((dim for dim, size in enumerate(shape) if size in dims and (dim == 0) == (EXPERTS in dims)), None)
        if shape[0] == EXPERTS and len(shape) > 1 and dim is not None:
            layout_map[variable.path] = [None if each != dim else "model" for each in range(len(shape))]
    assert len(layout_map)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


FAST = [
    ("Mixtral", (EXPERTS,)),
    ("GPT-OSS", (HIDDEN,)),
    ("NormalizedExperts", (HIDDEN, 2 * HIDDEN)),
]


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        pytest.param(name, dims, marks=slow_unless((name, dims) in FAST, name).marks)
        for name in LAYERS
        for dims in ((EXPERTS,), (HIDDEN,), (HIDDEN, 2 * HIDDEN), (WIDTH,))
    ],
)
def test_numbers_are_those_of_all_experts(name, dims):
    expected, _ = computed(LAYERS[name], SHAPE, "dense")
    found, (call,) = computed(LAYERS[name], SHAPE, "auto", distribution=distribution_with(name, dims))
    assert (call.form, call.reason) == ("blocks", None)
    # An axis that shards hidden values leaves each device with all rows, and another one with those of its experts.
    is_by_width = dims == (HIDDEN,) and name in BY_WIDTH
    assert call.rows == NUM_ROWS * call.num_chosen // (4 if is_by_width else 8)
    assert_same_numbers(found, expected)


@pytest.mark.slow
def test_an_axis_that_does_not_divide_the_experts_gathers_their_weights():
    expected, _ = computed(LAYERS["GPT-OSS"], SHAPE, "dense")
    distribution = distribution_with("GPT-OSS", (2 * HIDDEN,), "data:2,model:4")
    found, (call,) = computed(LAYERS["GPT-OSS"], SHAPE, "auto", distribution=distribution)
    assert call.rows == NUM_ROWS * CHOSEN // 2
    assert_near(found, expected, 5e-6)


@pytest.mark.slow
def test_two_axes_shard_width_and_experts():
    start_anew()
    layout_map = rules_for_width_and_experts("data:2,model:2,expert:2")
    distribution = kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    expected, _ = computed(LAYERS["ThreeOperands"], SHAPE, "dense")
    found, (call,) = computed(LAYERS["ThreeOperands"], SHAPE, "auto", distribution=distribution)
    assert call.rows == NUM_ROWS * CHOSEN // 4
    assert_near(found, expected, 5e-6)

"""Lookups and sums by index, and windows along sharded dims: the numbers of one device where XLA's partitioner errs."""

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


def by_position(combine):
    """A function of the activations by position and row, and of the segment of each position."""

    def apply(x):
        combined = combine(ops.transpose(x, (1, 0, 2)), np.arange(x.shape[1]) // 3)
        return ops.transpose(combined, (1, 0, 2))

    return apply


def tokens(x, count):
    return ops.reshape(x, (-1, WIDTH))[:count]


def looked_up(x):
    """Looks up rows of a table of activations for an odd number of tokens."""
    count = ROWS * x.shape[1] - 3
    table, indices = ops.sin(ops.mean(x, 0)[:5]), ops.cast(2 * ops.abs(tokens(x, count)[:, 0]), "int32") % 5
    return x + ops.mean(ops.take(table, indices, axis=0) * tokens(x, count), 0)


def sent_to_experts(x):
    count = ROWS * x.shape[1] - 3
    return ops.segment_sum(tokens(x, count), 7 * ops.arange(count) % ROWS, ROWS)


SEGMENTS = (LENGTH + 2) // 3
FUNCTIONS = {
    "segment_sum": by_position(lambda x, ids: ops.segment_sum(x, ids, SEGMENTS)),
    "segment_max": by_position(lambda x, ids: ops.segment_max(x, ids, SEGMENTS)),
    "scatter": by_position(lambda x, ids: ops.scatter(ids[:, None], x, (SEGMENTS, ROWS, WIDTH))),
    "scatter_update": by_position(
        lambda x, ids: ops.scatter_update(ops.zeros((SEGMENTS, ROWS, WIDTH)), ids[:, None], x, "add")
    ),
    "segment_sum of tokens": sent_to_experts,
    "take": looked_up,
}


@pytest.mark.parametrize(("name", "strategy"), crossed(FUNCTIONS, ["tensor parallel", "context parallel", "all"]))
def test_indices_in_unequal_shards(name, strategy):
    """XLA adds the padding of shards to sums by index, among them the gradients of lookups."""
    function = FUNCTIONS[name]
    expected = trained(function, LENGTH, None)
    assert_same_numbers(trained(function, LENGTH, distribution_of(strategy)), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("length", [8, 13])
@pytest.mark.parametrize("options", [{"microbatches": 2}, {"reduce_dtype": "float32"}])
def test_gradients_of_lookups_that_are_reduced_later(options, length):
    """XLA ends the process for a sum by index, where rows are shards and positions and columns are sharded."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 32, (8, length)), random.normal(size=(8, 3))

    def fitted(distribution):
        start_anew()
        with scope(distribution):
            table = layers.Embedding(32, WIDTH, name="table")
            pool = layers.GlobalAveragePooling1D()
            model = keras.Sequential(
                [keras.Input((length,), dtype="int32"), table, pool, layers.Dense(3, name="dense")]
            )
            model.compile("sgd", "mse")
            return model.train_on_batch(x, y), model.get_weights()

    layout_map = kd.LayoutMap(kd.create_device_mesh("data:2,context:2,model:2"))
    layout_map["table/embeddings"] = None, "model"
    layout_map["table/output"] = "data", "context", "model"
    layout_map["dense/kernel"] = "model", None
    distribution = kd.ModelParallel(
        layout_map=layout_map,
        batch_dim_name="data",
        sequence_dim_name="context",
        step_options=kd.StepOptions(**options),
    )
    assert_same_numbers(fitted(distribution), fitted(None), 1e-5)


ALONG_SEQUENCES = {
    "max_pool": lambda x: ops.max_pool(x, 3, 1, padding="same"),
    "adaptive_max_pool": lambda x: ops.repeat(ops.adaptive_max_pool(x, 6), 2, axis=1),
    "fft2": lambda x: ops.fft2((x, ops.zeros_like(x)))[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sequence parallel", "all"])
@pytest.mark.parametrize("name", ALONG_SEQUENCES)
def test_windows_and_transforms_along_a_dim_that_a_rule_shards(name, strategy):
    """XLA's gradient of a maximum of overlapping windows is wrong."""
    function, distribution = ALONG_SEQUENCES[name], distribution_of(strategy, ["applied/up", "applied"])
    assert_same_numbers(trained(function, 12, distribution), trained(function, 12, None), 1e-5)

"""Mixtures of experts that are sharded over axes of the batch (expert parallelism)."""

from contextlib import nullcontext

import jax
import keras
import numpy as np
import pytest
from passes.test_experts import LAYERS, assert_same_numbers, computed, model_of
from support.expert_layers import CHOSEN, EXPERTS, SPARSE, WIDTH, rules_for_width_and_experts
from support.keras_scenarios import start_anew
from support.slow_cases import slow, slow_unless

import keras_dist as kd
from keras_dist.steps.step_state import recorded_calls

SHAPE = 8, 9, WIDTH
NUM_ROWS = 8 * 9 * CHOSEN // 8  # that a device computes on average


def fsdp(mesh="data:4,expert:2", expert_dim_name="expert", **arguments):
    start_anew()
    mesh = kd.create_device_mesh(mesh)
    return kd.FullyShardedDataParallel(
        mesh, shard_axis=mesh.axis_names, expert_dim_name=expert_dim_name, min_shard_bytes=0, **arguments
    )


def assert_equal_to_dense(name, distribution, shape=SHAPE, exchange="tokens over 'expert'"):
    expected, _ = computed(LAYERS[name], shape, "dense")
    found, (call,) = computed(LAYERS[name], shape, "auto", distribution=distribution)
    assert (call.form, call.reason, call.exchange) == ("blocks", None, exchange)
    assert_same_numbers(found, expected)
    return call


@pytest.mark.parametrize("name", [slow_unless(name == "GPT-OSS", name) for name in LAYERS])
def test_tokens_are_sent_to_experts(name):
    call = assert_equal_to_dense(name, fsdp())
    assert call.rows == NUM_ROWS * call.num_chosen // CHOSEN


@pytest.mark.parametrize(
    "distribution",
    [
        slow(lambda: fsdp(reshard_after_forward=True)),
        slow(lambda: fsdp("data:8", "data")),
        lambda: fsdp("data:2,a:2,b:2", ("a", "b")),
    ],
    ids=["regathered", "all", "two axes"],
)
def test_distributions_that_shard_experts(distribution, monkeypatch):
    distribution = distribution()
    names = distribution.expert_dim_name
    names = (names,) if isinstance(names, str) else names
    sizes = np.prod([distribution.device_mesh.axis_sizes[name] for name in names])
    if EXPERTS % sizes:
        monkeypatch.setattr("support.expert_layers.EXPERTS", 8)
    assert_equal_to_dense("ThreeOperands", distribution, exchange=f"tokens over {', '.join(map(repr, names))}")


@pytest.mark.slow
def test_a_rule_shards_experts_and_another_their_width():
    start_anew()
    layout_map = rules_for_width_and_experts("data:2,expert:2,model:2")
    distribution = kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", expert_dim_name="expert")
    call = assert_equal_to_dense("ThreeOperands", distribution, (8, 3, WIDTH))
    assert call.rows == 8 * 3 * CHOSEN // 4  # two devices share the work for a row


@pytest.mark.slow
def test_tokens_that_are_not_sharded_are_computed_by_the_devices_of_their_experts():
    call = assert_equal_to_dense("ThreeOperands", fsdp(), (13, 3, WIDTH))
    assert call.rows == 13 * 3 * CHOSEN // 2


@pytest.mark.slow
def test_weights_are_sent_to_many_tokens():
    """Experts have 6 (16 + 8) 8 numbers, and a token sends and receives 2 choices of 16."""
    assert_equal_to_dense("ThreeOperands", fsdp(), shape=(64, 9, WIDTH), exchange="weights over 'expert'")


@pytest.mark.slow
@pytest.mark.parametrize("remat", [None, "full"])
def test_training_and_evaluation(remat):
    def trained(distribution):
        with distribution.scope(), recorded_calls() as calls, keras.RematScope(remat) if remat else nullcontext():
            model = model_of(SPARSE["ThreeOperands"]())
            random = np.random.default_rng(0)
            for variable in model.weights:
                variable.assign(random.normal(size=variable.shape))
            x, y = random.normal(size=(8, 9, WIDTH)).astype("float32"), np.ones((8, 9, 2), "float32")
            losses = model.fit(x, y, batch_size=8, epochs=3, verbose=0).history["loss"]
            return [*losses, model.evaluate(x, y, batch_size=8, verbose=0)], calls

    start_anew()
    expected, _ = trained(kd.DataParallel(kd.create_device_mesh("data:1", devices=jax.devices()[:1])))
    found, calls = trained(fsdp())
    assert {call.exchange for call in calls} == {"tokens over 'expert'"}
    np.testing.assert_allclose(found, expected, rtol=1e-5)

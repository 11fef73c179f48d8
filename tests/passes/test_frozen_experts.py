"""Mixtures whose weights are not trained: no gradients of them are computed, and weights are sent fewer times."""

import jax
import keras
import numpy as np
import pytest
from passes.test_exchanged_experts import fsdp
from support.expert_layers import SPARSE, WIDTH
from support.keras_scenarios import start_anew
from support.slow_cases import slow

import keras_dist as kd
from keras_dist._keras.training_state import state_variables
from keras_dist.mixtures.grouped_products import grouped_weight_gradient
from keras_dist.mixtures.rounds import EXTRA_ROUNDS
from keras_dist.steps.step_state import recorded_calls
from keras_dist.steps.steps import stateless_step

LENGTH = 18


def sharding_experts():
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:4,model:2"))
    layout_map[".*/(up|down)"] = "model", None, None
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


def traced_step(distribution, trainable, before=True, step="train"):
    """A train step, traced, and what mixtures it has; with a layer that is trained `before` the experts, or none."""
    with distribution.scope(), recorded_calls() as calls:
        inputs = keras.Input((LENGTH, WIDTH))
        x = keras.layers.Dense(WIDTH)(inputs) if before else inputs
        model = keras.Model(inputs, keras.layers.Dense(2)(SPARSE["ThreeOperands"](trainable=trainable)(x)))
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        state = [[variable.value for variable in part] for part in state_variables(model, step)]
        batch = np.ones((8, LENGTH, WIDTH), "float32"), np.ones((8, LENGTH, 2), "float32")
        traced = jax.jit(stateless_step(model, step)).trace(state, distribution.distribute_batch(batch))
    return traced, [call.exchange for call in calls]


@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize(
    ("distribution", "has_rounds"),
    [slow(kd.DataParallel, False), slow(fsdp, True), (sharding_experts, True)],
    ids=["all experts", "exchange", "shards of experts"],
)
def test_no_gradients_of_frozen_weights_are_computed(distribution, has_rounds):
    """Neither with those of rows, nor in the loop over further rounds."""

    def rounds_with_sums(trainable):
        start_anew()
        text = traced_step(distribution(), trainable)[0].lower().compile().as_text()
        lines = (line for line in text.splitlines() if grouped_weight_gradient.__name__ in line)
        return {EXTRA_ROUNDS in line for line in lines}

    assert rounds_with_sums(trainable=True) == {False, has_rounds}
    assert rounds_with_sums(trainable=False) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainable", "before", "options", "step", "sent"),
    [
        (True, True, {}, "train", "tokens"),
        (False, True, {}, "train", "weights"),
        (False, True, {"reshard_after_forward": True}, "train", "tokens"),
        (False, False, {}, "train", "tokens"),
        (False, True, {}, "test", "tokens"),
    ],
    ids=["trained", "frozen", "frozen and gathered again", "no gradients of rows", "evaluation"],
)
def test_what_is_sent_depends_on_gradients(trainable, before, options, step, sent):
    """Experts have 6 (2 x 16 x 8 + 8) = 1584 numbers, sent once, or twice with gradients or if gathered again.

    The 18 tokens of a device have 2 rows of 16 + 1 numbers and 2 results of 16: 1188 in all, or twice with gradients.
    """
    start_anew()
    _, (exchange,) = traced_step(fsdp(**options), trainable, before, step)
    assert exchange == f"{sent} over 'expert'"

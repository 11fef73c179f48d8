"""Mixtures of experts: computed for chosen experts only, with the numbers of all experts."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.expert_layers import EXPERTS, SPARSE, WIDTH, hub_layers, inputs_and_layer
from support.keras_scenarios import start_anew
from support.slow_cases import slow_unless

import keras_dist as kd
from keras_dist.steps.step_state import recorded_calls

ROUTINGS = "uniform", "skewed", "same"
LAYERS = {**hub_layers(), **SPARSE}


def computed(build, shape, experts, routings=ROUTINGS, devices=8, dtype="float32"):
    """Outputs and gradients of a layer for each routing, and how its mixtures were computed."""
    start_anew()
    mesh = kd.create_device_mesh(f"data:{devices}", devices=jax.devices()[:devices])
    distribution = kd.DataParallel(mesh, step_options=kd.StepOptions(experts=experts))
    found = []
    with distribution.scope(), recorded_calls() as calls:
        for routing in routings:
            x, layer = inputs_and_layer(build, shape, routing)
            if not found:
                step = compiled_step(layer)
            state = [v.value for v in layer.trainable_variables], [v.value for v in layer.non_trainable_variables]
            found.append(step(*state, jnp.asarray(x, dtype)))
    return jax.tree.map(np.asarray, found), calls


def compiled_step(layer):
    options = {"training": True} if "training" in inspect.signature(layer.call).parameters else {}

    @jax.jit
    def step(trained, others, x):
        def loss(trained, x):
            outputs, _, losses = layer.stateless_call(trained, others, x, return_losses=True, **options)
            outputs = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
            return jnp.sum(outputs * jnp.cos(jnp.arange(WIDTH))) + sum(losses), outputs

        (_, outputs), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(trained, x)
        return outputs, gradients

    return step


def assert_near(found, expected, bound):
    for mine, its in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.max(np.abs(mine - its)) <= bound * max(np.max(np.abs(its)), 1e-3)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_numbers_are_those_of_all_experts(name, devices):
    shape = (8, 9, WIDTH)
    expected, calls = computed(LAYERS[name], shape, "dense", devices=devices)
    assert calls == []
    found, calls = computed(LAYERS[name], shape, "auto", devices=devices)
    assert [(call.form, call.reason, call.num_experts) for call in calls] == [("blocks", None, EXPERTS)]
    assert calls[0].rows == 8 * 9 * calls[0].num_chosen // devices
    for (outputs, gradients), (expected_outputs, expected_gradients) in zip(found, expected, strict=True):
        assert_near(outputs, expected_outputs, 1e-6)
        assert_near(gradients, expected_gradients, 5e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (13, 3)], ids=str)
@pytest.mark.parametrize("name", [slow_unless(name in ("GPT-OSS", "ThreeOperands"), name) for name in LAYERS])
def test_few_tokens_and_unequal_rows(name, shape):
    expected, _ = computed(LAYERS[name], (*shape, WIDTH), "dense", ["uniform"])
    found, calls = computed(LAYERS[name], (*shape, WIDTH), "auto", ["uniform"])
    assert [call.form for call in calls] == ["chosen weights" if shape == (1, 1) else "blocks"]
    assert_near(found, expected, 5e-6)

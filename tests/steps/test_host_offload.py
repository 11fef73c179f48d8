"""Optimizer state and activations in the memory of the hosts: where they are, and the numbers."""

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.slow_cases import crossed
from support.strategy_models import fsdp, has_layouts_of

import keras_dist as kd
from keras_dist._keras.training_state import lent

random = np.random.default_rng(0)
X = random.normal(size=(32, 256)).astype("float32")
Y = (X @ random.normal(size=(256, 4)) / 16).astype("float32")
ON_HOST = kd.StepOptions(offload="optimizer")
STRATEGIES = {"DP": kd.DataParallel, "ZeRO-1": lambda: kd.DataParallel(shard_optimizer_state=True), "FSDP": fsdp}


def build(optimizer="adam", model_class=keras.Sequential, **compile_options):
    keras.utils.set_random_seed(0)
    blocks = [layers.Dense(256, "tanh", name=f"dense_{number}") for number in range(3)]
    model = model_class([keras.Input((256,)), *blocks, layers.Dense(4, name="head")])
    model.compile(optimizer, "mse", **compile_options)
    return model


def losses(model, epochs=2):
    return model.fit(X, Y, 16, epochs=epochs, verbose=0, shuffle=False).history["loss"]


def memory_kinds(model):
    """The memory that state of the optimizer is in, for large weights and for all other variables."""
    large, other = set(), set()
    for variable in model.optimizer.variables:
        (large if np.prod(variable.shape) > 2**14 else other).add(variable.value.sharding.memory_kind)
    return large, other


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-3, amsgrad=True, clipnorm=1.0, use_ema=True, weight_decay=1e-3),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)),
    "accumulating": lambda: keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2),
}


FAST = {("ZeRO-1", "scaled"), ("FSDP", "accumulating")}


@pytest.mark.parametrize(("strategy", "optimizer"), crossed(STRATEGIES, OPTIMIZERS, fast=FAST))
def test_state_in_host_memory_leaves_losses_unchanged(strategy, optimizer):
    make_optimizer = OPTIMIZERS[optimizer]
    expected = losses(build(make_optimizer()))
    distribution = STRATEGIES[strategy]().with_step_options(ON_HOST)
    with distribution.scope():
        model = build(make_optimizer())
        model.optimizer.build(model.trainable_variables)
        before = [lent(variable.value) for variable in model.optimizer.variables]
        np.testing.assert_allclose(losses(model), expected, rtol=1e-5)
    assert memory_kinds(model) == ({"pinned_host"}, {"device"})
    assert has_layouts_of(distribution, model.optimizer.variables)
    assert all(value.is_deleted() for value in before)  # donated, so the hosts hold state once


class Eager(keras.Sequential):
    """A train step that the user defines."""

    def train_step(self, state, data):
        return super().train_step(state, data)


@pytest.mark.slow
@pytest.mark.parametrize(("model_class", "eager"), [(Eager, False), (keras.Sequential, True)])
def test_other_steps_fetch_state_too(model_class, eager):
    expected = losses(build(), epochs=1)
    with kd.DataParallel(step_options=ON_HOST).scope():
        model = build(model_class=model_class, run_eagerly=eager)
        np.testing.assert_allclose(losses(model, epochs=1), expected, rtol=1e-5)
        assert memory_kinds(model)[0] == {"pinned_host"}


def test_state_moves_to_the_host_and_back():
    expected = losses(build(), epochs=3)
    for first, second in [(kd.StepOptions(), ON_HOST), (ON_HOST, kd.StepOptions())]:
        with kd.DataParallel(step_options=first).scope():
            model = build()
            found = losses(model, epochs=1)
        with fsdp().with_step_options(second).scope():
            kd.redistribute(model)
            found += losses(model)
            assert memory_kinds(model)[0] == {"pinned_host" if second is ON_HOST else "device"}
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_is_taken_on_with_state_elsewhere(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    expected = losses(build(), epochs=3)

    def train(options, epochs):
        with kd.DataParallel(step_options=options).scope():
            callback = kd.TrainingCheckpoint(tmp_path)
            history = build().fit(X, Y, 16, epochs=epochs, verbose=0, shuffle=False, callbacks=[callback])
        return history.history["loss"]

    found = train(ON_HOST, 1) + train(kd.StepOptions(), 2) + train(ON_HOST, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_activations_in_host_memory_leave_losses_unchanged():
    def deep():
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((256,))
        for _ in range(3):
            x = layers.Add()([x, layers.Dense(256)(layers.Dropout(0.2)(layers.Dense(64, "gelu")(x)))])
        model = keras.Model(inputs, layers.Dense(4)(x))
        model.compile("adam", "mse")
        return model

    found = []
    for options in (kd.StepOptions(remat="dots"), kd.StepOptions(remat="dots", offload="activations")):
        with kd.DataParallel(step_options=options).scope():
            found.append(losses(deep()))
    assert found[0] == found[1]


def test_plans_and_coverage_do_not_count_it_as_memory_of_the_device():
    distribution = kd.DataParallel(step_options=ON_HOST)
    plan = kd.plan(build, distribution, batch=16)
    on_host = [variable for variable in plan.variables if variable.is_on_host]
    assert plan.memory.host == sum(v.bytes for v in on_host) == 6 * 256 * 256 * 4
    assert plan.memory.optimizer < 2**15
    assert "on hosts" in str(plan)
    covered = kd.explain(build, kd.DataParallel())
    assert sum(covered.device_bytes.values()) - sum(kd.explain(build, distribution).device_bytes.values()) == 8 * (
        plan.memory.host
    )


def test_devices_without_host_memory_are_an_error(monkeypatch):
    class Memoryless:
        platform = device_kind = "cpu"
        client = jax.devices()[0].client

        def addressable_memories(self):
            return []

    from keras_dist.steps import host_offload

    mesh = kd.create_device_mesh("data:8")
    device = Memoryless()
    monkeypatch.setattr(type(mesh), "backend_mesh", type("Mesh", (), {"devices": np.array([device])})())
    with pytest.raises(ValueError, match="pinned_host"):
        host_offload.require_host_memory(mesh)

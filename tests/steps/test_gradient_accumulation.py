"""`optimizer.gradient_accumulation_steps`: the numbers of Keras, with one reduction for each update."""

import functools
import math

import keras
import numpy as np
import pytest
from support.keras_scenarios import dense_model, start_anew
from support.slow_cases import slow
from support.strategy_models import MODELS, STRATEGIES, OwnStep, assert_same_numbers, fsdp, scope

import keras_dist as kd

STEPS = 3
OPTIMIZERS = {
    "AdamW": functools.partial(keras.optimizers.AdamW, weight_decay=0.1, global_clipnorm=0.5),
    "schedule": lambda **options: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5, staircase=True), momentum=0.9, **options
    ),
    "moving average": functools.partial(keras.optimizers.Lion, 0.01, use_ema=True, ema_overwrite_frequency=2),
}


def accumulating(name="AdamW"):
    return OPTIMIZERS[name](gradient_accumulation_steps=STEPS)


def rows_of(name):
    """Five batches, of which the last has fewer rows than there are devices."""
    _, x, y = MODELS[name]
    return (np.concatenate([each, each[::-1], each[:4]]) for each in (x, y))


def state_of(model):
    """All that training changes: in the middle of an accumulation, if the number of steps says so."""
    return [np.asarray(variable) for variable in (*model.weights, *model.optimizer.variables)]


def trained(build, x, y, distribution=None, optimizer="AdamW", epochs=2):
    """Losses, and the state after ten batches: three updates, and a batch that is accumulated."""
    start_anew()
    with scope(distribution):
        model = build(optimizer=accumulating(optimizer))
        history = model.fit(x, y, 8, epochs, verbose=0, shuffle=False).history
        assert int(model.optimizer.iterations) == 5 * epochs // STEPS
        return [history, state_of(model)]


@functools.cache
def trained_on_one_device(name):
    return trained(MODELS[name][0], *rows_of(name))


def two_layers_and_data():
    x = np.random.default_rng(0).normal(size=(36, 4)).astype("float32")
    return dense_model, x, x[:, :1]


@functools.cache
def two_layers_trained_on_one_device(optimizer="AdamW"):
    return trained(*two_layers_and_data(), optimizer=optimizer)


pytestmark = pytest.mark.usefixtures("shard_small_optimizer_state")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_numbers_are_those_of_one_device(name, strategy):
    build, _, _ = MODELS[name]
    actual = trained(build, *rows_of(name), STRATEGIES[strategy](build))
    assert_same_numbers(actual, trained_on_one_device(name), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["schedule", "moving average"])
def test_other_optimizers(optimizer):
    """Learning rates follow updates, and Keras changes moving averages of weights after every batch."""
    actual = trained(*two_layers_and_data(), fsdp(), optimizer)
    assert_same_numbers(actual, two_layers_trained_on_one_device(optimizer), 1e-4)


@pytest.mark.slow
def test_constraints_of_weights():
    def build(optimizer):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, kernel_constraint="unit_norm")])
        model.compile(optimizer, "mse")
        return model

    x = np.random.default_rng(0).normal(size=(36, 8)).astype("float32")
    y = np.ones((36, 16), "float32")
    assert_same_numbers(trained(build, x, y, fsdp()), trained(build, x, y), 1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2},
        slow({"reduce_gradients": "microbatch"}),
        slow({"reduce_dtype": "float32"}),
        slow({"offload": "optimizer"}),
    ],
    ids=str,
)
def test_step_options(options, monkeypatch):
    monkeypatch.setattr("keras_dist.steps.train_steps.MIN_OFFLOAD_BYTES", 256)
    distribution = fsdp(step_options=kd.StepOptions(**options))
    actual = trained(*two_layers_and_data(), distribution)
    assert_same_numbers(actual, two_layers_trained_on_one_device(), 1e-4)


class Logs(keras.Model):
    """A model whose train step adds to the logs of Keras's."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return logs | {"one": 1.0}, state


class Eager(keras.Model):
    """A model that is not compiled by XLA."""

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs, run_eagerly=True)


@pytest.mark.parametrize("kind", [slow(Logs), OwnStep, slow(Eager)])
def test_steps_that_are_not_those_of_keras(kind):
    def build(optimizer):
        inputs = keras.Input((4,))
        model = kind(inputs, keras.layers.Dense(8)(inputs))
        model.compile(optimizer, "mse")
        return model

    x, y = np.linspace(-1, 1, 36 * 4, dtype="float32").reshape(36, 4), np.ones((36, 8), "float32")
    assert_same_numbers(trained(build, x, y, fsdp()), trained(build, x, y), 1e-4)


# ------------------------------------------------------------------------------------------------- between steps


class ReadsState(keras.callbacks.Callback):
    """Keeps all state after each batch."""

    def __init__(self):
        super().__init__()
        self.states = []

    def on_train_batch_end(self, batch, logs=None):
        self.model.jax_state_sync()
        self.states.append(state_of(self.model))


@pytest.mark.parametrize("steps_per_execution", [slow(1), 2])
def test_state_can_be_read_after_every_batch(steps_per_execution):
    def states(distribution):
        build, x, y = two_layers_and_data()
        start_anew()
        with scope(distribution):
            model = build(accumulating())
            model.compile(model.optimizer, "mse", steps_per_execution=steps_per_execution)
            reader = ReadsState()
            model.fit(x, y, 8, verbose=0, shuffle=False, callbacks=[reader])
            return reader.states

    assert_same_numbers(states(fsdp()), states(None), 1e-4)


def test_train_on_batch():
    def states(distribution):
        build, x, y = two_layers_and_data()
        start_anew()
        with scope(distribution):
            model = build(accumulating())
            return [(model.train_on_batch(x[:8], y[:8]), state_of(model)) for _ in range(2 * STEPS - 1)]

    assert_same_numbers(states(fsdp()), states(None), 1e-4)


@functools.cache
def state_after_nine_batches():
    """Of one device, after three updates: the four whole batches, and then all five."""
    build, x, y = two_layers_and_data()
    start_anew()
    model = build(accumulating())
    model.fit(np.concatenate([x[:32], x]), np.concatenate([y[:32], y]), 8, verbose=0, shuffle=False)
    return state_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        None,
        STRATEGIES["TP"],
        STRATEGIES["ZeRO-1"],
    ],
)
def test_saved_and_taken_on_within_an_accumulation(others, tmp_path):
    build, x, y = two_layers_and_data()
    start_anew()
    with scope(fsdp()):
        model = build(accumulating())
        model.fit(x[:32], y[:32], 8, verbose=0, shuffle=False)
        model.save(tmp_path / "model.keras")
    with scope(others and others(build)):
        model = keras.saving.load_model(tmp_path / "model.keras")
        model.fit(x, y, 8, verbose=0, shuffle=False)
        found = state_of(model)
    assert_same_numbers(found, state_after_nine_batches(), 1e-4)


@pytest.mark.parametrize("save_freq", [slow(3), 5])
def test_checkpoint_within_an_accumulation(save_freq, tmp_path):
    """Also one that was written after the last batch of an epoch, so that no batch of the epoch is left."""

    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    def fitted(distribution, *callbacks):
        build, x, y = two_layers_and_data()
        start_anew()
        with scope(distribution):
            model = build(accumulating())
            model.fit(x, y, 8, epochs=2, verbose=0, shuffle=False, callbacks=[*callbacks])
            return state_of(model)

    def checkpoint():
        return kd.TrainingCheckpoint(str(tmp_path), save_freq=save_freq, save_on_background=False)

    pytest.importorskip("orbax.checkpoint")
    with pytest.raises(KeyboardInterrupt):
        fitted(fsdp(), checkpoint(), Stops())
    assert_same_numbers(fitted(fsdp(), checkpoint()), fitted(None), 1e-4)


def test_redistributed_within_an_accumulation():
    build, x, y = two_layers_and_data()
    start_anew()
    model = build(accumulating())
    with scope(fsdp()):
        kd.redistribute(model)
        model.fit(x[:32], y[:32], 8, verbose=0, shuffle=False)
    with scope(kd.DataParallel()):
        kd.redistribute(model)
        model.fit(x, y, 8, verbose=0, shuffle=False)
    assert_same_numbers(state_of(model), state_after_nine_batches(), 1e-4)


def test_interrupted_in_an_accumulation():
    """An exception of a callback loses nothing that was accumulated."""

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    def state(distribution):
        build, x, y = two_layers_and_data()
        start_anew()
        with scope(distribution):
            model = build(accumulating())
            with pytest.raises(KeyboardInterrupt):
                model.fit(x, y, 8, verbose=0, shuffle=False, callbacks=[Stops()])
            model.fit(x, y, 8, verbose=0, shuffle=False)
            return state_of(model)

    assert_same_numbers(state(fsdp()), state(None), 1e-4)


# --------------------------------------------------------------------------------------------- the compiled step


@pytest.mark.parametrize("strategy", [slow("DP"), "ZeRO-1", slow("FSDP")])
def test_gradients_are_sent_in_updates_only(strategy):
    build, x, y = MODELS["mixture"]
    plan = kd.plan(lambda: build(accumulating()), STRATEGIES[strategy](build), (x[:8], y[:8]))
    plain = kd.plan(lambda: build("adamw"), STRATEGIES[strategy](build), (x[:8], y[:8]))
    assert plan.wire_bytes <= 1.02 * plain.wire_bytes
    weights = 4 * sum(math.prod(v.shape) for v in plan.variables if v.part == "weights")
    each_time = [c for c in plan.collectives if "/cond/branch_1_fun" not in c.op_name and c.kind != "all-gather"]
    assert sum(c.wire_bytes for c in each_time) < 0.01 * weights  # the loss
    assert any("gradient_accumulation_steps=3" in note for note in plan.notes)
    accumulators = [v for v in plan.variables if v.path.endswith("gradient_accumulator")]
    assert sum(v.bytes for v in accumulators) == weights  # on each device


@pytest.mark.slow
def test_a_layer_computes_with_the_value_that_it_has_assigned_to_its_weight():
    """`SpectralNormalization` normalizes its kernel in `call`, after it has read it."""
    x, y = np.random.default_rng(0).normal(size=(2, 24, 8)).astype("float32")

    def losses(distribution=None):
        start_anew()
        with scope(distribution):
            wrapped = keras.layers.SpectralNormalization(keras.layers.Dense(8))
            model = keras.Sequential([keras.Input((8,)), wrapped, keras.layers.Dense(8)])
            model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
            return [float(model.train_on_batch(x[i : i + 8], y[i : i + 8])) for i in (0, 8, 16)]

    expected = losses()
    for distribution in (kd.DataParallel(), fsdp()):
        np.testing.assert_allclose(losses(distribution), expected, rtol=1e-5)

"""Optimizer state in a dtype with less precision: which state, what it does to losses, and checkpoints."""

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.slow_cases import slow
from support.strategy_models import fsdp, scope

import keras_dist as kd

random = np.random.default_rng(0)
X = random.normal(size=(64, 16)).astype("float32")
Y = (X @ random.normal(size=(16, 4))).astype("float32")
HALF = kd.StepOptions(optimizer_state_dtype="bfloat16")


def build(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), layers.Dense(64, "tanh"), layers.Dense(4)])
    model.compile(optimizer, "mse")
    return model


def dtypes(optimizer):
    """The dtypes of the state of weights, by its name."""
    return {
        variable.name.rpartition("kernel_")[2]: str(variable.dtype)
        for variable in optimizer.variables
        if "kernel_" in variable.name
    }


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: keras.optimizers.Adam(1e-2), {"momentum": "bfloat16", "velocity": "float32"}),
        slow(lambda: keras.optimizers.Adam(1e-2, beta_2=0.95), {"momentum": "bfloat16", "velocity": "bfloat16"}),
        slow(lambda: keras.optimizers.SGD(0.05, momentum=0.9), {"momentum": "bfloat16"}),
        slow(lambda: keras.optimizers.RMSprop(1e-2), {"velocity": "bfloat16"}),
        (
            lambda: keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True),
            {"momentum": "bfloat16", "average": "float32"},
        ),
    ],
)
def test_losses_change_by_no_more_than_rounding(make, expected):
    """State is rounded to 1/256 of itself, and the losses of eight epochs change by 2% at most."""
    losses = []
    for options in (kd.StepOptions(), HALF):
        with fsdp().with_step_options(options).scope():
            model = build(make())
            losses.append(model.fit(X, Y, 16, epochs=8, verbose=0, shuffle=False).history["loss"])
    assert dtypes(model.optimizer) == expected
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2)
    assert losses[1] != losses[0]


def test_a_plan_counts_it():
    plans = [
        kd.plan(lambda: build(keras.optimizers.SGD(momentum=0.9)), kd.DataParallel(step_options=options), 8)
        for options in (None, HALF)
    ]
    states = [sum(v.bytes for v in plan.variables if v.path.endswith("momentum")) for plan in plans]
    assert states[1] == states[0] / 2 > 0


@pytest.mark.parametrize("first", [kd.StepOptions(), HALF])
def test_a_checkpoint_is_taken_on_with_the_other(first, tmp_path):
    """The state that is read is that which was written, rounded."""
    second = kd.StepOptions() if first == HALF else HALF
    path = tmp_path / "model.keras"
    with fsdp().with_step_options(first).scope():
        model = build(keras.optimizers.SGD(0.05, momentum=0.9))
        model.fit(X, Y, 16, verbose=0)
        model.save(path)
        written = [np.asarray(variable.value, "float32") for variable in model.optimizer.variables]
    with fsdp().with_step_options(second).scope():
        model = keras.saving.load_model(path)
        for variable, value in zip(model.optimizer.variables, written, strict=True):
            np.testing.assert_allclose(np.asarray(variable.value, "float32"), value, rtol=2**-8)
        model.fit(X, Y, 16, verbose=0)


def test_an_optimizer_without_such_state():
    with fsdp().with_step_options(HALF).scope(), pytest.raises(ValueError, match="no effect: SGD"):
        build("sgd").fit(X, Y, 16, verbose=0)


def test_an_optimizer_that_was_built_before():
    with scope(None):
        model = build(keras.optimizers.SGD(0.05, momentum=0.9))
        model.optimizer.build(model.trainable_variables)
    with kd.DataParallel(step_options=HALF).scope():
        kd.redistribute(model)
        with pytest.raises(ValueError, match="built without it"):
            model.fit(X, Y, 16, verbose=0)


def test_something_else_than_a_dtype():
    with pytest.raises(ValueError, match="optimizer_state_dtype='int8'"):
        kd.StepOptions(optimizer_state_dtype="int8")


def test_lion_keeps_its_momentum_by_beta_2():
    steps = kd.DataParallel(step_options=kd.StepOptions(optimizer_state_dtype=jax.numpy.bfloat16)).train_steps
    betas = 0.9, 0.999
    lions = [keras.optimizers.Lion(beta_1=beta_1, beta_2=beta_2) for beta_1, beta_2 in (betas, betas[::-1])]
    assert [steps.state_dtype(lion, "momentum", "float32") for lion in lions] == ["float32", "bfloat16"]

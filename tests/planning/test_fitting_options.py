"""Step options that make a step fit: which are tried, `remat="auto"`, and what plans and `kd.auto` say of them."""

import copy
import dataclasses

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.cpu_memory import capacity_of
from support.example_plans import GIB, MEMORY, example_plan

import keras_dist as kd
from keras_dist.planning import plan as plan_module
from keras_dist.planning.fitting_options import SEARCHED, plan_with_fitting_options
from keras_dist.planning.hlo.module_costs import LargeValue
from keras_dist.planning.search.choice import NothingFitsError
from keras_dist.steps import rematerialization
from keras_dist.steps.options import OptionWithoutEffectError

pytestmark = pytest.mark.usefixtures("own_cache")

# From the cheapest: what a model of this many bytes needs with each option.
NEEDED = {
    "remat='attention'": 15,
    "remat='dots'": 12,
    "remat='full'": 10,
    "microbatches=2, reduce_gradients='microbatch', remat='full'": 9,
    "microbatches=4, reduce_gradients='microbatch', remat='full'": 8,
    "microbatches=8, reduce_gradients='microbatch', remat='full'": 7,
    "offload=('optimizer',)": 11,
    "remat='attention', offload=('optimizer',)": 6,
    "remat='dots', offload=('optimizer',)": 5,
    "remat='full', offload=('optimizer',)": 4,
    "microbatches=2, reduce_gradients='microbatch', remat='full', offload=('optimizer',)": 3,
    "microbatches=4, reduce_gradients='microbatch', remat='full', offload=('optimizer',)": 2,
    "microbatches=8, reduce_gradients='microbatch', remat='full', offload=('optimizer',)": 1.5,
}
DISTRIBUTION = kd.FullyShardedDataParallel(kd.create_device_mesh("data:2,model:4"))


def search_fully(
    capacity, without=(), searched=SEARCHED, state=1, needed=NEEDED, failing=lambda options: None, **others
):
    """Returns what is found for a capacity in GiB, and all options that were compiled or failed.

    `failing` returns the error that compiling with some options ends in. `others`: further fields of the plans.
    """
    memory = dataclasses.replace(MEMORY, weights=0, optimizer=state * GIB, temporaries=16 * GIB)

    def planned(options, size):
        placed = dataclasses.replace(memory, temporaries=int((size - state) * GIB), capacity=int(capacity * GIB))
        return example_plan(step_options=options, memory=placed, fits=size <= capacity, **others)

    compiled = []

    def compile(distribution):
        options = distribution.step_options
        for name in without:
            if getattr(options, name) not in (None, 1):
                raise OptionWithoutEffectError(name, "no effect")
        compiled.append(options.text)
        if (error := failing(options)) is not None:
            raise error
        return planned(options, needed[options.text])

    return plan_with_fitting_options(planned(kd.StepOptions(), 16), DISTRIBUTION, compile, searched), compiled


def search(*arguments, **options):
    """Returns the options found for a capacity in GiB, and all that were compiled or failed."""
    found, compiled = search_fully(*arguments, **options)
    return (found.plan.step_options.text if found.plan.fits else None), compiled


@pytest.mark.parametrize("capacity", [15, 12, 10.5, 9, 8.5, 7, 5, 2.2, 1.5, 1.4])
def test_the_cheapest_options_that_fit_are_found_by_few_compilations(capacity):
    found, compiled = search(capacity)
    assert found == next((text for text, size in NEEDED.items() if size <= capacity), None)
    assert len(compiled) <= 5
    assert len(set(compiled)) == len(compiled)


def test_state_that_exceeds_the_memory_needs_the_host():
    found, compiled = search(3.5, state=4)
    assert found is not None
    assert all("offload" in text for text in compiled)


def test_logits_are_computed_in_chunks_first():
    """If a product makes the largest value, as logits are made."""
    needed = NEEDED | {"loss_chunk=1024": 14} | {f"{text}, loss_chunk=1024": size - 1 for text, size in NEEDED.items()}
    logits = (LargeValue(GIB, "bf16[8,2048,65536]", "jit(train_step)/jvp(head)/dot_general", "fusion.9"),)
    assert search(14, needed=needed, largest_values=logits)[0] == "loss_chunk=1024"
    found, compiled = search(12, needed=needed, largest_values=logits)
    assert found == "remat='dots', loss_chunk=1024"
    assert len(compiled) <= 4
    assert search(12, without=["loss_chunk"], needed=needed, largest_values=logits)[0] == "remat='dots'"
    assert search(14, needed=needed)[0] == "remat='dots'"


def test_options_without_effect_are_left_out():
    needed = {"microbatches=2, reduce_gradients='microbatch'": 8, "microbatches=4, reduce_gradients='microbatch'": 7}
    needed["microbatches=8, reduce_gradients='microbatch'"] = 6
    assert search(7.5, without=["remat"], needed=needed)[0] == "microbatches=4, reduce_gradients='microbatch'"
    assert search(9.5, without=["microbatches"])[0] == "remat='attention', offload=('optimizer',)"
    assert search(12, searched=("remat",))[0] == "remat='dots'"
    assert search(9, searched=("remat",))[0] is None


XLA_ERROR = "UNIMPLEMENTED: Async slice only supports slicing in 1 dimension"
ERRORS = {
    f"JaxRuntimeError: {XLA_ERROR}": jax.errors.JaxRuntimeError(f"{XLA_ERROR}\n\nError encountered while ..."),
    "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory": jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory"
    ),
    "MemoryError": MemoryError(),
    "TypeError: unhashable": TypeError("unhashable"),
    "ValueError: no": ValueError("no"),
    "OptionWithoutEffectError: elsewhere": OptionWithoutEffectError("another", "elsewhere"),
}


@pytest.mark.parametrize("line", ERRORS)
def test_whatever_compiling_ends_in_the_plan_and_the_reason_remain(line):
    found, compiled = search_fully(1, failing=lambda options: ERRORS[line])
    assert found.plan.step_options == kd.StepOptions()
    assert not found.is_interrupted
    [note] = found.notes
    assert note.endswith(f". {line}")
    assert all(text in note for text in compiled)
    assert len(set(compiled)) == len(compiled) <= 5


@pytest.mark.parametrize(
    ("to_blame", "capacity", "expected", "most"),
    [
        ("offload", 7, "microbatches=8, reduce_gradients='microbatch', remat='full'", 5),
        ("offload", 6, None, 3),  # the tops of both ladders, and the host alone
        ("remat", 6.5, "microbatches=8, reduce_gradients='microbatch'", 7),
        ("microbatches", 10, "remat='full'", 6),
    ],
)
def test_the_option_because_of_which_compiling_fails_is_left_out(to_blame, capacity, expected, most):
    needed = {f"microbatches={n}, reduce_gradients='microbatch'": size for n, size in ((2, 8), (4, 7), (8, 6.5))}

    def failing(options):
        return RuntimeError("no") if getattr(options, to_blame) not in (None, 1, ()) else None

    found, compiled = search(capacity, needed={**NEEDED, **needed}, failing=failing)
    assert found == expected
    assert len(set(compiled)) == len(compiled) <= most


@pytest.mark.parametrize(
    ("rung", "expected"),
    [("remat='dots'", "remat='full'"), ("remat='full'", "microbatches=2, reduce_gradients='microbatch', remat='full'")],
)
def test_a_rung_in_between_that_fails_is_passed_over(rung, expected):
    found, _ = search_fully(12, failing=lambda options: RuntimeError("no") if options.text == rung else None)
    assert found.plan.fits
    assert found.plan.step_options.text == expected
    assert found.notes == (f"Step options that could not be compiled: {rung}. RuntimeError: no",)


def test_options_that_only_fail_together():
    def failing(options):
        return RuntimeError("no") if options.remat is not None and options.microbatches > 1 else None

    needed = {**NEEDED, "microbatches=8, reduce_gradients='microbatch'": 9.5}
    assert search(9.5, needed=needed, failing=failing)[0] == "microbatches=8, reduce_gradients='microbatch'"
    assert search(10, needed=needed, failing=failing)[0] == "remat='full'"


@pytest.mark.parametrize(("after", "expected"), [(0, None), (1, 8), (3, 4)])
def test_an_interrupted_search_returns_what_it_found(after, expected):
    """Compiled are 8 microbatches, which fit, none, which do not, and 4, which do."""
    tried = []

    def interrupted(options):
        tried.append(options)
        return KeyboardInterrupt() if len(tried) > after else None

    found, _ = search_fully(9, failing=interrupted)
    assert found.is_interrupted
    assert "interrupted" in found.notes[-1]
    assert (found.plan.step_options.microbatches if found.plan.fits else None) == expected


# ----------------------------------------------------------------------------------------------- with a real compiler


def build():
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((32, 16))
    for _ in range(3):
        y = layers.Dense(64)(x)
        for activation in ("gelu", "silu", "softplus"):  # of which the backward pass needs the inputs
            y = layers.Activation(activation)(y)
        x = x + layers.Dense(16)(y)
    model = keras.Model(inputs, x, name="deep")
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def memory():
    """Bytes that a step of 64 rows needs with each mode."""
    return {
        mode: kd.plan(build, kd.DataParallel(step_options=kd.StepOptions(remat=mode)), 64).memory.total
        for mode in (None, "dots", "full")
    }


@pytest.fixture
def auto_remat():
    return kd.DataParallel(step_options=kd.StepOptions(remat="auto"))


@pytest.mark.slow
def test_auto_is_the_cheapest_mode_that_fits(monkeypatch, memory, auto_remat):
    assert memory[None] > memory["dots"] >= memory["full"]  # they are equal with JAX 0.10
    for capacity in {memory["dots"], memory["full"]}:
        capacity_of(monkeypatch, capacity)
        planned = kd.plan(build, auto_remat, 64)
        mode = next(mode for mode, needed in memory.items() if needed <= capacity)
        assert (planned.step_options.remat, planned.fits, planned.memory.total) == (mode, True, memory[mode])


def test_training_uses_the_mode_that_fits(monkeypatch, memory, auto_remat):
    x = np.random.default_rng(0).normal(size=(128, 32, 16)).astype("float32")

    def losses():
        return build().fit(x, x[..., ::-1], 64, epochs=2, verbose=0, shuffle=False).history["loss"]

    expected = losses()
    modes = []
    original = rematerialization.Rematerialization.__init__

    def noted(self, model, mode, *arguments):
        modes.append(mode)
        original(self, model, mode, *arguments)

    monkeypatch.setattr(rematerialization.Rematerialization, "__init__", noted)
    with auto_remat.scope():
        np.testing.assert_allclose(losses(), expected, rtol=1e-5)
        assert not modes  # everything fits
        capacity_of(monkeypatch, memory["full"])
        np.testing.assert_allclose(losses(), expected, rtol=1e-5)
    assert modes[-1] == ("dots" if memory["dots"] == memory["full"] else "full")


@pytest.mark.slow
def test_a_plan_that_does_not_fit_has_the_options_that_make_it_fit(monkeypatch, memory):
    capacity_of(monkeypatch, memory["dots"])
    planned = kd.plan(build, kd.DataParallel(), 64)
    assert planned.fits is False
    assert planned.fitting_plan.step_options == kd.StepOptions(remat="dots")
    assert planned.fitting_plan.memory.total == memory["dots"]
    assert f"step_options=kd.{planned.fitting_plan.step_options}" in str(planned)
    assert planned.to_dict()["fitting_plan"]["step_options"] == repr(planned.fitting_plan.step_options)
    capacity_of(monkeypatch, 1000)
    assert "No step options make it fit" in kd.plan(build, kd.DataParallel(), 64).notes[-1]


@pytest.fixture
def failing_options(monkeypatch):
    """Returns a function that lets compiling with step options end in an error, and a list of the steps compiled."""
    original, compiled = plan_module.compile_step, []

    def fail_with(error):
        def compile_step(step, *arguments):
            compiled.append(step.distribution.step_options)
            if compiled[-1] != kd.StepOptions():
                raise copy.copy(error)  # the traceback of an error that is kept would keep the model
            return original(step, *arguments)

        monkeypatch.setattr(plan_module, "compile_step", compile_step)
        return compiled

    return fail_with


def test_a_plan_does_not_depend_on_options_that_fail(monkeypatch, failing_options):
    line = f"JaxRuntimeError: {XLA_ERROR}"
    compiled = failing_options(ERRORS[line])
    capacity_of(monkeypatch, 1e5)
    planned = kd.plan(build, kd.DataParallel(), 64)
    assert (planned.fits, planned.fitting_plan, planned.step_options) == (False, None, kd.StepOptions())
    failed = "; ".join(options.text for options in compiled[1:])
    assert planned.notes == (f"Step options that could not be compiled: {failed}. {line}",)
    automatic = kd.plan(build, kd.DataParallel(step_options=kd.StepOptions(remat="auto")), 64)
    assert automatic.step_options == kd.StepOptions()
    assert automatic.notes[0] == f"Step options that could not be compiled: remat='full'. {line}"


def test_the_error_of_the_step_that_was_asked_for_is_raised(failing_options):
    failing_options(MemoryError("too large"))
    with pytest.raises(MemoryError, match="too large"):
        kd.plan(build, kd.DataParallel(step_options=kd.StepOptions(remat="dots")), 64)


def test_an_interrupted_plan(monkeypatch, failing_options, auto_remat):
    compiled = failing_options(KeyboardInterrupt())
    capacity_of(monkeypatch, 1e5)
    for distribution in (kd.DataParallel(), auto_remat):
        planned = kd.plan(build, distribution, 64)
        assert (planned.fits, planned.fitting_plan) == (False, None)
        assert planned.notes == ("The search for step options with which it fits was interrupted.",)
    assert len(compiled) == 4
    with pytest.raises(KeyboardInterrupt):
        kd.plan(build, kd.DataParallel(step_options=kd.StepOptions(remat="dots")), 64)


def test_training_goes_on_where_modes_fail(monkeypatch, failing_options, auto_remat):
    compiled = failing_options(TypeError("unhashable"))
    capacity_of(monkeypatch, 1e5)
    with auto_remat.scope(), pytest.warns(UserWarning, match="could not be compiled: remat='full'. TypeError: unha"):
        build().fit(np.zeros((64, 32, 16)), np.zeros((64, 32, 16)), 64, verbose=0)
    assert [options.remat for options in compiled] == [None, "full"]
    failing_options(KeyboardInterrupt())
    with auto_remat.scope(), pytest.raises(KeyboardInterrupt):
        build().fit(np.zeros((64, 32, 16)), np.zeros((64, 32, 16)), 64, verbose=0)


def test_auto_does_not_depend_on_options_that_fail(monkeypatch, failing_options, memory):
    failing_options(TypeError("unhashable"))
    capacity_of(monkeypatch, memory["dots"])
    with pytest.raises(NothingFitsError, match=r"could not be compiled: .*remat='full'.* TypeError: unhash") as caught:
        kd.auto(build, 64, strategies=["dp"])
    assert [trial.plan.fits for trial in caught.value.trials] == [False]


@pytest.mark.slow
def test_auto_chooses_options_where_nothing_fits_without_them(monkeypatch, memory):
    capacity_of(monkeypatch, memory["dots"])
    choice = kd.auto(build, 64, strategies=["dp"])
    assert choice.plan.fits
    assert choice.distribution.step_options == choice.trials[0].candidate.options == choice.plan.step_options
    assert choice.plan.step_options.remat in ("dots", "full")
    assert f"step_options=kd.{choice.plan.step_options}" in choice.to_source()
    assert choice.trials[0].candidate.label.startswith("DP, remat=")
    with pytest.raises(NothingFitsError):
        kd.auto(build, 64, strategies=["dp"], search_step_options=False)

"""`kd.auto` on simulated devices: what it chooses, what it compiles, and what it reports."""

import functools
import json
import os
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.cpu_memory import capacity_of
from support.planned_models import MODELS as PLANNED
from support.planned_models import perceptron
from support.slow_cases import slow
from support.strategy_models import MODELS, assert_same_numbers, scope, transformer

import keras_dist as kd
from keras_dist.planning.compiling import compilation
from keras_dist.planning.search import choosing
from keras_dist.planning.search.candidates import STRATEGIES
from keras_dist.planning.search.choice import NothingFitsError

pytestmark = pytest.mark.usefixtures("own_cache")


def wide(width=512):
    """A model with weights that FSDP shards, and rules of tensor parallelism."""
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(64, 64, name="embedding")(tokens)
    x = layers.Dense(64, name="down")(layers.Dense(width, activation="relu", name="up")(x))
    model = keras.Model(tokens, layers.Dense(64, name="head")(x), name="wide")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.fixture
def compiled(monkeypatch):
    """The meshes of the programs that are compiled."""
    meshes = []
    original = compilation._compile

    def counted(lowered, *arguments):
        meshes.append(lowered)
        return original(lowered, *arguments)

    monkeypatch.setattr(compilation, "_compile", counted)
    return meshes


def test_the_choice_is_the_best_of_what_is_compiled(compiled):
    choice = kd.auto(wide, 32, trials=6)
    plans = [trial for trial in choice.trials if trial.plan is not None]
    assert len(plans) == len(compiled) <= 6
    assert choice.trials[0].outcome == "chosen"
    assert choice.trials[0].plan == choice.plan
    assert choice.trials[0].seconds == min(trial.seconds for trial in plans)
    assert choice.mesh == choice.distribution.device_mesh
    assert all(trial.outcome for trial in choice.trials)
    assert kd.distribution() is None


def test_the_plan_is_that_of_the_distribution():
    choice = kd.auto(wide, 32, trials=2)
    planned = kd.plan(wide, choice.distribution, 32)
    assert choice.plan.memory == planned.memory
    assert choice.plan.traffic == planned.traffic
    assert choice.plan.variables == planned.variables


@pytest.mark.slow
def test_a_second_search_compiles_nothing_and_finds_the_same(compiled):
    first = kd.auto(wide, 32, trials=4)
    count = len(compiled)
    second = kd.auto(wide, 32, trials=4)
    assert count >= 2
    assert len(compiled) == count
    assert [(t.candidate, t.seconds, t.outcome) for t in first.trials] == [
        (t.candidate, t.seconds, t.outcome) for t in second.trials
    ]
    kd.auto(functools.partial(wide, width=256), 32, trials=1)  # another program
    assert len(compiled) == count + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_chosen_distribution_trains_as_one_device_does(name):
    build, x, y = MODELS["transformer"]
    keep = {"data": 4} if name == "hsdp" else {"model": 2} if "tp" in name else None
    choice = kd.auto(transformer, (x, y), strategies=[name], keep=keep, trials=1)
    assert choice.trials[0].candidate.strategy == name
    histories = []
    for distribution in (None, choice.distribution):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        with scope(distribution):
            model = build()
            histories.append(model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history)
    assert_same_numbers(histories[1], histories[0], 1e-4)


@pytest.mark.slow
def test_a_chosen_context_parallel_distribution_trains_as_one_device_does():
    build, x, y = MODELS["transformer"]
    choice = kd.auto(build, (x, y), strategies=["fsdp", "cp"], keep={"context": 4}, trials=2)
    assert "CP" in choice.trials[0].candidate.label
    losses = []
    for distribution in (None, choice.distribution):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        with scope(distribution):
            losses.append(build().fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_the_chosen_distribution_can_be_installed():
    x, y = PLANNED["perceptron"][1]
    kd.set_distribution(kd.auto(perceptron, batch=(x, y), trials=1).distribution)
    assert len(perceptron().fit(x, y, verbose=0, batch_size=len(x)).history["loss"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet", "two branches", "perceptron", "subclassed"])
def test_models_of_all_kinds_get_a_choice(name):
    build, (x, y) = PLANNED[name]
    choice = kd.auto(build, (x, y), trials=3)
    assert choice.plan.fits
    tensor_parallel = [trial for trial in choice.trials if "tp" in trial.candidate.strategy]
    assert tensor_parallel or any("Tensor parallelism was not tried" in note for note in choice.notes)


@pytest.mark.slow
def test_memory_is_minimized():
    least = kd.auto(wide, 32, objective="memory", trials=3)
    fastest = kd.auto(wide, 32, trials=3)
    assert least.plan.memory.total <= fastest.plan.memory.total
    compiled = [trial for trial in least.trials if trial.plan is not None]
    assert least.plan.memory.total == min(trial.memory_bytes for trial in compiled)


def test_fewest_devices():
    choice = kd.auto(wide, 32, objective="devices", trials=1)
    assert choice.mesh.devices.size == 1
    assert "There is one device, so there is nothing to choose." in choice.notes
    assert choice.trials[0].candidate.label == "DP"
    assert choice.objective == "devices"
    sharded = kd.auto(wide, 32, objective="devices", strategies=["fsdp"], trials=1)
    assert sharded.mesh.devices.size == 2  # one device has nothing to shard over


@pytest.mark.slow
def test_fewest_devices_that_it_fits_on(monkeypatch):
    one = kd.auto(wide, 32, target=jax.devices()[:1], trials=1).plan.memory
    capacity_of(monkeypatch, 0.7 * one.total)
    choice = kd.auto(wide, 32, objective="devices", trials=6)
    assert choice.mesh.devices.size in (2, 4)
    assert choice.plan.fits
    assert "devices=" in choice.to_source()
    with pytest.raises(NothingFitsError, match="No candidate fits"):
        kd.auto(wide, 32, target=jax.devices()[:1], search_step_options=False)


def test_nothing_fits(monkeypatch, compiled):
    capacity_of(monkeypatch, 1000)
    with pytest.raises(NothingFitsError, match="per device for variables and batch") as caught:
        kd.auto(wide, 32)
    assert not compiled  # exact sizes suffice
    assert all(trial.outcome.startswith("cannot fit") for trial in caught.value.trials)
    assert kd.distribution() is None
    with pytest.raises(NothingFitsError, match="per device for variables and batch"):
        kd.auto(wide, "largest")  # not even one row


def test_the_most_rows_need_known_memory(monkeypatch):
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    with pytest.raises(ValueError, match=r"rows that fit are unknown, because the memory of .* is\. Pass a batch"):
        kd.auto(wide, "largest")


@pytest.mark.slow
def test_most_rows(monkeypatch):
    few = kd.auto(wide, 8, objective="memory", trials=4).plan.memory
    capacity_of(monkeypatch, 2.5 * few.total)
    choice = kd.auto(wide, "largest", trials=4)
    rows = int(choice.notes[0].partition(" ")[0])
    assert rows >= 8
    assert choice.plan.fits
    assert choice.plan.batch[0] == f"int32[{rows}, 16]"
    of_function = kd.auto(wide, lambda rows: ((rows, 16), (rows, 16)), trials=4)
    assert of_function.plan.fits


def test_a_function_that_ignores_the_number_of_rows_is_an_error():
    with pytest.raises(ValueError, match=r"returns the same batch for 8 and for .* rows"):
        kd.auto(wide, lambda rows: ((8, 16), (8, 16)), strategies=["dp"], trials=1)


def raise_at_compilation(monkeypatch, number, error):
    """Returns a list with an item for each compilation that has begun; the one of this number raises an error."""
    original, calls = compilation._compile, []

    def compile(lowered, *arguments):
        calls.append(1)
        if len(calls) == number:
            raise error
        return original(lowered, *arguments)

    monkeypatch.setattr(compilation, "_compile", compile)
    return calls


def test_an_interrupted_search_returns_the_best_so_far(monkeypatch):
    calls = raise_at_compilation(monkeypatch, 3, KeyboardInterrupt())
    choice = kd.auto(wide, 32)
    assert sum(trial.plan is not None for trial in choice.trials) == 2
    assert any("interrupted" in note for note in choice.notes)
    assert kd.distribution() is None
    calls[:] = [1, 1]
    with pytest.raises(KeyboardInterrupt):  # nothing was compiled
        kd.auto(functools.partial(wide, width=128), 32)
    assert kd.distribution() is None


@pytest.mark.parametrize("error", [slow(NotImplementedError("no such thing")), TypeError("no such thing")])
def test_a_candidate_that_cannot_be_compiled_is_passed_over(monkeypatch, error):
    raise_at_compilation(monkeypatch, 1, error)
    choice = kd.auto(wide, 32, trials=3)
    assert choice.plan.fits
    [refused] = [trial.outcome for trial in choice.trials if trial.outcome.startswith("refused: ")]
    assert "no such thing" in refused
    monkeypatch.setattr(compilation, "_compile", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(ValueError, match=r"No candidate can be planned.*no such thing"):
        kd.auto(functools.partial(wide, width=128), 32)


def test_a_target_for_which_nothing_can_be_compiled_is_passed_over(monkeypatch):
    original = compilation._model_flops

    def refusing(step, *arguments):
        if step.distribution.device_mesh.devices.size == 2:
            raise NotImplementedError("no such thing")
        return original(step, *arguments)

    monkeypatch.setattr(compilation, "_model_flops", refusing)
    choice = kd.auto(wide, 32, target=["cpu:2", "cpu:4"], objective="devices", strategies=["dp"])
    assert choice.mesh.devices.size == 4
    assert "no such thing" in choice.notes[0]
    with pytest.raises(ValueError, match="no such thing"):
        kd.auto(wide, 32, target=["cpu:2"], objective="devices", strategies=["dp"])


@pytest.mark.filterwarnings("default::UserWarning")
def test_warnings_of_the_chosen_candidate_are_shown_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kd.auto(with_constant, 32, strategies=["dp", "zero1"])
    [shown] = [each for each in caught if "embeds 1 constant" in str(each.message)]
    assert shown.filename == __file__


def with_constant():
    table = np.ones((1024, 4096), "float32")
    inputs = keras.Input((1024,))
    x = layers.Lambda(lambda x: x @ table)(layers.Dense(1024)(inputs))
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model


def test_a_strategy_that_changes_nothing_is_not_compiled_twice():
    choice = kd.auto(perceptron, 32, strategies=["tp", "tp_sp"], keep={"model": 4})
    assert [trial.candidate.label for trial in choice.trials] == ["TP"]  # rows of numbers have no sequences
    labels = {trial.candidate.label for trial in kd.auto(wide, 32, step="predict", trials=1).trials}
    assert "FSDP" in labels
    assert not any("gathering again" in label for label in labels)


def blocks(depth, kinds=1):
    """Blocks of one kind, or of two: then every second one is wider."""
    x = inputs = keras.Input((32,))
    for number in range(depth):
        x = layers.Dense(32, name=f"block{number}_down")(layers.Dense(64 * (1 + number % kinds), activation="relu")(x))
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse")
    return model


alternating = functools.partial(blocks, kinds=2)


@pytest.mark.slow
def test_blocks_that_alternate_are_compared_by_more_of_them():
    choice = kd.auto(alternating, 16, depth=6, strategies=["dp", "zero1"])
    assert choice.plan.depth == 6
    assert choice.plan.memory.weights == kd.plan(lambda: alternating(6), kd.DataParallel(), 16).memory.weights
    with pytest.raises(ValueError, match="blocks are not equal"):
        kd.auto(lambda depth: perceptron() if depth == 4 else alternating(depth), 16, depth=6, strategies=["dp"])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("of the compiler")])
def test_a_confirmation_that_ends_in_an_error_returns_the_comparison(monkeypatch, error):
    original, depths = choosing.Task.plan, []

    def failing(self, distribution, batch, depths_, report):
        depths.append(depths_)
        if depths_ == (2, 4):
            raise error
        return original(self, distribution, batch, depths_, report)

    monkeypatch.setattr(choosing.Task, "plan", failing)
    choice = kd.auto(blocks, 16, depth=6, strategies=["dp"])
    assert depths == [(1, 2), (2, 4)]
    assert choice.is_interrupted == isinstance(error, KeyboardInterrupt)
    assert choice.plan == choice.trials[0].plan
    assert choice.is_interrupted or any("RuntimeError: of the compiler" in note for note in choice.notes)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_a_search_for_rows_that_ends_in_an_error_returns_the_most_so_far(monkeypatch, error):
    few = kd.auto(perceptron, 8, strategies=["dp"]).plan.memory
    capacity_of(monkeypatch, 5 * few.total)
    original, rows = choosing.Task.plan, []

    def failing(self, distribution, batch, *arguments):
        rows.append(batch)
        if len(set(rows)) >= 3 and batch >= max(rows):
            raise error
        return original(self, distribution, batch, *arguments)

    monkeypatch.setattr(choosing.Task, "plan", failing)
    choice = kd.auto(perceptron, "largest", strategies=["dp"])
    second, third = list(dict.fromkeys(rows))[1:3]
    if isinstance(error, KeyboardInterrupt):
        assert choice.is_interrupted
        assert choice.plan.batch[0] == f"float32[{second}, 16]"
        assert choice.notes[0].startswith(f"{second} rows fit. ")
    else:
        assert choice.notes[1] == (
            f"{third} rows could not be compiled. ValueError: No candidate can be planned. DP on data:8: MemoryError"
        )


def test_the_smallest_target_of_a_list():
    choice = kd.auto(wide, 32, target=["cpu:4", "cpu:2", "cpu:8"], objective="devices", strategies=["fsdp"], trials=1)
    assert choice.mesh.devices.size == 2
    with pytest.raises(ValueError, match="Choose for one target at a time"):
        kd.auto(wide, 32, target=["v5e:2x2", "v5e:2x4"])


def test_candidates_that_trials_left_out_are_named_when_nothing_fits(monkeypatch):
    choose = functools.partial(kd.auto, wide, 32, strategies=["dp", "tp"], search_step_options=False)
    plans = {trial.candidate.label: trial.plan for trial in choose().trials}
    capacity_of(monkeypatch, plans["DP"].memory.total - 1)
    with pytest.raises(NothingFitsError, match="2 more might fit: to try them, pass trials=3"):
        choose(trials=1)
    assert choose().plan.fits


def test_depth_is_extrapolated():
    choice = kd.auto(blocks, 16, depth=6, strategies=["dp"], trials=1)
    assert choice.plan.depth == 6
    assert "Extrapolated to 6 blocks from compilations of 2 and 4" in choice.plan.notes[0]
    whole = kd.auto(blocks, 16, depth=1, strategies=["dp"])
    assert whole.plan.depth is None


def test_a_mesh_keeps_its_axes():
    choice = kd.auto(wide, 32, target=kd.create_device_mesh("data:4,model:2"), trials=2)
    assert all(dict(trial.candidate.axes) == {"data": 4, "model": 2} for trial in choice.trials)
    with pytest.raises(ValueError, match="Cannot keep axis 'batch'"):
        kd.auto(wide, 32, target=kd.create_device_mesh("batch:8"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": {"data": 3}}, ValueError, "3 does not divide the number of devices, 8"),
        ({"keep": {"rows": 2}}, ValueError, "Cannot keep axis 'rows'"),
        ({"keep": {"data": 0}}, ValueError, "must be a positive integer"),
        ({"keep": {"model": 2}, "strategies": ["dp"]}, ValueError, "No candidate is left"),
        ({"strategies": ["zero3"]}, ValueError, "Unknown strategy 'zero3'"),
        ({"strategies": []}, ValueError, "strategies is empty"),
        ({"objective": "speed"}, ValueError, "Unknown objective 'speed'"),
        ({"trials": 0}, ValueError, "trials must be a positive number"),
        ({"step": "fit"}, ValueError, "Unknown step 'fit'"),
        ({"batch": "most"}, ValueError, "batch='most' is not a batch"),
        ({"depth": 4, "build_model": lambda: wide()}, TypeError, "does not accept one argument"),
        ({"target": []}, ValueError, "The list of devices is empty"),
        ({"target": "v9:8"}, ValueError, "Unknown hardware 'v9'"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        kd.auto(**{"build_model": wide, "batch": 32, **options})
    assert kd.distribution() is None


def test_a_model_that_cannot_be_traced_is_one_error():
    with pytest.raises(ValueError, match="Cannot trace the train step of 'perceptron'"):
        kd.auto(perceptron, ((8, 17), (8, 8)))
    assert kd.distribution() is None
    assert layers.Dense(1).name == "dense"


def test_reports():
    choice = kd.auto(wide, 32, trials=3)
    text = str(choice)
    assert max(map(len, text.splitlines())) <= 120
    assert "chosen" in text
    assert choice.to_source() in text + "\n"
    assert "<table>" in choice._repr_html_()
    data = json.loads(choice.to_json())
    assert len(data["candidates"]) == len(choice.trials)
    assert data["mesh"] == choice.mesh.axis_sizes
    assert data["candidates"][0]["is_compiled"]
    assert repr(choice).startswith("<Choice of ")

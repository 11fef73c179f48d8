"""`StepMonitor` in `fit`: what it adds to logs, and what it leaves as it was."""

import copy
import csv
import dataclasses
import pathlib
import re
import types

import jax
import keras
import numpy as np
import pytest
from support.expert_layers import CHOSEN, EXPERTS, SPARSE, WIDTH
from support.keras_scenarios import start_anew
from support.slow_cases import slow

import keras_dist as kd
from keras_dist.monitoring import run, utilization

X, Y = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")
PEAK = 1e9
IN_PROGRESS_BAR = {"step_time_ms", "samples_per_second", "data_wait"}
ALWAYS = {"step_time_ms", "step_time_p95_ms", "step_time_std_ms", "samples_per_second", "data_wait", "goodput"}


def new_model(**arguments):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse", **arguments)
    return model


def fit(model, *callbacks, x=X, y=Y, **arguments):
    options = {"batch_size": 8, "epochs": 2, "verbose": 0} | arguments
    return model.fit(x, y, callbacks=list(callbacks), **options).history


@pytest.fixture
def known_peak():
    """CPUs have a peak."""
    cpu = kd.hardware["cpu"]
    peaks = {"float32": PEAK, "bfloat16": 2 * PEAK}
    changed = dataclasses.replace(cpu, flops_per_second=peaks, sources={"flops_per_second": "test"})
    kd.hardware.register(changed, replace=True)
    yield
    kd.hardware.register(cpu, replace=True)


@pytest.fixture(params=[slow("keras"), "keras_dist"])
def distribution(request):
    if request.param == "keras_dist":
        kd.set_distribution(kd.DataParallel())


def test_logs_history_and_other_callbacks(distribution, tmp_path, capsys):
    seen = []
    later = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    stopping = keras.callbacks.EarlyStopping("step_time_ms", mode="min", patience=5)
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    callbacks = kd.StepMonitor(log_every=4), logger, stopping, later
    history = fit(new_model(), *callbacks, validation_data=(X, Y), verbose=2)
    assert set(history) >= ALWAYS
    assert all(len(history[name]) == 2 and isinstance(history[name][1], float) for name in ALWAYS)
    assert history["step_time_ms"][1] > 0
    assert 0 < history["goodput"][1] < 1
    assert not {"mfu", "peak_memory_gib", "tokens_per_second"} & set(history)  # n/a is no zero
    assert set(seen[-1]) == {"loss", *IN_PROGRESS_BAR}
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["goodput"]) == history["goodput"][1]
    output = capsys.readouterr().out.splitlines()
    lines = [line for line in output if line.startswith("epoch ")]
    assert [line.rpartition(" loss ")[0] for line in lines] == [
        "epoch 1/2 step 4/5",
        "epoch 2/2 step 3/5",
        "epoch 2/2 step 5/5",
    ]
    assert "n/a" not in "".join(lines)
    for bar in [line for line in output if "/step - " in line]:
        assert {*re.findall(r" - (\w+):", bar)} == {"loss", "val_loss", *IN_PROGRESS_BAR}


@pytest.mark.parametrize("verbose", [0, 1])
def test_the_progress_bar_has_three_fields(verbose, known_peak, capsys):
    monitor = kd.StepMonitor(log_every=None)
    model = new_model()
    for _ in range(2):  # the second time no step compiles
        history = model.fit(X, Y, batch_size=8, epochs=2, verbose=verbose, callbacks=[monitor])
        assert set(history.history) >= {*ALWAYS, "mfu"}
        assert "on_epoch_end" not in vars(history)
    fields = {*re.findall(r" - (\w+):", capsys.readouterr().out)}
    assert fields == ({"loss", "step_time_ms", "mfu", "data_wait"} if verbose else set())


def test_a_generator_has_no_total(capsys):
    batches = ((X[:8], Y[:8]) for _ in range(3))
    new_model().fit(batches, verbose=0, callbacks=[kd.StepMonitor(log_every=2)])
    places = [line.split(" loss ")[0] for line in capsys.readouterr().out.splitlines()]
    assert places == ["epoch 1/1 step 2", "epoch 1/1 step 3"]


def test_the_numbers_of_training_stay_the_same(distribution):
    assert fit(new_model())["loss"] == fit(new_model(), kd.StepMonitor(log_every=None))["loss"]


def test_fit_stays_asynchronous():
    kept = keras.callbacks.CallbackList([kd.StepMonitor()], model=new_model())
    lost = keras.callbacks.CallbackList([keras.callbacks.TerminateOnNaN()], model=new_model())
    assert (kept._async_train, lost._async_train) == (True, False)


def test_mfu_is_that_of_the_counted_flop(distribution, known_peak):
    """The FLOP of the last, smaller batch are in proportion to its rows, so that all rows have the same FLOP."""
    history = fit(new_model(), kd.StepMonitor(log_every=None), batch_size=16)
    devices = 1 if kd.distribution() is None else 8
    flops_per_row = 2 * (4 * 8 * 2 + 8 * 1 * 3)  # nothing needs the gradient of the inputs
    expected = flops_per_row * history["samples_per_second"][1] / PEAK / devices
    assert history["mfu"][1] == pytest.approx(expected, rel=1e-6)


def test_mfu_of_a_plan_and_of_options(known_peak):
    distribution = kd.DataParallel(step_options=kd.StepOptions(microbatches=2))
    plan = kd.plan(new_model, distribution, batch=8)
    with distribution.scope():
        counted = fit(new_model(), kd.StepMonitor(log_every=None))
        planned = fit(new_model(), kd.StepMonitor(log_every=None, plan=plan))
    ratios = [history["mfu"][1] / history["samples_per_second"][1] for history in (counted, planned)]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-6)
    assert "step_time_vs_forecast" not in planned  # a CPU has no forecast


def test_bfloat16_has_another_peak(known_peak):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = new_model()
    finally:
        keras.config.set_dtype_policy("float32")
    history = fit(model, kd.StepMonitor(log_every=None))
    expected = 2 * (4 * 8 * 2 + 8 * 1 * 3) * history["samples_per_second"][1] / (2 * PEAK)
    assert history["mfu"][1] == pytest.approx(expected, rel=1e-6)


def test_tokens_per_second():
    model = keras.Sequential([keras.Input((6,), dtype="int32"), keras.layers.Embedding(5, 3), keras.layers.Flatten()])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    history = fit(model, kd.StepMonitor(log_every=None), x=np.ones((40, 6), "int32"))
    assert history["tokens_per_second"][1] == pytest.approx(6 * history["samples_per_second"][1])


def test_several_steps_per_execution(distribution, capsys):
    history = fit(new_model(steps_per_execution=2), kd.StepMonitor(log_every=5))
    assert set(history) >= ALWAYS
    shown = [line.split(" loss ")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["epoch 1/2 step 5/5", "epoch 2/2 step 5/5"]  # 5 steps in 3 executions


def test_peak_memory_of_devices_that_count_it(monkeypatch):
    counts = {"peak_bytes_in_use": 3 * 2**30}
    devices = [types.SimpleNamespace(id=0, process_index=0, memory_stats=lambda: counts)]
    assert run._peak_memory(devices) == 3 * 2**30
    assert run._peak_memory(jax.devices()) is None


def test_the_train_function_is_left_as_it_was(distribution):
    model = new_model()
    fit(model)
    function = model.train_function
    fit(model, kd.StepMonitor(log_every=None))
    assert model.train_function is function

    def fail(batch, logs):
        raise KeyError("stop")

    failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    monitor = kd.StepMonitor(log_every=None)
    with pytest.raises(KeyError):
        fit(model, monitor, failing)
    assert set(fit(model, monitor)) >= ALWAYS
    assert model.train_function is function


def test_a_model_that_is_redistributed_while_it_trains():
    def move(batch, logs):
        if batch == 1:
            kd.redistribute(model)

    with kd.DataParallel().scope():
        model = new_model()
        moving = keras.callbacks.LambdaCallback(on_train_batch_end=move)
        assert set(fit(model, kd.StepMonitor(log_every=None), moving)) >= ALWAYS
        assert set(fit(model, kd.StepMonitor(log_every=None), moving)) >= ALWAYS  # with the functions of the first fit


def test_a_profile_is_written(tmp_path):
    fit(new_model(), kd.StepMonitor(log_every=None, profile=(3, 4), profile_directory=str(tmp_path)))
    assert list(pathlib.Path(tmp_path).rglob("*.xplane.pb"))


def test_a_step_without_logs_has_no_times():
    class Silent(keras.Model):
        def train_step(self, state, data):
            return {}, super().train_step(state, data)[1]

    inputs = keras.Input((4,))
    model = Silent(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="returns no logs"):
        history = fit(model, kd.StepMonitor(log_every=None))
    assert not ALWAYS & set(history)


def test_a_step_that_cannot_be_traced_again_trains_on(known_peak, monkeypatch):
    def fail(*arguments):
        raise KeyError("traced again")

    monkeypatch.setattr(utilization, "trace_flops", fail)
    with pytest.warns(UserWarning, match="cannot count the FLOP"):
        history = fit(new_model(), kd.StepMonitor(log_every=None))
    assert "mfu" not in history
    assert history["step_time_ms"][1] > 0


def test_counting_flop_traces_a_step_once(known_peak):
    """JAX knows the step that Keras has traced."""

    class Counted(keras.Model):
        traced = 0

        def train_step(self, state, data):
            Counted.traced += 1
            return super().train_step(state, data)

    inputs = keras.Input((4,))
    model = Counted(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    assert "mfu" in fit(model, kd.StepMonitor(log_every=None))
    assert Counted.traced == 1


REMAT = keras.RematScope("list_of_layers", layer_names=["masked_probabilities"])


@pytest.mark.parametrize(
    "options",
    [slow({}), {"microbatches": 2}, slow({"reduce_dtype": "float32"}), slow({"remat": REMAT})],
    ids=["alone", "microbatches", "unreduced gradients", "remat"],
)
def test_the_load_of_experts(options, capsys):
    def trained(*callbacks):
        start_anew()
        with kd.DataParallel(step_options=kd.StepOptions(**options)).scope():
            keras.utils.set_random_seed(0)
            inputs = keras.Input((9, WIDTH))
            model = keras.Model(inputs, SPARSE["MaskedProbabilities"]()(inputs))
            model.compile("sgd", "mse")
            x = np.ones((32, 9, WIDTH), "float32")
            return fit(model, *callbacks, x=x, y=x, batch_size=16)

    history = trained(kd.StepMonitor(log_every=2))
    assert history["expert_load"] == [EXPERTS / CHOSEN] * 2  # all tokens choose the same experts
    assert "fullest expert 3.00 times the mean" in capsys.readouterr().out
    expected = trained()
    assert set(expected) == {"loss"}
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-6)


def test_a_copied_monitor_measures_a_loop_of_the_user():
    """Tuners copy callbacks; the train function does not exist before the first batch."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    monitor = copy.deepcopy(kd.StepMonitor(log_every=None))
    callbacks = keras.callbacks.CallbackList([monitor], model=model)
    callbacks.on_train_begin()
    for batch in range(8):
        callbacks.on_train_batch_begin(batch)
        logs = model.train_on_batch(np.ones((8, 4)), np.ones((8, 2)), return_dict=True)
        callbacks.on_train_batch_end(batch, logs)
    monitor.on_epoch_end(0, logs)
    callbacks.on_train_end()
    assert logs["step_time_ms"] > 0

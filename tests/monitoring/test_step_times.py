"""What steps take follows from when the host began them and the devices ended them. No clock is involved."""

import itertools
import statistics
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_dist.monitoring.batches import BatchShape, batch_shape
from keras_dist.monitoring.observed_step import StepObserver
from keras_dist.monitoring.run import Run
from keras_dist.monitoring.step_times import Execution, Step, StepTimes, measure

BATCH = batch_shape((np.zeros((8, 4), "float32"), np.zeros((8,), "int32")))


@pytest.mark.parametrize(
    ("execution", "ended", "before", "expected"),
    [
        # The devices are busy until 10, so that neither data nor the host delay anything.
        (Execution(begin=0, dispatched=5, waits=[(1, 3)]), 20, 10, Step(10, 0, 0, 0, 0)),
        # Data come after the devices have nothing to do.
        (Execution(begin=0, dispatched=14, waits=[(1, 13)]), 20, 10, Step(10, 3, 0, 4, 0)),
        # A part of that wait, with what lies before 10, is for data of other processes.
        (Execution(0, dispatched=14, waits=[(1, 13)], waits_for_others=[(2, 12)]), 20, 10, Step(10, 3, 2, 4, 0)),
        # Callbacks delay the begin, and that is no time of the step.
        (Execution(begin=15, dispatched=16), 20, 10, Step(5, 0, 0, 1, 5)),
        # Validation lies between, and the time of it is no gap between steps.
        (Execution(begin=15, dispatched=16, follows=False), 20, 10, Step(5, 0, 0, 1, 0)),
        # The first step of all.
        (Execution(begin=15, dispatched=16, waits=[(15, 15.5)]), 20, None, Step(5, 0.5, 0, 1, 0)),
        # Two waits of an execution of two steps.
        (Execution(begin=0, dispatched=18, waits=[(0, 11), (12, 14)]), 20, 10, Step(10, 3, 0, 8, 0)),
        # The step ended before the host looked up.
        (Execution(begin=10, dispatched=22, waits=[(10, 11)]), 20, 10, Step(10, 1, 0, 10, 0)),
    ],
)
def test_what_a_step_takes(execution, ended, before, expected):
    assert measure(execution, ended, before) == expected


@hypothesis.given(st.lists(st.tuples(*[st.floats(0, 10)] * 5), min_size=1, max_size=20))
def test_steps_never_overlap_and_waiting_is_a_part_of_them(draws):
    host = ended = total = 0.0
    for gap, before_data, data, dispatch, compute in draws:
        begin = host + gap
        waits = [(begin + before_data, begin + before_data + data)]
        host = waits[0][1] + dispatch
        end = max(ended, host) + compute
        step = measure(Execution(begin, host, waits), end, ended)
        assert 0 <= step.data_seconds <= step.host_seconds + 1e-9
        assert step.host_seconds <= step.seconds + 1e-9
        assert step.gap_seconds >= 0
        ended, total = end, total + step.seconds
    assert total <= ended + 1e-6


def test_figures_of_steps():
    times = StepTimes()
    for seconds in range(1, 101):
        times.add(Execution(0, 0, batches=[BATCH]), Step(*(share * seconds for share in (1, 0.25, 0.125, 0.5, 0.5))))
    times.add(Execution(0, 0, batches=[BATCH], is_compiled=True), Step(1000, 0, 0, 0, 0))
    assert (times.steps, times.compiled, times.total.seconds) == (100, 1, 5050)
    figures = times.figures()
    assert figures.pop("deviation") == pytest.approx(statistics.pstdev(range(1, 101)))
    assert figures.pop("host_wait") == pytest.approx(0.875 / 1.5)
    assert figures == {
        "median": 50.5,
        "percentile_95": 95,
        "samples_per_second": 800 / 5050,
        "tokens_per_second": None,
        "data_wait": 0.25,
        "others_wait": 0.125,
        "host_work": 0.25,
    }


def test_figures_without_a_step():
    assert set(StepTimes().figures().values()) == {None}


@pytest.mark.parametrize(
    ("batch", "rows", "tokens"),
    [
        ((np.zeros((8, 16), "int32"), np.zeros((8, 16), "int32")), 8, 128),
        (({"a": np.zeros((8, 4), "int32"), "b": np.zeros((8, 16), "int32")}, None), 8, 128),
        ((np.zeros((8, 16), "float32"), np.zeros((8, 16), "int32")), 8, None),
        ((np.zeros((8, 16), "bool"), None), 8, None),
        ((np.zeros((8, 16, 3), "int32"),), 8, None),
        ((np.float32(1),), None, None),
    ],
)
def test_rows_and_tokens(batch, rows, tokens):
    shape = batch_shape(batch)
    assert (shape.rows, shape.tokens) == (rows, tokens)


def test_a_batch_with_other_rows():
    small = batch_shape((np.zeros((3, 4), "float32"), np.zeros((3,), "int32")))
    assert BATCH.with_rows(3) == small
    with_a_constant = BatchShape((((8, 2), np.float32), ((), np.float32)), 1)
    assert with_a_constant.with_rows(3).arrays == (((3, 2), np.float32), ((), np.float32))


def model_of(function, **attributes):
    return types.SimpleNamespace(train_function=function, **attributes)


def test_a_run_with_a_clock_of_our_own():
    """Three steps of 4 seconds, of which devices wait for data for 1, and 10 seconds of validation before the last."""
    now = [0.0]

    def batches():
        while True:
            now[0] += 1
            yield (np.zeros((8, 4), "float32"),)

    model = model_of(lambda state, iterator: (next(iterator), state))
    state = [jnp.zeros(3)], [], [], []
    run, data = Run(model, None, clock=lambda: now[0]), batches()
    run.begin_epoch()
    for step in range(3):
        if step == 2:
            run.interrupt()
            now[0] += 10
        run.begin_step()
        model.train_function(state, data)
        now[0] += 3
        assert run.end_step(is_visible=True) == (step, step + 1)
    logs, summary = run.logs(), run.take_window()
    assert summary is not None
    assert logs == summary.logs()
    assert (summary.step, summary.steps, summary.median, summary.percentile_95) == (3, 3, 4, 4)
    assert (summary.samples_per_second, summary.data_wait, summary.goodput) == (2, 0.25, 9 / 22)
    assert run.take_window() is None


def test_a_step_is_observed_when_its_function_is_made_anew():
    noted, clock = [], itertools.count()
    model = model_of(lambda state, iterator: (next(iterator), state))
    original = model.train_function
    observer = StepObserver(model, lambda: next(clock), noted.append)
    for _ in range(2):
        observer.begin_step()
        model.train_function(([], [], [], []), iter([(np.zeros((8, 4)),)]))
    assert len(noted) == 2
    assert [execution.follows for execution in noted] == [False, True]
    replaced = model.train_function = lambda state, iterator: (next(iterator), state)
    observer.begin_step()
    model.train_function(([], [], [], []), iter([(np.zeros((8, 4)),)]))
    assert len(noted) == 3
    observer.close()
    assert model.train_function is replaced
    model.train_function = original
    failed = StepObserver(model, lambda: next(clock), noted.append)
    failed.begin_step()
    StepObserver(model, lambda: next(clock), noted.append)  # of the next fit
    assert model.train_function is original


def test_several_monitors_observe_the_same_step():
    first, second, clock = [], [], itertools.count()
    model = model_of(lambda state, iterator: (next(iterator), state))
    observers = [StepObserver(model, lambda: next(clock), noted.append) for noted in (first, second)]
    for _ in range(3):
        for observer in observers:
            observer.begin_step()
        model.train_function(([], [], [], []), iter([(np.zeros((8, 4)),)]))
    assert (len(first), len(second)) == (3, 3)


def test_a_step_for_which_something_is_compiled():
    noted, compute = [], jax.jit(lambda x: x + 1)
    model = model_of(lambda state, iterator: (compute(next(iterator)[0]), state))
    observer = StepObserver(model, lambda: 0.0, noted.append)
    for _ in range(2):
        observer.begin_step()
        model.train_function(([], [], [], []), iter([(np.zeros((8, 4)),)]))
    assert [execution.is_compiled for execution in noted] == [True, False]


def test_an_epoch_that_resumes_at_its_end_has_no_step():
    noted = []
    model = model_of(lambda state, iterator: ({}, state))
    observer = StepObserver(model, lambda: 0.0, noted.append)
    observer.begin_step()
    model.train_function(([], [], [], []), ())
    assert noted == []

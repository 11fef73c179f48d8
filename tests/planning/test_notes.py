import pytest

from keras_dist.planning.costs.forecast import Forecast
from keras_dist.planning.notes import HOST_SECONDS, notes_on_executions


def forecast(seconds):
    return Forecast(seconds, compute_seconds=seconds, exposed_seconds=0, copy_seconds=0, estimated_seconds=0)


def test_a_step_shorter_than_its_start_is_noted_with_the_steps_that_amortize_it():
    [note] = notes_on_executions("train", 1, 64, forecast(HOST_SECONDS / 2.5))
    assert "400 us" in note
    assert "steps_per_execution=3" in note
    placed, started = notes_on_executions("test", 2, 64, forecast(HOST_SECONDS / 2.5))
    assert "128 B" in placed
    assert "800 us" in started
    assert "steps_per_execution=3" in started


@pytest.mark.parametrize(
    ("step", "batches", "seconds"),
    [("train", 1, HOST_SECONDS), ("train", 1, None), ("generate", 1, HOST_SECONDS / 10)],
)
def test_nothing_is_noted_where_the_devices_need_longer_or_no_one_knows(step, batches, seconds):
    assert notes_on_executions(step, batches, 64, seconds and forecast(seconds)) == ()


def test_executions_long_enough_need_no_more_steps():
    [note] = notes_on_executions("train", 3, 64, forecast(HOST_SECONDS / 2.5))
    assert "holds the 3 batches" in note

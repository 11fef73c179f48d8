"""One `fit` as it is measured: its steps, what they process, and the figures of an epoch or of some steps."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_dist._keras.internals import current_distribution
from keras_dist.mesh.devices import Device
from keras_dist.monitoring.batches import BatchShape
from keras_dist.monitoring.observed_step import StepObserver
from keras_dist.monitoring.plan_comparison import comparison_text, forecast_ratio, warn_of_differences
from keras_dist.monitoring.step_times import Execution, StepTimes, measure
from keras_dist.monitoring.summary import Summary
from keras_dist.monitoring.utilization import counted_seconds_at_peak, planned_seconds_at_peak
from keras_dist.planning.reports.plan_report import Plan

_MAX_BUFFERED_STEPS = 256  # steps that have ended; adding many at a time costs a third of the time


class Run:
    """Measures the steps of one `fit`.

    `end_step` may be called by several threads, about in the order in which steps end; the methods that begin and end
    something else by the thread of `fit`.
    """

    def __init__(self, model: keras.Model, plan: Plan | None, clock: Callable[[], float] = time.perf_counter):
        self._model, self._plan, self._clock = model, plan, clock
        self._plan_differences: tuple[str, ...] = ()
        self._pending: deque[Execution] = deque()  # handed to the devices
        self._observer = StepObserver(model, clock, self._pending.append)
        self._lock = threading.Lock()
        self._not_added: list[tuple[Execution, float]] = []  # with the time at which it ended
        self._begun = clock()
        self._ended: float | None = None
        self._trained_seconds = 0.0
        self._devices: list[Device] = []
        self._seconds_at_peak: dict[BatchShape, float | None] = {}  # that one device would need
        self._epoch, self._window = StepTimes(), StepTimes()
        self.steps = 0
        self.progress_bar_names = ("step_time_ms", "data_wait")  # and a rate, once it is known which one there is
        self.ends_are_visible = True  # otherwise a train step returns nothing for which Keras waits

    def begin_step(self) -> None:
        """Notes that Keras begins a step; counts the FLOP of batches that are new."""
        self._look_at_new_batches()
        self._observer.begin_step()

    def end_step(self, is_visible: bool) -> tuple[int, int]:
        """Notes that the oldest step has ended. Returns the number of steps of the fit without and with it.

        `is_visible` is whether the step returned logs, for which Keras has waited.
        """
        ended = self._clock()
        with self._lock:
            if not self._pending:  # its train function was not observed
                return self.steps, self.steps
            execution, before = self._pending.popleft(), self.steps
            self._not_added.append((execution, ended))
            if len(self._not_added) >= _MAX_BUFFERED_STEPS:
                self._add_ended()
            self.steps += len(execution.batches) or 1
            self.ends_are_visible &= is_visible
            return before, self.steps

    def _add_ended(self) -> None:
        for execution, ended in self._not_added:
            ended = ended if self._ended is None else max(ended, self._ended)
            step = measure(execution, ended, self._ended)
            self._ended = ended
            if not execution.is_compiled:
                self._trained_seconds += step.seconds - step.data_seconds
            for times in (self._epoch, self._window):
                times.add(execution, step)
        self._not_added.clear()

    def interrupt(self) -> None:
        """Notes that validation or the end of an epoch lies before the next step."""
        self._observer.interrupt()

    def begin_epoch(self) -> None:
        self.interrupt()
        with self._lock:
            self._add_ended()
            self._epoch = StepTimes()

    def end_epoch(self) -> dict[str, float]:
        """Returns the figures of an epoch that has ended, by their names in Keras's logs."""
        self._look_at_new_batches()
        return self.logs()

    def take_window(self) -> Summary | None:
        """Returns the figures of the steps since the last call, None if there were none."""
        with self._lock:
            self._add_ended()
            window, self._window = self._window, StepTimes()
            return self._summary(window) if window.steps or window.compiled else None

    def logs(self) -> dict[str, float]:
        """Returns the figures of the epoch so far, by their names in Keras's logs."""
        with self._lock:
            self._add_ended()
            summary = self._summary(self._epoch)
        ratio = None if self._plan_differences else forecast_ratio(self._plan, summary)
        return summary.logs() | ({} if ratio is None else {"step_time_vs_forecast": ratio})

    def plan_text(self, summary: Summary) -> str | None:
        """Returns predicted against measured, None without a plan."""
        if self._plan is None:
            return None
        if self._plan_differences:
            return f"not compared with the plan: {'; '.join(self._plan_differences)}"
        return comparison_text(self._plan, summary)

    def close(self) -> None:
        self._look_at_new_batches()
        self._observer.close()

    def _look_at_new_batches(self) -> None:
        """Compares the first batch with the plan, and counts the FLOP of new ones."""
        known = self._seconds_at_peak
        for batch, specs in list(self._observer.specs.items())[len(known) :]:
            seconds = None
            if not known:
                self._devices = _devices_of(specs)
                if self._plan is not None:
                    distribution = current_distribution()
                    self._plan_differences = warn_of_differences(self._plan, batch, self._devices, distribution)
                    seconds = None if self._plan_differences else planned_seconds_at_peak(self._plan)
            if seconds is None:
                seconds = counted_seconds_at_peak(self._model, batch, specs, self._devices[0], known)
            known[batch] = seconds
            rate = "samples_per_second" if set(known.values()) == {None} else "mfu"
            self.progress_bar_names = ("step_time_ms", rate, "data_wait")

    def _summary(self, times: StepTimes) -> Summary:
        memory, elapsed = _peak_memory(self._devices), self._clock() - self._begun
        if not self.ends_are_visible:
            return Summary(self.steps, times.steps, peak_memory=memory)
        at_peak = times.per_second(self._seconds_at_peak.get)
        return Summary(
            step=self.steps,
            steps=times.steps,
            mfu=None if at_peak is None else at_peak / len(self._devices),
            peak_memory=memory,
            goodput=self._trained_seconds / elapsed if elapsed > 0 else None,
            **times.figures(),
        )


def _devices_of(arrays: Any) -> list[Device]:
    """Returns the devices that hold state and batch of a step, in all processes."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.ShapeDtypeStruct)]
    found = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
    return sorted(found, key=lambda device: device.id)


def _peak_memory(devices: list[Device]) -> int | None:
    """Returns the most bytes that were in use on a device of this process, None if devices do not count them."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in own]
    return max((peak for peak in peaks if peak), default=None)

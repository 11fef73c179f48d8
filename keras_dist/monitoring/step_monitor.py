"""`StepMonitor`: how fast training is, what it waits for, and how that compares with a plan, while it runs."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist._report.user_warnings import warn
from keras_dist.mixtures.figures import EXPERT_LOAD
from keras_dist.monitoring.plan_comparison import require_plan
from keras_dist.monitoring.process_lines import ProcessLines
from keras_dist.monitoring.profile import StepProfile, require_profile
from keras_dist.monitoring.run import Run
from keras_dist.monitoring.summary import Summary
from keras_dist.multihost import messaging
from keras_dist.planning.reports.plan_report import Plan

_REFRESH = 1.0  # seconds after which the figures in the logs of batches are computed anew


class StepMonitor(keras.callbacks.Callback):
    """Measures the steps of `fit`: their time, throughput, MFU, memory, waiting for data, and goodput.

    The figures of an epoch are added to Keras's logs. Callbacks that come later in the list find them there, and the
    history records them. The progress bar and the logs of batches have three figures: step time, MFU (or samples per
    second, if it is unknown) and waiting for data. All figures are printed in one line per `log_every` steps. Pass the
    monitor first in the list of callbacks. It needs no distribution, and works with any data, loss and optimizer.

    In the logs of an epoch are `step_time_ms` (the median), `step_time_p95_ms`, `step_time_std_ms`,
    `samples_per_second`, `tokens_per_second` (of the global batch), `mfu`, `peak_memory_gib`, `data_wait`, `goodput`,
    with mixtures of experts `expert_load`, and with a plan `step_time_vs_forecast`. Figures that are not available are
    missing, such as MFU and memory on CPUs. Steps for which something is compiled are counted, but left out of times
    and rates.

    The monitor does not wait for devices, unless `fit` waits for them anyway: a step ends when Keras, in its own
    thread, has the step's logs.

    Args:
        log_every: Number of steps after which a line is printed. A last line is printed when `fit` ends. None for no
            lines.
        plan: What `keras_dist.plan` returns for this model, batch and distribution, to compare with. If the plan is of
            something else, a warning names the differences.
        profile: The first and the last step of a trace for xprof, counted from 1 over all epochs. Note that the first
            steps compile.
        profile_directory: Where to write the trace, `"profile"` by default.

    Raises:
        TypeError: `log_every` or `profile` has the wrong type, or `plan` is not a `keras_dist.Plan`.
        ValueError: `log_every` is not positive, the range of `profile` is empty, `profile_directory` has no effect,
            or the plan is not of a train step. When it is used: it was passed to `evaluate` or `predict`, or another
            profile is being written.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> rows = np.ones((64, 4), "float32")
    >>> history = model.fit(rows, rows[:, :1], epochs=2, verbose=0, callbacks=[StepMonitor(log_every=None)])
    >>> history.history["step_time_ms"][1] > 0, "mfu" in history.history  # the peak of CPUs is unknown
    (True, False)
    """

    # Keras then calls `on_train_batch_end` in a thread that has waited for the logs, instead of waiting in `fit`.
    async_safe = True

    def __init__(
        self,
        log_every: int | None = 100,
        plan: Plan | None = None,
        profile: tuple[int, int] | None = None,
        profile_directory: str | None = None,
    ):
        super().__init__()
        if log_every is not None and (isinstance(log_every, bool) or not isinstance(log_every, int)):
            raise TypeError(f"log_every={log_every!r} must be a number of steps, or None for no lines.")
        if log_every is not None and log_every < 1:
            raise ValueError(f"log_every={log_every} must be at least 1. Pass None for no lines.")
        if plan is not None:
            require_plan(plan)
        require_profile(profile, profile_directory)
        self.log_every, self.plan, self.profile = log_every, plan, profile
        self.profile_directory = profile_directory or "profile"
        self._run: Run | None = None
        self._ending = contextlib.ExitStack()  # ends what a fit has begun

    def on_train_begin(self, logs=None):
        """Starts to measure."""
        self._close()  # what a fit that failed has left
        self._lock = threading.Lock()
        model: Any = self.model
        self._run = Run(model, self.plan)
        self._steps_per_execution = model.steps_per_execution
        self._begun = self._windows = 0
        self._logs, self._refreshed = {}, 0.0  # the figures in the logs of batches, and when they were computed
        self._profile: StepProfile | None = None
        if self.profile is not None:
            self._profile = StepProfile(*self.profile, self.profile_directory)
            self._ending.callback(self._profile.close)
        self._lines: ProcessLines | None = None
        if messaging.is_multi_process() and self.log_every is not None:
            self._lines = ProcessLines(self._print)
            self._ending.callback(self._lines.close)
        history = getattr(model, "history", None)
        if self._fit_param("verbose") and isinstance(history, keras.callbacks.History):
            self._ending.enter_context(self._short_progress_bar(history))
        self.on_epoch_begin(epoch=-1)  # for loops that begin none

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the figures of an epoch."""
        run = self._started_run()
        run.begin_epoch()
        self._epoch, self._steps_before_epoch = epoch + 1, run.steps
        self._first: int | None = None  # the first batch that fit ran of the epoch
        self._newest = 0  # the newest batch
        self._loss = self._load = None  # what its logs have of the loss and the load of experts
        self._refreshed_at = 0  # the step of the epoch at which the logs were computed

    def on_train_batch_begin(self, batch, logs=None):
        """Notes that a step begins."""
        run = self._started_run()
        if self._profile is not None:
            count = self._steps_per_execution
            self._profile.begin_steps(self._begun + 1, self._begun + count)
            self._begun += count
        with self._lock:  # Keras's threads may call this in another order
            self._first = batch if self._first is None else min(batch, self._first)
        run.begin_step()

    def on_train_batch_end(self, batch, logs=None):
        """Notes that a step has ended, and adds three figures of the epoch so far to its logs."""
        run = self._started_run()
        before, steps = run.end_step(is_visible=bool(logs))
        if self._profile is not None:
            self._profile.end_steps(steps)
        with self._lock:
            if batch >= self._newest:
                self._newest, logged = batch, logs or {}
                self._loss, self._load = logged.get("loss"), logged.get(EXPERT_LOAD)
        if self.log_every is not None and steps // self.log_every > before // self.log_every:
            self._show(steps // self.log_every, steps)
        if logs is not None:
            # The figures are computed anew when the epoch has twice as many steps as before, or in a second.
            now, count = time.monotonic(), steps - self._steps_before_epoch
            if count >= 2 * self._refreshed_at or now > self._refreshed + _REFRESH:
                self._logs, self._refreshed, self._refreshed_at = run.logs(), now, count
            figures = self._logs
            logs.update({name: figures[name] for name in run.progress_bar_names if name in figures})

    def on_test_begin(self, logs=None):
        """Notes that validation interrupts training."""
        self._started_run("evaluate").interrupt()

    def on_predict_begin(self, logs=None):
        """Raises an error, since prediction has no steps to measure."""
        self._started_run("predict")

    def on_epoch_end(self, epoch, logs=None):
        """Adds the figures of the epoch to its logs."""
        run = self._started_run()
        self._logs = run.end_epoch()
        if logs is not None:
            logs.update(self._logs)

    def on_train_end(self, logs=None):
        """Prints the last line, and ends what was begun."""
        run = self._started_run()
        run.close()
        if self._profile is not None:
            self._profile.close(run.steps)
        if run.steps == 0:
            warn(
                "StepMonitor measured nothing, because fit ran no step that it could observe. Check initial_epoch and "
                "epochs, and whether a checkpoint had already reached the last epoch.",
            )
        elif not run.ends_are_visible:
            warn(
                "StepMonitor cannot tell when steps end, because the model's train_step returns no "
                "logs. Return at least the loss, for example with self.get_metrics_result().",
            )
        if self.log_every is not None and run.steps:
            self._show(self._windows + 1, run.steps)
        self._close()

    def _started_run(self, method: str | None = None) -> Run:
        """Returns the run of `fit`. Raises an error without one, if Keras calls the monitor for another method."""
        if self._run is not None:
            return self._run
        if method is None:
            raise ValueError("StepMonitor was called outside of fit. Pass it to model.fit(..., callbacks=[...]).")
        raise ValueError(
            f"StepMonitor measures steps of fit, and {method} has none. Remove it from the callbacks of {method}, and "
            "pass it to fit."
        )

    @contextlib.contextmanager
    def _short_progress_bar(self, history: Any) -> Iterator[None]:
        """Removes the figures that the progress bar does not show from the logs of an epoch, once they are recorded.

        Keras passes one dict of logs to all callbacks, and adds two of its own at the end: first `History`, then the
        progress bar, which shows all that it finds. So the method of the history is the place where all are known.
        """
        record = history.on_epoch_end

        def on_epoch_end(epoch: int, logs: dict[str, Any]) -> None:
            record(epoch, logs)
            for name in {*self._logs} - {*self._started_run().progress_bar_names}:
                logs.pop(name, None)

        history.on_epoch_end = on_epoch_end
        yield
        vars(history).pop("on_epoch_end", None)

    def _fit_param(self, name: str) -> Any:
        """Returns what Keras tells callbacks about `fit`: epochs, steps per epoch, verbosity."""
        return (self.params or {}).get(name)

    def _show(self, window: int, steps: int) -> None:
        """Prints the line of a window after so many steps, or leaves that to the thread that knows all processes."""
        with self._lock:
            self._windows = max(window, self._windows)
            summary = self._started_run().take_window()
        if summary is None:
            return
        total, step = self._fit_param("steps"), (self._first or 0) + steps - self._steps_before_epoch
        summary = dataclasses.replace(
            summary,
            step=step if total is None else min(step, total),  # the last execution may have fewer steps
            steps_per_epoch=total,
            epoch=self._epoch,
            epochs=self._fit_param("epochs"),
            loss=self._loss,
            expert_load=self._load,
        )
        if self._lines is None:
            self._print(summary)
        else:
            self._lines.add(window, summary)

    def _print(self, summary: Summary, slowest: str = "") -> None:
        line = summary.line() + (f", {slowest}" if slowest else "")
        run = self._run
        if run is not None and (compared := run.plan_text(summary)) is not None:
            line += f"; {compared}"
        has_bar = self._fit_param("verbose") in (1, "auto")
        print(f"\n{line}" if has_bar else line, flush=True)

    def _close(self) -> None:
        self._ending.close()
        self._run = None

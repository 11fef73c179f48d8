"""Writes a trace of some steps, for xprof and Perfetto."""

import os
import threading
from typing import Any

import jax

from keras_dist._report.units import counted
from keras_dist._report.user_warnings import warn
from keras_dist.multihost import messaging


def require_profile(profile: Any, directory: Any) -> None:
    if profile is None:
        if directory is not None:
            raise ValueError(
                f"profile_directory={directory!r} has no effect without profile. Pass the first and the last step to "
                "profile too, for example profile=(10, 15)."
            )
        return
    is_pair = isinstance(profile, (tuple, list)) and len(profile) == 2
    if not is_pair or any(isinstance(step, bool) or not isinstance(step, int) for step in profile):
        raise TypeError(
            f"profile={profile!r} must be the numbers of the first and the last step to profile. Pass, for example, "
            "profile=(10, 15)."
        )
    first, last = profile
    if not 1 <= first <= last:
        raise ValueError(
            f"profile={profile!r} is not a range of steps: they count from 1, and the first must not be after the "
            "last. Pass, for example, profile=(10, 15)."
        )


class StepProfile:
    """Traces steps `first` to `last`, counted from 1. Does not wait for steps: the trace may have a few more."""

    def __init__(self, first: int, last: int, directory: str):
        self._first, self._last, self._directory = first, last, directory
        self._lock = threading.Lock()
        self._is_tracing = self._is_done = False

    def begin_steps(self, first: int, last: int) -> None:
        """Starts the trace if one of the steps that begin is the first of it."""
        with self._lock:
            if self._is_tracing or self._is_done or last < self._first or first > self._last:
                return
            try:
                # JAX names files by host and second, which processes of one host share.
                own = f"process_{messaging.process_index()}" if messaging.is_multi_process() else ""
                jax.profiler.start_trace(os.path.join(self._directory, own))
            except RuntimeError as error:
                raise ValueError(
                    f"StepMonitor cannot profile steps {self._first} to {self._last}, because another profile is being "
                    f"written: {error} Pass profile= to one callback only, and end a trace of your own before."
                ) from None
            self._is_tracing = True

    def end_steps(self, count: int) -> bool:
        """Ends the trace if so many steps have ended that its last one is among them. Returns whether it did."""
        with self._lock:
            if not self._is_tracing or count < self._last:
                return False
            self._is_tracing, self._is_done = False, True
            jax.profiler.stop_trace()
            return True

    def close(self, count: int | None = None) -> None:
        """Ends the trace. Warns if `fit` ended, after `count` steps, before the trace was complete."""
        was_tracing = self.end_steps(self._last)
        if count is None or (self._is_done and not was_tracing):
            return
        fault = f"was never reached: fit ran {counted(count, 'step')}, so no trace was written"
        if was_tracing:
            fault = f"ends with step {count}, because fit did. The trace in {self._directory!r} has fewer steps"
        warn(
            f"profile=({self._first}, {self._last}) {fault}. Choose steps from 1 to {count}; they count over all "
            "epochs of a fit.",
        )

"""Signals that announce the end of this program, such as a preemption, and the point at which all processes stop."""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from keras_dist._report.user_warnings import warn
from keras_dist.multihost import messaging
from keras_dist.multihost.stop_agreement import StopAgreement


class Preemption:
    """From creation to `close`, notes signals in place of their handlers, and tells where training stops for them.

    Python lets only the main thread handle signals; in another one this is a warning.
    """

    def __init__(self, signals: Sequence[int]):
        self.signal: signal.Signals | None = None  # the first that this process received
        self._agreement = StopAgreement()
        self._handlers = {}
        self._pipe: int | None = None  # to which Python writes the numbers of signals
        if signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(signal.Signals(number).name for number in signals)
            warn(
                f"TrainingCheckpoint does not handle {names}, because fit runs in the thread "
                f"{threading.current_thread().name!r}, and only the main thread can. Call fit in the main thread, or "
                "pass signals=().",
            )
            return
        if signals and messaging.is_multi_process():
            self._notice_early(signals)
        self._handlers = {number: signal.signal(number, self._note) or signal.SIG_DFL for number in signals}

    def _notice_early(self, signals: Sequence[int]) -> None:
        """Asks the other processes to stop at once, while this one's main thread is in a step, where no handler runs.

        Python's own handler in C writes the number of each signal to a pipe, which a thread reads.
        """
        pipe, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._pipe_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        arguments = pipe, {*signals}, self._agreement
        threading.Thread(target=_listen, args=arguments, name="keras_dist_early_notice", daemon=True).start()

    def _note(self, number, frame):
        self.signal = self.signal or signal.Signals(number)

    def is_due(self) -> bool:
        """Returns whether all processes stop at this point, since one of them received a signal."""
        if self.signal is not None:
            self._agreement.request()
        return self._agreement.is_reached()

    def close(self) -> bool:
        """Ends at the end of training, and returns whether the program must end, too.

        Otherwise a signal that came too late for the other processes now reaches the handler that it had before.
        """
        if self.signal is not None:
            self._agreement.request()
        is_due = self._agreement.close()
        if not is_due:
            self._end(self._handlers)
            if self.signal is not None:
                signal.raise_signal(self.signal)
        return is_due

    def ignore_signals(self) -> None:
        """Ends with the program, whose exit no further signal disturbs. Python would restore handlers of its own."""
        self._end(dict.fromkeys(self._handlers, signal.SIG_IGN))

    def abandon(self) -> None:
        """Ends after an exception."""
        self._agreement.abandon()
        self._end(self._handlers)

    def pass_on(self) -> None:
        """Lets a signal that was noted before an exception reach the handler that it had before."""
        if self.signal is None:
            return
        if signal.getsignal(self.signal) == signal.SIG_DFL:  # which ends the process
            traceback.print_exc()
        signal.raise_signal(self.signal)

    def _end(self, handlers: dict[int, Any]) -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        if self._pipe is not None:
            signal.set_wakeup_fd(self._pipe_before)
            os.close(self._pipe)
            self._pipe = None


def _listen(pipe: int, signals: set[int], agreement: StopAgreement) -> None:
    with os.fdopen(pipe, "rb", buffering=0) as file:
        while numbers := file.read(64):  # nothing at the end of the pipe
            if signals & {*numbers}:
                with contextlib.suppress(jax.errors.JaxRuntimeError, ConnectionError):  # the program is ending
                    agreement.request()


def valid_signals(signals: Sequence[int]) -> tuple[signal.Signals, ...]:
    """Returns signals, or raises an error for what is none, or none that a program can handle."""
    if not isinstance(signals, Iterable):
        raise TypeError(f"signals={signals!r} is no sequence of signals. Pass, for example, (signal.SIGTERM,).")
    for number in signals:
        if number not in list(signal.Signals):
            raise ValueError(f"signals={signals!r}: {number!r} is no signal. Pass, for example, (signal.SIGTERM,).")
        if (name := signal.Signals(number).name) in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"signals={signals!r}: no program can handle {name}. Remove it.")
    return tuple(dict.fromkeys(map(signal.Signals, signals)))

"""All processes of a program stop at the same point, soon after one of them is asked to.

Processes pass the same points in the same order: the ends of batches, for example. When one is asked to stop, each
sends how many points it has passed, and waits at its next one until all have. They stop at the first point that none
has passed. Messages are sent and awaited by a thread, so that a process answers while its main thread is in a step.

    process 0 has passed 7 points  ─┐
    process 1 has passed 8 points  ─┼─>  all stop at point 9, the first that no process has passed
    process 2 has passed 7 points  ─┘
"""

import itertools
import threading

import jax

from keras_dist.multihost import failure_watch, messaging

_STOP, _END = "stop", "end"
_numbers = itertools.count()  # of the agreements of a program, which are the same ones in all processes


class StopAgreement:
    """Decides where all processes stop. Every process makes the same agreements, and passes the same points."""

    def __init__(self):
        self._topic = f"stop {next(_numbers)}"
        self._lock = threading.Lock()
        self._passed = 0
        self._stop_after: int | None = None  # the number of points after which all stop
        self._is_requested = self._is_abandoned = False
        self._is_decided = threading.Event()
        if messaging.is_multi_process():
            thread = threading.Thread(target=self._answer, name="keras_dist_stop_agreement", daemon=True)
            thread.start()
            failure_watch.join_at_exit(thread)

    def request(self) -> None:
        """Asks all processes to stop. May be called by any thread, and again."""
        if self._is_requested:
            return
        self._is_requested = True
        if messaging.is_multi_process():
            messaging.decide(self._topic, _STOP)
        else:
            self._stop_after = 0

    def is_reached(self) -> bool:
        """Returns whether all processes stop at this point; if not, they pass it."""
        if self._is_requested and messaging.is_multi_process():
            self._is_decided.wait(messaging.timeout)  # else this process would pass a point that all can stop at
        with self._lock:
            is_reached = self._stop_after is not None and self._passed >= self._stop_after
            self._passed += 1
            return is_reached

    def close(self) -> bool:
        """Ends at the last point, and returns whether all processes stop there because one was asked to before."""
        if not messaging.is_multi_process():
            return self._is_requested
        is_stop = messaging.decide(self._topic, _END) == _STOP
        self._is_decided.wait(messaging.timeout)
        return is_stop

    def abandon(self) -> None:
        """Ends without the other processes, after an exception."""
        self._is_abandoned = True

    def _answer(self) -> None:
        try:
            if messaging.decision(self._topic, is_cancelled=lambda: self._is_abandoned) == _STOP:
                with self._lock:  # points are not passed while other processes learn how many have been
                    self._stop_after = max(messaging.exchange(self._topic, self._passed))
        except (jax.errors.JaxRuntimeError, ConnectionError, messaging.ProcessFailure):
            return  # this process has left the others, or the failure of another one ends it
        finally:
            self._is_decided.set()

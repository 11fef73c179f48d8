"""Detects that another process died, failed or stalled, and ends this process in bounded time.

An exception is detected by the report of its process, an early end by its announcement, a death by missed heartbeats,
a hang by the number of steps or the timeout of messages, and the death of the launcher by the end of its pipe.
docs/many_processes.md has the times.

Where the main thread is blocked in a collective, no exception reaches it: `END_GRACE` seconds after the detection,
the process prints the reason and exits with status 70. If process 0 is killed, the coordination service ends with it,
and JAX aborts the other processes at once (status 134, "leader task was preempted/died").
"""

import atexit
import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

import jax

from keras_dist._report.units import counted
from keras_dist.multihost import coordination, messaging
from keras_dist.multihost.launcher import FOLLOWER_STATUS, PIPE_VARIABLE, STOP_GRACE
from keras_dist.multihost.messaging import TICK

END_GRACE = 6.0  # seconds that a process has to end by itself after another one failed
_LAST_MARGIN = 3.0  # seconds that process 0 waits longer than that

_is_leaving = False
_threads: list[threading.Thread] = []
_live: set[int] = set()  # processes whose heartbeats arrive
_STEPS = "begun"  # the topic of how many steps processes have begun that have begun none for a while
_steps, _last_step = 0, 0.0  # how many steps of models this process has begun, and when the last one, or the program


def start() -> None:
    """Starts to watch the other processes, and to report the failure of this one. Called once."""
    global _last_step
    _last_step = time.monotonic()
    messaging.announce_start()
    # After this exchange all are connected; before, a process that connects late would look like a dead one.
    counts = messaging.exchange("number of processes", messaging.process_count())
    _live.update(range(messaging.process_count()))
    _report_uncaught_exceptions()
    atexit.register(_leave)  # after JAX registered its own handler, so this one runs first
    for target in (_watch_heartbeats, _watch_failures):
        _threads.append(threading.Thread(target=target, name=f"keras_dist{target.__name__}", daemon=True))
        _threads[-1].start()
    for process, count in enumerate(counts):
        if count != counts[0]:
            raise ValueError(
                f"Process {process} has num_processes={count}, but process 0 has num_processes={counts[0]}. Pass the "
                "same num_processes to all processes."
            )


def begin_step() -> None:
    """Notes that this process begins a step, in which its devices may wait for all other processes."""
    global _steps, _last_step
    _steps, _last_step = _steps + 1, time.monotonic()


def join_at_exit(thread: threading.Thread) -> None:
    """Makes this process wait for a thread that uses the coordination service before Python ends."""
    _threads[:] = [*filter(threading.Thread.is_alive, _threads), thread]


def end_with_launcher() -> None:
    """Makes this process stop as for SIGTERM when the launcher that started it is killed. Called once."""
    descriptor, _, inode = os.environ.pop(PIPE_VARIABLE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):  # a program in between has closed it, or there is no launcher
        if os.fstat(int(descriptor)).st_ino == int(inode):
            threading.Thread(target=_watch_launcher, args=(int(descriptor),), daemon=True).start()


def _watch_launcher(descriptor: int) -> None:
    os.read(descriptor, 1)  # returns when nobody can write to the pipe any more
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_GRACE)
    os._exit(FOLLOWER_STATUS)


def _watch_failures() -> None:
    everyone, posted = {*range(messaging.process_count())}, None
    while not _is_leaving and coordination.is_joined():
        time.sleep(TICK)
        try:
            if report := messaging.reported_failure():
                if report[0] != messaging.process_index():
                    _fail(report[1])
                time.sleep(2 * END_GRACE)  # it ends by itself, unless its main thread is blocked in a collective
                _end(report[1], status=1)
            steps = _steps if time.monotonic() - _last_step > messaging.timeout else None
            if steps != posted:
                messaging.set_status(_STEPS, steps)
                posted = steps
            if messaging.process_index() == 0 and steps is not None:
                _require_equal_steps(messaging.statuses(_STEPS))
            silent = everyone - _live
            # A process tells that it has ended before its heartbeats stop, so this is read second.
            dead = sorted(silent - {*messaging.ended_processes()}) if silent else []
            if dead:
                _fail(f"{messaging.describe(dead).capitalize()} died or stopped responding.")
        except (jax.errors.JaxRuntimeError, ConnectionError) as error:
            if not _is_leaving and coordination.is_joined():
                _fail(f"The coordination service in process 0 ({coordination.address()}) does not respond: {error}")


def _require_equal_steps(steps: dict[int, int]) -> None:
    """Fails where processes wait in a step that others have not begun. A process that makes steps is not among them."""
    newest = max(steps.values())
    if behind := [process for process, number in steps.items() if number < newest]:
        message = (
            f"{messaging.describe(behind).capitalize()} has not begun step {newest} of this program, in which other "
            f"processes have waited {counted(messaging.timeout, 'second')}. {messaging.SLOW_PROCESS_FIX}"
        )
        messaging.report_failure(messaging.ProcessFailure(message))
        _fail(message)


def _fail(message: str) -> None:
    messaging.known_failure = message
    # For the main thread, unless it is blocked in a collective. JAX aborts the others when process 0 ends.
    time.sleep(END_GRACE + (_LAST_MARGIN if messaging.process_index() == 0 else 0))
    _end(message)


def _watch_heartbeats() -> None:
    """Keeps `_live` up to date, in its own thread: `get_live_nodes` returns when all live processes have called it."""
    everyone = list(range(messaging.process_count()))
    while not _is_leaving and coordination.is_joined():
        with contextlib.suppress(jax.errors.JaxRuntimeError, ConnectionError):  # the other thread reports these
            _live.intersection_update(coordination.client().get_live_nodes(everyone))
        time.sleep(TICK)


def _end(reason: str, status: int = FOLLOWER_STATUS) -> None:
    try:
        sys.stdout.flush()
        _print_reason(reason)
    finally:  # also where nobody reads the output any more
        os._exit(status)


def _print_reason(reason: str) -> None:
    print(f"keras_dist: process {messaging.process_index()} exits. {reason}", file=sys.stderr, flush=True)


def _leave() -> None:
    """Leaves the others at the end of the program. Process 0 waits for them, since the service ends with it."""
    global _is_leaving
    if not coordination.is_joined():  # the program has called jax.distributed.shutdown()
        return
    messaging.set_status(messaging.ENDED, True)
    if messaging.process_index() == 0:
        _wait_for_others()
    _is_leaving = not _has_failed()
    # A thread that is inside JAX when Python ends would abort the process: end what it waits for first.
    with contextlib.nullcontext() if _is_leaving else contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.distributed.shutdown()
    for thread in _threads:
        thread.join(END_GRACE if _is_leaving else TICK)


def _wait_for_others() -> None:
    """Waits until the other processes have disconnected; JAX aborts those that lose the service before."""
    deadline, has_failed = time.monotonic() + messaging.timeout, False
    while _are_others_connected() and time.monotonic() < deadline:
        if not has_failed and _has_failed():
            has_failed = True
            deadline = min(deadline, time.monotonic() + END_GRACE + _LAST_MARGIN)
        time.sleep(TICK / 10)


def _are_others_connected() -> bool:
    if jax.config.jax_enable_recoverability:  # pyright: ignore[reportAttributeAccessIssue]
        return len(_live) > 1
    return len(messaging.ended_processes()) < messaging.process_count()  # they wait for this one in JAX's shutdown


def _has_failed() -> bool:
    return messaging.known_failure is not None or messaging.reported_failure() is not None


def _report_uncaught_exceptions() -> None:
    before: Callable = sys.excepthook

    def hook(kind, error, trace):
        before(kind, error, trace)
        # Errors of JAX's runtime have several types, and start with a code: `UNKNOWN: Gloo ...`.
        is_of_devices = isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]+: ", str(error))
        reason = _wait_for_reason(error) if is_of_devices else messaging.known_failure
        messaging.report_failure(error)
        if reason is not None and not isinstance(error, messaging.ProcessFailure):
            _print_reason(reason)

    sys.excepthook = hook


def _wait_for_reason(error: BaseException) -> str | None:
    """Waits to learn which process caused an error of devices, if any did."""
    is_of_connection = re.search("gloo|nccl|connection|peer", str(error), re.IGNORECASE) is not None
    seconds = coordination.heartbeat_timeout if is_of_connection else 0
    deadline = time.monotonic() + seconds + 5 * TICK
    while time.monotonic() < deadline:
        if messaging.known_failure is not None:
            return messaging.known_failure
        if report := messaging.reported_failure():  # perhaps by another thread, at the timeout of a message
            return report[1]
        if ended := messaging.ended_processes():
            return (
                f"{messaging.describe(ended).capitalize()} ended while other processes needed it. Let every process "
                "run the same program to its end."
            )
        time.sleep(TICK / 10)
    return None

"""Short messages between processes, in bounded time, and the failure of another process once it is known.

Messages are stored in JAX's coordination service and not sent through devices: a collective waits forever for a
process that does not take part, and processes must be able to report just that.
"""

import collections
import contextlib
import itertools
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_dist._report.units import counted
from keras_dist.multihost.coordination import client, process_count, process_index

DEFAULT_TIMEOUT = 600.0  # seconds
TICK = 1.0  # seconds between two looks at the state of other processes
SLOW_PROCESS_FIX = "Check what that process is doing; if it only needs longer, increase initialize(timeout=...)."
SAME_CALLS = (
    "Let all processes call the same methods of a model in the same order, with the same epochs and validation_data, "
    "and let callbacks stop training (model.stop_training) in all of them."
)
ENDED = "ended"  # the topic of whether processes have reached the end of the program
_PREFIX = "keras_dist"
# The topics of where processes wait for a message: in the main thread, and in one that reads batches.
_WAITING, _WAITING_TO_READ = "waiting", "waiting to read"

timeout = DEFAULT_TIMEOUT  # seconds for which processes wait for one another
known_failure: str | None = None  # of another process; `exchange` raises it where it waits
_numbers: dict[str, "itertools.count[int]"] = collections.defaultdict(itertools.count)  # of the exchanges of each topic


class ProcessFailure(RuntimeError):
    """Another process died, failed, stalled or ended, so this one cannot continue."""


def is_multi_process() -> bool:
    return process_count() > 1


def exchange(
    topic: str, message: Any, is_cancelled: Callable[[], bool] = lambda: False, method: str | None = None
) -> list[Any]:
    """Sends a message to all processes and returns the messages of all.

    Every process must call it equally often for each topic, with a message that JSON can represent, a few kilobytes at
    most. Process 0 collects the messages and distributes them. `is_cancelled` tells whether the answer is no longer
    needed, and is called once a second. `method` is the method of a model that runs, for errors. Raises ProcessFailure
    if another process failed or did not send within the timeout, or if the exchange was cancelled.
    """
    if not is_multi_process():
        return [message]
    number = next(_numbers[topic])
    directory, me = f"{_PREFIX}/{topic}/{number}", process_index()
    place = repr(topic) if method is None else f"{topic!r} of {method}"
    client().key_value_set(f"{directory}/from/{me}", json.dumps(message))
    if me != 0:
        return json.loads(_wait_for(directory, "all", place, is_cancelled))
    received = _by_process(f"{directory}/from/")
    for process in range(process_count()):
        if process not in received:
            received[process] = _wait_for(directory, f"from/{process}", place, is_cancelled)
    messages = [json.loads(received[process]) for process in range(process_count())]
    client().key_value_set(f"{directory}/all", json.dumps(messages))
    if number > 0:  # all have read the previous messages, since they have sent these
        client().key_value_delete(f"{_PREFIX}/{topic}/{number - 1}/")
    return messages


def set_status(topic: str, status: Any) -> None:
    """Stores what this process reports, in place of what it did before; None removes it. Waits for no other process."""
    key = f"{_PREFIX}/{topic}/{process_index()}"
    if status is None:
        client().key_value_delete(key)
    else:
        client().key_value_set(key, json.dumps(status), allow_overwrite=True)


def statuses(topic: str) -> dict[int, Any]:
    """Returns what processes have reported so far, by process."""
    return {process: json.loads(text) for process, text in sorted(_by_process(f"{_PREFIX}/{topic}/").items())}


def remove_statuses(topic: str) -> None:
    client().key_value_delete(f"{_PREFIX}/{topic}/")


def decide(topic: str, value: str) -> str:
    """Stores a value, unless another process has stored one, and returns the one that is stored."""
    key = f"{_PREFIX}/{topic}/decision"
    with _tolerated("ALREADY_EXISTS"):
        client().key_value_set(key, value)
    return client().key_value_try_get(key)


def decision(topic: str, is_cancelled: Callable[[], bool]) -> str | None:
    """Waits for the value of `decide`, for as long as it takes; None if that is cancelled, asked once a second."""
    while not is_cancelled():
        with _tolerated("DEADLINE_EXCEEDED"):
            return client().blocking_key_value_get(f"{_PREFIX}/{topic}/decision", int(1000 * TICK))
    return None


@contextlib.contextmanager
def _tolerated(status: str) -> Iterator[None]:
    """Ends a block where the coordination service answers with this status."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if status not in str(error):
            raise


def _by_process(directory: str) -> dict[int, str]:
    """Returns the messages whose keys end in the index of a process."""
    return {int(name.rpartition("/")[2]): text for name, text in client().key_value_dir_get(directory)}


def _wait_for(directory: str, name: str, place: str, is_cancelled: Callable[[], bool]) -> str:
    key, deadline = f"{directory}/{name}", time.monotonic() + timeout
    is_in_main_thread, is_announced = threading.current_thread() is threading.main_thread(), False
    topic = _WAITING if is_in_main_thread else _WAITING_TO_READ
    while True:
        with _tolerated("DEADLINE_EXCEEDED"):
            message = client().blocking_key_value_get(key, int(1000 * TICK))
            if is_announced:
                set_status(topic, None)
            return message
        if not is_announced:
            set_status(topic, place)
            is_announced = True
        if known_failure is not None:
            raise ProcessFailure(known_failure)
        if is_cancelled():
            set_status(topic, None)
            raise ProcessFailure(f"The exchange of {place} was cancelled, because its result is no longer needed.")
        if ended := ended_processes():
            if _look_up(key) is not None:  # sent just before the process ended
                continue
            if report := reported_failure():  # just before the process ended, and not known yet
                raise ProcessFailure(report[1])
            problem = (
                f"{describe(ended).capitalize()} ended while process {process_index()} waited at {place}. Let every "
                "process run the same program to its end and make the same Keras calls."
            )
        elif time.monotonic() > deadline:
            problem = _timeout_message(directory, place)
        else:
            continue
        error = ProcessFailure(problem)
        if not is_in_main_thread:
            report_failure(error)  # the main thread may be blocked in a collective, where no exception reaches it
        raise error


def _timeout_message(directory: str, place: str) -> str:
    missing = sorted({*range(process_count())} - {*_by_process(f"{directory}/from/")})
    waiting = statuses(_WAITING_TO_READ) | statuses(_WAITING)
    others = [f"process {n} waits at {other}" for n, other in waiting.items() if n in missing and other != place]
    waited = f"Process {process_index()} waited {counted(timeout, 'second')} at {place}"
    if others:
        return f"{waited}, while {', '.join(others[:4])}. {SAME_CALLS}"
    return f"{waited} for {describe(missing) or 'process 0 to distribute the messages'}. {SLOW_PROCESS_FIX}"


def _look_up(key: str) -> str | None:
    with _tolerated("NOT_FOUND"):
        return client().key_value_try_get(key)
    return None


def announce_start() -> None:
    """Stores host and process id of this process, for the errors of the others."""
    client().key_value_set(f"{_PREFIX}/where/{process_index()}", _host_and_pid())


def ended_processes() -> list[int]:
    return [*statuses(ENDED)]


def _host_and_pid() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def describe(processes: list[int]) -> str:
    """Returns the indices of processes as text, with host and pid of the first four."""
    where = {process: _look_up(f"{_PREFIX}/where/{process}") for process in processes[:4]}
    parts = [f"process {process}{f' ({place})' if place else ''}" for process, place in where.items()]
    return ", ".join(parts + [f"{len(processes) - 4} more"] * (len(processes) > 4))


def report_failure(error: BaseException) -> None:
    """Tells the other processes that this one cannot continue. Only the first report of all processes is kept."""
    if not is_multi_process() or known_failure is not None:
        return
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    message = f"Process {process_index()} ({_host_and_pid()}) failed: {text}"
    with _tolerated("ALREADY_EXISTS"):
        client().key_value_set(f"{_PREFIX}/failed", json.dumps([process_index(), message]))


def reported_failure() -> tuple[int, str] | None:
    """Returns the process that reported a failure, and its message."""
    report = _look_up(f"{_PREFIX}/failed")
    return None if report is None else tuple(json.loads(report))

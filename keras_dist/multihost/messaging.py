"""Short messages between processes, in bounded time, and the failure of another process once it is known.

Messages are stored in JAX's coordination service and not sent through devices: a collective waits forever for a
process that does not take part, and processes must be able to report just that.
"""

import itertools
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from keras_dist.multihost import coordination

DEFAULT_TIMEOUT = 600.0  # seconds
TICK = 1.0  # seconds between two looks at the state of other processes
_PREFIX = "keras_dist"

_timeout = DEFAULT_TIMEOUT
_failure: str | None = None  # of another process, once known
_topics: dict[str, "itertools.count[int]"] = {}
_lock = threading.Lock()


class ProcessFailure(RuntimeError):
    """Another process died, failed, stalled or ended, so this one cannot continue."""


def process_count() -> int:
    """Returns the number of processes."""
    return coordination.process_count()


def process_index() -> int:
    """Returns the index of this process."""
    return coordination.process_index()


def is_multi_process() -> bool:
    """Whether the program runs as several processes."""
    return process_count() > 1


def timeout() -> float:
    """Returns for how many seconds processes wait for one another."""
    return _timeout


def set_timeout(seconds: float) -> None:
    """Sets for how long processes wait for one another."""
    global _timeout
    _timeout = seconds


def exchange(topic: str, message: Any, is_cancelled: Callable[[], bool] = lambda: False) -> list[Any]:
    """Sends a message to all processes and returns the messages of all.

    Every process must call it equally often for each topic. Process 0 collects the messages and distributes them.

    Args:
        topic: names the exchange in keys and errors. The calls for one topic are numbered.
        message: anything that JSON can represent, a few kilobytes at most.
        is_cancelled: whether the answer is no longer needed; called once a second.

    Returns:
        The messages, in the order of the processes.

    Raises:
        ProcessFailure: another process failed or did not send within the timeout, or the exchange was cancelled.
    """
    if not is_multi_process():
        return [message]
    with _lock:
        number = next(_topics.setdefault(topic, itertools.count()))
    client, key, me = _client(), f"{_PREFIX}/{topic}/{number}", process_index()
    client.key_value_set(f"{key}/from/{me}", json.dumps(message))
    if me != 0:
        return json.loads(_wait_for(f"{key}/all", topic, "process 0 to distribute the messages", is_cancelled))
    received = _by_process(f"{key}/from/")
    for process in range(process_count()):
        if process not in received:
            received[process] = _wait_for(f"{key}/from/{process}", topic, f"process {process}", is_cancelled)
    messages = [json.loads(received[process]) for process in range(process_count())]
    client.key_value_set(f"{key}/all", json.dumps(messages))
    if number > 0:  # all have read the previous messages, since they have sent these
        client.key_value_delete(f"{_PREFIX}/{topic}/{number - 1}/")
    return messages


def _client() -> Any:
    client = coordination.client()
    if client is None:
        raise ConnectionError(
            "This process has left the other processes: jax.distributed.shutdown() was called, or the program is "
            "ending. Remove that call, and make all Keras calls before the program ends."
        )
    return client


def _by_process(directory: str) -> dict[int, str]:
    """Returns the messages whose keys end in the index of a process."""
    return {int(name.rpartition("/")[2]): text for name, text in _client().key_value_dir_get(directory)}


def _wait_for(key: str, topic: str, source: str, is_cancelled: Callable[[], bool] = lambda: False) -> str:
    client, deadline = _client(), time.monotonic() + _timeout
    while True:
        try:
            return client.blocking_key_value_get(key, int(1000 * TICK))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        raise_known_failure()
        if is_cancelled():
            raise ProcessFailure(f"The exchange of {topic!r} was cancelled, because its result is no longer needed.")
        ended = ended_processes()
        if ended:
            message = _look_up(key)  # may have been sent just before the process ended
            if message is not None:
                return message
            raise _reported_off_main_thread(
                f"{describe(ended).capitalize()} ended while process {process_index()} waited at {topic!r}. Let every "
                "process run the same program to its end and make the same Keras calls."
            )
        if time.monotonic() > deadline:
            raise _reported_off_main_thread(_timeout_message(key, topic, source))


def _reported_off_main_thread(message: str) -> ProcessFailure:
    error = ProcessFailure(message)
    if threading.current_thread() is not threading.main_thread():
        report_failure(error)  # the main thread may be blocked in a collective, where no exception reaches it
    return error


def _timeout_message(key: str, topic: str, source: str) -> str:
    stem = key.rpartition("/from/")[0] or key.rpartition("/all")[0]
    missing = sorted({*range(process_count())} - {*_by_process(f"{stem}/from/")}) if stem else []
    return (
        f"Process {process_index()} waited {_timeout:g} seconds at {topic!r} for {describe(missing) or source}. Check "
        "what that process is doing; if it only needs longer, increase initialize(timeout=...)."
    )


def _look_up(key: str) -> str | None:
    try:
        return _client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


# --------------------------------------------------------------------------------------- the state of each process


def announce_start() -> None:
    """Stores host and process id of this process, for the errors of the others."""
    _client().key_value_set(f"{_PREFIX}/where/{process_index()}", _host_and_pid())


def announce_end() -> None:
    """Tells the others that this process has reached the end of the program."""
    _client().key_value_set(f"{_PREFIX}/ended/{process_index()}", "")


def ended_processes() -> list[int]:
    """Returns the processes that have reached the end of the program."""
    return [*_by_process(f"{_PREFIX}/ended/")]


def _host_and_pid() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def describe(processes: list[int]) -> str:
    """Returns the indices of processes as text, with host and pid of the first four."""
    parts = []
    for process in processes[:4]:
        where = _look_up(f"{_PREFIX}/where/{process}")
        parts.append(f"process {process}{f' ({where})' if where else ''}")
    if len(processes) > 4:
        parts.append(f"{len(processes) - 4} more")
    return ", ".join(parts)


def report_failure(error: BaseException) -> None:
    """Tells the other processes that this one cannot continue. Only the first report of all processes is kept."""
    if not is_multi_process() or _failure is not None:
        return
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    message = f"Process {process_index()} ({_host_and_pid()}) failed: {text}"
    try:
        _client().key_value_set(f"{_PREFIX}/failed", json.dumps([process_index(), message]))
    except jax.errors.JaxRuntimeError as problem:
        if "ALREADY_EXISTS" not in str(problem):
            raise


def reported_failure() -> tuple[int, str] | None:
    """Returns the process that reported a failure, and its message."""
    report = _look_up(f"{_PREFIX}/failed")
    return None if report is None else tuple(json.loads(report))


def known_failure() -> str | None:
    """Returns the failure of another process that this one knows of."""
    return _failure


def set_known_failure(message: str) -> None:
    """Sets the failure that `raise_known_failure` raises from now on."""
    global _failure
    _failure = message


def raise_known_failure() -> None:
    """Raises a ProcessFailure if another process is known to have failed."""
    if _failure is not None:
        raise ProcessFailure(_failure)

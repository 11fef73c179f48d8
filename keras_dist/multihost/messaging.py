"""What the processes of one program tell each other, in bounded time: short messages, and that one of them failed.

Messages travel through the key-value store of JAX's coordination service, not through the devices: a device waits for
ever where a process does not come, and the processes must be able to say so to each other.
"""

import atexit
import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from keras_dist.multihost import coordination

DEFAULT_TIMEOUT = 600.0  # seconds
_PREFIX = "keras_dist"
_TICK = 1.0  # seconds between two looks at the others
_GRACE = 10.0  # seconds that a process is given to end by itself after another one failed
_MARGIN = 3.0  # seconds that process 0 waits longer than that
_EXIT_STATUS = 70  # of a process that ends because another one failed: EX_SOFTWARE of sysexits.h

_timeout = DEFAULT_TIMEOUT
_is_leaving = False
_threads: list[threading.Thread] = []
_link: coordination.Link | None = None
_silent: list[int] = []  # processes whose heartbeats are missed
_failure: str | None = None  # what is wrong with another process, once it is known
_topics: dict[str, "itertools.count[int]"] = {}
_lock = threading.Lock()


class ProcessFailure(RuntimeError):
    """Another process has died, failed, stalled or ended, so that this one cannot go on."""


def count() -> int:
    """Returns the number of processes that work together."""
    return coordination.process_count()


def index() -> int:
    """Returns the number of this process."""
    return coordination.process_index()


def are_several() -> bool:
    """Whether several processes work together."""
    return count() > 1


def set_timeout(seconds: float) -> None:
    """Sets how long processes wait for one another."""
    global _timeout
    _timeout = seconds


def exchange(topic: str, message: Any, given_up: Callable[[], bool] = lambda: False) -> list[Any]:
    """Gives every process the messages of all.

    Every process calls it as often as the others for each topic. Process 0 collects the messages and hands them out.

    Args:
        topic: what it is about, for keys and errors; the calls for one topic are numbered.
        message: anything that JSON can hold, a few kilobytes at most.
        given_up: whether nobody waits for the answer any more; asked once a second.

    Returns:
        The messages, in the order of the processes.

    Raises:
        ProcessFailure: another process has failed, or does not come within the timeout; or it was given up.
    """
    if not are_several():
        return [message]
    with _lock:
        number = next(_topics.setdefault(topic, itertools.count()))
    client, key, me = _client(), f"{_PREFIX}/{topic}/{number}", index()
    client.key_value_set(f"{key}/from/{me}", json.dumps(message))
    if me != 0:
        return json.loads(_wait_for(f"{key}/all", topic, "process 0 to hand out the messages", given_up))
    found = {int(name.rpartition("/")[2]): text for name, text in client.key_value_dir_get(f"{key}/from/")}
    for process in range(count()):
        if process not in found:
            found[process] = _wait_for(f"{key}/from/{process}", topic, f"process {process}", given_up)
    messages = [json.loads(found[process]) for process in range(count())]
    client.key_value_set(f"{key}/all", json.dumps(messages))
    if number > 0:  # all have taken the messages before, since they have come here
        client.key_value_delete(f"{_PREFIX}/{topic}/{number - 1}/")
    return messages


def publish(key: str, message: Any) -> None:
    """Leaves a message for all others, under a key that is used once."""
    _client().key_value_set(f"{_PREFIX}/said/{key}", json.dumps(message))


def receive(key: str, doing: str) -> Any:
    """Waits for a message that another process publishes.

    Args:
        key: the key it is published under.
        doing: what it is waited for, for errors.

    Raises:
        ProcessFailure: another process has failed, or nothing comes within the timeout.
    """
    return json.loads(_wait_for(f"{_PREFIX}/said/{key}", doing, doing))


def _client() -> Any:
    client = coordination.client()
    if client is None:
        raise ConnectionError("This process has left the others.")
    return client


def _wait_for(key: str, topic: str, who: str, given_up: Callable[[], bool] = lambda: False) -> str:
    client, deadline = _client(), time.monotonic() + _timeout
    while True:
        try:
            return client.blocking_key_value_get(key, int(1000 * _TICK))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        raise_failure()
        if given_up():
            raise ProcessFailure(f"Nobody waits at {topic!r} any more.")
        left = _those_who_left()
        if left:
            said = _look_up(key)  # which may have come just before it ended
            if said is not None:
                return said
            raise _failure_to_come(
                f"Every process runs the same program to its end. {describe(left)} ended while process {index()} "
                f"waits at {topic!r}. Let every process make the same calls of Keras."
            )
        if time.monotonic() > deadline:
            raise _failure_to_come(_stalled(key, topic, who))


def _failure_to_come(words: str) -> ProcessFailure:
    error = ProcessFailure(words)
    if threading.current_thread() is not threading.main_thread():
        report_failure(error)  # the main thread may be waiting for its devices, where no exception reaches it
    return error


def _stalled(key: str, topic: str, who: str) -> str:
    stem = key.rpartition("/from/")[0] or key.rpartition("/all")[0]
    late = []
    if stem:
        here = {int(name.rpartition("/")[2]) for name, _ in _client().key_value_dir_get(f"{stem}/from/")}
        late = [process for process in range(count()) if process not in here]
    whom = describe(late) if late else who
    return (
        f"Processes wait for one another for {_timeout:g} seconds. Process {index()} has waited that long at {topic!r} "
        f"for {whom}. See what that process does; if it only takes longer, raise initialize(timeout=...)."
    )


def _look_up(key: str) -> str | None:
    try:
        return _client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def describe(processes: list[int]) -> str:
    """Returns processes in words: their numbers, and the host and process id of the first few."""
    words = []
    for process in processes[:4]:
        where = _look_up(f"{_PREFIX}/where/{process}")
        words.append(f"process {process}{f' ({where})' if where else ''}")
    if len(processes) > 4:
        words.append(f"{len(processes) - 4} more")
    return ", ".join(words)


# ------------------------------------------------------------------------------------------- when one of them fails


def raise_failure() -> None:
    """Raises what is known to be wrong with another process.

    Raises:
        ProcessFailure: if something is.
    """
    if _failure is not None:
        raise ProcessFailure(_failure)


def report_failure(error: BaseException) -> None:
    """Tells the others that this process cannot go on. Only the first report of all processes is kept."""
    if not are_several() or _failure is not None:
        return
    words = " ".join("".join(traceback.format_exception_only(error)).split())
    said = f"Process {index()} ({_where()}) failed: {words}"
    try:
        _client().key_value_set(f"{_PREFIX}/failed", json.dumps([index(), said]))
    except jax.errors.JaxRuntimeError as problem:
        if "ALREADY_EXISTS" not in str(problem):
            raise


def watch() -> None:
    """Begins to watch the other processes, and lets them know when this one fails or ends. Called once.

    Raises:
        ValueError: this process was told another number of processes than process 0.
        ProcessFailure: process 0 does not come to this within the timeout.
    """
    global _link
    _client().key_value_set(f"{_PREFIX}/where/{index()}", _where())
    if index() == 0:
        service = coordination.service_of_this_process()
        door = None if service is None else [service.port, service.token]
        publish("door", {"count": count(), "door": door})
    said = receive("door", "the start")
    if said["door"] is not None:
        try:
            _link = coordination.Link(index(), *said["door"])
        except OSError:
            _link = None  # something lies between, and heartbeats have to do
    _report_uncaught_errors()
    atexit.register(_leave)  # after JAX has registered its own, so that this comes first
    for work in (_hear_heartbeats, _watch):
        _threads.append(threading.Thread(target=work, name=f"keras_dist{work.__name__}", daemon=True))
        _threads[-1].start()
    if said["count"] != count():
        raise ValueError(
            f"All processes count the same number of processes. Received: num_processes={count()} in process "
            f"{index()}, {said['count']} in process 0. Give all of them the same."
        )


def _where() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def _watch() -> None:
    global _failure
    while _failure is None and not _is_leaving:
        if not coordination.is_joined():  # the program has called jax.distributed.shutdown()
            _say_farewell()
            return
        try:
            gone = _gone(_TICK)
            report = _look_up(f"{_PREFIX}/failed")
            if report is not None:
                process, said = json.loads(report)
                if process == index():
                    time.sleep(2 * _GRACE)  # for its own end, unless that waits for its devices
                    _end(said)
                _failure = said
            elif gone := gone or _silent:
                _failure = f"{describe(gone).capitalize()} died or does not answer any more."
        except (jax.errors.JaxRuntimeError, ConnectionError) as error:
            if _is_leaving or not coordination.is_joined():
                continue
            _failure = f"The coordination service, at {coordination.address()}, does not answer: {error}"
    if _failure is None:
        return
    time.sleep(_GRACE)  # for the main thread, unless it waits for another process where no exception reaches it
    _end(_failure)


def _gone(seconds: float) -> list[int]:
    """Waits for some seconds, or until processes have ended without leave. Returns their numbers."""
    if _link is not None:
        return _link.gone(seconds)
    time.sleep(seconds)
    return []


def _hear_heartbeats() -> None:
    """Finds the processes whose heartbeats JAX misses: those that stand still, or beyond a network that broke.

    In a thread of its own, since JAX answers only when it has heard of all.
    """
    global _silent
    everyone = list(range(count()))
    while not _silent and _failure is None and not _is_leaving and coordination.is_joined():
        time.sleep(_TICK)
        try:
            living = {*_client().get_live_nodes(everyone), *_those_who_left()}
            _silent = [process for process in everyone if process not in living]
        except (jax.errors.JaxRuntimeError, ConnectionError):
            continue  # if the service has ended, the other thread says so


def _those_who_left() -> list[int]:
    """The processes that have come to the end of the program."""
    return [int(name.rpartition("/")[2]) for name, _ in _client().key_value_dir_get(f"{_PREFIX}/left/")]


def _end(failure: str) -> None:
    sys.stdout.flush()
    _print_end(failure)
    os._exit(_EXIT_STATUS)


def _print_end(failure: str) -> None:
    print(f"keras_dist: process {index()} ends. {failure}", file=sys.stderr, flush=True)


def _is_of_devices(error: BaseException) -> bool:
    """Whether an error is one of JAX's runtime, which has several types and begins with a code: `UNKNOWN: Gloo ...`."""
    return isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]+: ", str(error)) is not None


def _leave() -> None:
    """Ends the part of this process. Process 0 waits for the others, since what they speak through ends with it."""
    global _is_leaving
    if not coordination.is_joined():
        _say_farewell()
        return
    _client().key_value_set(f"{_PREFIX}/left/{index()}", "")
    _say_farewell()
    if index() == 0:
        _wait_for_others()
    _is_leaving = not _has_failed()
    # A thread that is in JAX's library when Python ends would abort the process: what it waits for ends first.
    with contextlib.nullcontext() if _is_leaving else contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.distributed.shutdown()
    for thread in _threads:
        thread.join(_GRACE if _is_leaving else _TICK)


def _say_farewell() -> None:
    if _link is not None:
        _link.leave()


def _wait_for_others() -> None:
    deadline, failed = time.monotonic() + _timeout, False
    while len(_those_who_left()) < count() and time.monotonic() < deadline:
        if not failed and _has_failed():
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE + _MARGIN)
        time.sleep(_TICK / 10)


def _has_failed() -> bool:
    return _failure is not None or _look_up(f"{_PREFIX}/failed") is not None


def _report_uncaught_errors() -> None:
    before: Callable = sys.excepthook

    def hook(kind, error, trace):
        left: list[int] = []
        if _is_of_devices(error):  # perhaps because another process has ended: wait to hear it
            deadline = time.monotonic() + 5 * _TICK
            while _failure is None and not left and time.monotonic() < deadline:
                time.sleep(_TICK / 10)
                left = _those_who_left()
        if left:
            whom = describe(left).capitalize()
            _print_end(f"Every process runs the same program to its end. {whom} ended while others needed it.")
        report_failure(error)
        before(kind, error, trace)
        if _failure is not None and not isinstance(error, ProcessFailure):
            _print_end(_failure)

    sys.excepthook = hook

"""Process 0 does something for all, and the others lend the shards of what it reads: so it writes files, once."""

import builtins
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_dist._keras import internals
from keras_dist.multihost import messaging
from keras_dist.variables.gather import gather
from keras_dist.variables.variable_layouts import all_variables

_this_thread = threading.local()  # leader: the one that leads here
_TOPIC = "what process 0 reads"


def agree(topic: str, message: Any, rule: str) -> None:
    """Makes sure that all processes have come to the same point. All call it.

    Args:
        topic: what it is about.
        message: what must be the same on all; anything that JSON can hold.
        rule: why it must, for the error.

    Raises:
        ValueError: on all processes, where one has said something else.
        ProcessFailure: a process does not come.
    """
    messages = messaging.exchange(topic, message)
    if any(each != messages[0] for each in messages):
        other = next(number for number, each in enumerate(messages) if each != messages[0])
        raise ValueError(
            f"{rule} Received: {messages[0]!r} on process 0, {messages[other]!r} on process {other}. Let every process "
            "make the same calls of Keras, in the same order."
        )


class _Leader:
    """Process 0 while it leads: which of its variables the others lend."""

    def __init__(self, what: str, variables: list[keras.Variable]):
        self.what, self.numbers = what, {id(variable): number for number, variable in enumerate(variables)}


def is_leading() -> bool:
    """Whether this process does something for all at the moment, in this thread."""
    return getattr(_this_thread, "leader", None) is not None


def lead(model: keras.Layer, what: str, work: Callable[[], Any]) -> Any:
    """Does something on process 0; the others wait, and lend the shards of the variables that it reads.

    All processes call it. On process 0 it may be called again inside; that is part of the same work. The work reads
    variables as on one process. It must start no computation over the whole mesh.

    Args:
        model: what it is done with.
        what: what is done, for errors; the same on all processes. Follows "could not".
        work: does it.

    Returns:
        On process 0 what the work returns, else None; after it is done.

    Raises:
        ValueError: the processes do not want the same, or their models differ.
        ProcessFailure: another process fails.
        Exception: what the work raises, on all processes.
    """
    if is_leading() or not messaging.is_multi_process():
        return work()
    variables = list(all_variables(model))
    shapes = ";".join(f"{variable.dtype}{tuple(variable.shape)}" for variable in variables)
    agree(
        "what process 0 does",
        [what, f"{len(variables)} variables", hashlib.sha256(shapes.encode()).hexdigest()[:12]],
        "All processes do the same with the same model.",
    )
    if messaging.process_index() != 0:
        return _lend(variables, what)
    _this_thread.leader = _Leader(what, variables)
    try:
        result = work()
    except messaging.ProcessFailure:
        raise
    except BaseException as error:
        messaging.exchange(_TOPIC, {"failed": [type(error).__name__, str(error)]})
        raise
    finally:
        _this_thread.leader = None
    messaging.exchange(_TOPIC, "done")
    return result


def _lend(variables: list[keras.Variable], what: str) -> None:
    while True:
        request = messaging.exchange(_TOPIC, None)[0]
        if request == "done":
            return
        if "failed" in request:
            raise _as_raised(request["failed"], what)
        gather(internals.variable_value(variables[request["read"]]), keep=False)


def _as_raised(failure: list[str], what: str) -> Exception:
    """The error of process 0, as one of the same type where it is one of Python's."""
    kind, words = failure
    cause = getattr(builtins, kind, None)
    message = f"Process 0 could not {what}: {kind}: {words}"
    if isinstance(cause, type) and issubclass(cause, Exception) and not issubclass(cause, UnicodeError):
        return cause(message)
    return RuntimeError(message)


def borrow(variable: keras.Variable) -> np.ndarray:
    """Returns the value of a variable that other processes hold parts of. Process 0 calls it while it leads.

    Args:
        variable: one of the model that it leads with.

    Raises:
        ValueError: the variable is none of the model's.
    """
    leader = _this_thread.leader
    number = leader.numbers.get(id(variable))
    if number is None:
        raise ValueError(
            "Process 0 reads variables of the model that it works with, since the others know of no other ones. "
            f"Received: {variable.path!r}, read to {leader.what}. Track it by a layer of the model."
        )
    messaging.exchange(_TOPIC, {"read": number})
    value = gather(internals.variable_value(variable))
    assert value is not None
    return value

"""Variables whose shards are on several processes: all read them together, or process 0 does while the others send."""

import builtins
import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from keras_dist._keras import internals
from keras_dist._keras.thread_value import ThreadValue
from keras_dist._report.units import counted
from keras_dist.multihost import messaging
from keras_dist.variables.gather import gather
from keras_dist.variables.host_to_device import is_fully_local
from keras_dist.variables.variable_layouts import all_variables

_is_agreed = ThreadValue(False)  # whether the reads of this block were compared
own_shards_only = ThreadValue(False)  # whether `get_weights` returns `HeldShards`, since its result is assigned again
# What process 0 does for all in this thread, and the indices by which the others know the variables of the model.
_work: ThreadValue[tuple[str, dict[int, int]] | None] = ThreadValue(None)
_TOPIC = "what process 0 reads"


def is_held_by_others(value: Any) -> bool:
    """Whether a value is a concrete array with shards that only other processes hold."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return is_array and not is_fully_local(value)


def read(variable: keras.Variable) -> np.ndarray:
    """Returns the value of a variable for which `is_held_by_others` is true.

    All processes must call it, except inside of `run_on_process_zero`. Raises ValueError if another process reads
    another variable, and ProcessFailure if one failed or did not call it within the timeout.
    """
    if is_running_for_all():
        request_shards(variable)
    elif not _is_agreed.value:
        _require_same_read(variable.path)
    value = gather(internals.variable_value(variable))
    assert value is not None
    return value


def local_value(variable: keras.Variable, value: Any) -> Any:
    """Returns the value of a variable as an array on devices of this process alone. A tracer is returned unchanged."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or value.is_fully_addressable:
        return value
    return jnp.asarray(read(variable)) if is_held_by_others(value) else value.addressable_data(0)


def _require_same_read(what: str) -> None:
    rule = "A weight whose shards are on several processes must be read by all of them."
    require_same_call("reading of weights", what, rule)


def agreed(what: str) -> contextlib.AbstractContextManager:
    """Compares once, for a block, what all processes read."""
    if not is_running_for_all():
        _require_same_read(what)
    return _is_agreed.set_to(True)


class HeldShards:
    """A copy on the host of the shards that this process holds of an array, to be assigned again later."""

    def __init__(self, value: jax.Array):
        self.shape, self.dtype, self._sharding = value.shape, value.dtype, value.sharding
        by_index = {str(shard.index): shard.data for shard in value.addressable_shards}  # replicas are copied once
        copies = {index: np.array(data) for index, data in by_index.items()}
        self._shards = {shard.device: copies[str(shard.index)] for shard in value.addressable_shards}

    def restored(self) -> jax.Array:
        shards = [jax.device_put(shard, device) for device, shard in self._shards.items()]
        return jax.make_array_from_single_device_arrays(self.shape, self._sharding, shards, dtype=self.dtype)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(gather(self.restored()), dtype=dtype)


def require_same_call(topic: str, message: str, rule: str) -> None:
    """Raises a ValueError on all processes if `message` differs. All processes must call it.

    `topic` names the exchange; `rule` is a sentence for the error about what processes must do. Raises ProcessFailure
    if a process failed, or did not call it within the timeout.
    """
    messages = messaging.exchange(topic, message)
    other = next((process for process, each in enumerate(messages) if each != messages[0]), None)
    if other is not None:
        raise ValueError(
            f"Calls differ between processes: {messages[0]!r} on process 0, {messages[other]!r} on process {other}. "
            f"{rule} Let every process make the same Keras calls in the same order."
        )


def is_running_for_all() -> bool:
    """Whether this process is doing work for all, in this thread."""
    return _work.value is not None


def run_on_process_zero(model: keras.Layer, task: str, work: Callable[[], Any]) -> Any:
    """Runs a function on process 0, while the others send it the shards of the variables of `model` that it reads.

    All processes must call it. On process 0, nested calls are part of the same work. The function reads variables as in
    a single-process program. It must not start computations over all devices of the mesh. When it has returned, process
    0 gets its result and the others None; its exception is raised on all. Raises ValueError if the processes pass other
    models or other tasks (as in "Process 0 could not <task>"), and ProcessFailure if another process failed.
    """
    if is_running_for_all() or not messaging.is_multi_process():
        return work()
    variables = list(all_variables(model))
    shapes = ";".join(f"{variable.dtype}{tuple(variable.shape)}" for variable in variables)
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:12]
    require_same_call(
        "work of process 0",
        f"{task} ({counted(len(variables), 'variable')}, digest of their shapes: {digest})",
        "All processes must do the same with the same model.",
    )
    if messaging.process_index() != 0:
        return _send_shards(variables, task)
    with _work.set_to((task, {id(variable): index for index, variable in enumerate(variables)})):
        try:
            result = work()
        except messaging.ProcessFailure:
            raise
        except BaseException as error:
            messaging.exchange(_TOPIC, {"failed": [type(error).__name__, str(error)]})
            raise
    messaging.exchange(_TOPIC, "done")
    return result


def _send_shards(variables: list[keras.Variable], task: str) -> None:
    while (request := messaging.exchange(_TOPIC, None)[0]) != "done":
        if "failed" in request:
            raise _error_of_process(0, request["failed"], task)
        gather(internals.variable_value(variables[request["read"]]), keep=False)


def run_on_every_process(task: str, work: Callable[[], Any]) -> None:
    """Runs a function on each process, and raises the exception of one on all, which must call it for the same task."""
    failure: Exception | None = None
    try:
        work()
    except messaging.ProcessFailure:
        raise
    except Exception as error:
        failure = error
    failures = messaging.exchange("work of every process", failure and [type(failure).__name__, str(failure)])
    if failure is not None:
        raise failure
    for process, each in enumerate(failures):
        if each is not None:
            raise _error_of_process(process, each, task)


def _error_of_process(process: int, failure: list[str], task: str) -> Exception:
    """Returns the error with its type on another process if that is one of Python's, else as a RuntimeError."""
    kind, text = failure
    cause = getattr(builtins, kind, None)
    message = f"Process {process} could not {task}: {kind}: {text}"
    if isinstance(cause, type) and issubclass(cause, Exception) and not issubclass(cause, UnicodeError):
        return cause(message)
    return RuntimeError(message)


def request_shards(variable: keras.Variable) -> None:
    """Makes the other processes `gather` a variable whose shards they hold. For process 0 inside of its work."""
    assert _work.value is not None
    task, indices = _work.value
    if id(variable) not in indices:
        raise ValueError(
            f"Process 0 cannot read {variable.path!r} to {task}: its shards are on several processes, and it is "
            "not a variable of the model. Make it an attribute of a layer of the model."
        )
    messaging.exchange(_TOPIC, {"read": indices[id(variable)]})

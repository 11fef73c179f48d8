"""Reads of variables whose shards are on several processes: all processes read the same ones together."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from keras_dist._keras import internals
from keras_dist._keras.thread_value import ThreadValue
from keras_dist.variables import process_zero
from keras_dist.variables.gather import gather
from keras_dist.variables.host_to_device import is_fully_local

_is_agreed = ThreadValue(False)  # whether the reads of this block were compared
own_shards_only = ThreadValue(False)  # whether `get_weights` returns `HeldShards`, since its result is assigned again


def is_held_by_others(value: Any) -> bool:
    """Whether a value is a concrete array with shards that only other processes hold."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return is_array and not is_fully_local(value)


def read(variable: keras.Variable) -> np.ndarray:
    """Returns the value of a variable for which `is_held_by_others` is true.

    All processes must call it, except inside of `process_zero.run_on_process_zero`. Raises ValueError if another
    process reads another variable, and ProcessFailure if one failed or did not call it within the timeout.
    """
    if process_zero.is_running_for_all():
        process_zero.request_shards(variable)
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
    process_zero.require_same_call("reading of weights", what, rule)


def agreed(what: str) -> contextlib.AbstractContextManager:
    """Compares once, for a block, what all processes read."""
    if not process_zero.is_running_for_all():
        _require_same_read(what)
    return _is_agreed.set_to(True)


# ------------------------------------------------------------------------------------------- assigned again later


class HeldShards:
    """A copy on the host of the shards that this process holds of an array, to be assigned again later."""

    def __init__(self, value: jax.Array):
        self.shape, self.dtype, self._sharding = value.shape, value.dtype, value.sharding
        copies: dict[str, np.ndarray] = {}
        self._shards = {}
        for shard in value.addressable_shards:
            if (key := str(shard.index)) not in copies:
                copies[key] = np.array(shard.data)
            self._shards[shard.device] = copies[key]

    def restored(self) -> jax.Array:
        shards = [jax.device_put(shard, device) for device, shard in self._shards.items()]
        return jax.make_array_from_single_device_arrays(self.shape, self._sharding, shards, dtype=self.dtype)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(gather(self.restored()), dtype=dtype)

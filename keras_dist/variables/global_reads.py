"""Reading variables of which other processes hold parts: all processes ask for the same ones, or are told."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from keras_dist._keras import internals
from keras_dist.variables import process_zero
from keras_dist.variables.gather import gather
from keras_dist.variables.host_to_device import is_fully_local

_this_thread = threading.local()  # agreed: whether all processes read the same here; own_shards: see `own_shards_only`


def is_held_by_others(value: Any) -> bool:
    """Whether a value is a concrete array of which other processes hold parts that this one does not."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return is_array and not is_fully_local(value)


def read(variable: keras.Variable) -> np.ndarray:
    """Returns the value of a variable of which `is_held_by_others` holds. All processes call it, or process 0 leads.

    Raises:
        ValueError: another process reads something else.
        ProcessFailure: a process does not come.
    """
    if process_zero.is_leading():
        return process_zero.borrow(variable)
    if not getattr(_this_thread, "agreed", False):
        _agree(variable.path)
    value = gather(internals.variable_value(variable))
    assert value is not None
    return value


def local_value(variable: keras.Variable, value: Any) -> Any:
    """Returns the value of a variable as an array of this process alone, where it is one of several.

    Args:
        variable: the variable.
        value: its value, or what stands for it while a function is traced.
    """
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or value.is_fully_addressable:
        return value
    return jnp.asarray(read(variable)) if is_held_by_others(value) else value.addressable_data(0)


def _agree(what: str) -> None:
    process_zero.agree(
        "reading of weights", what, "Weights that lie on several processes are read by all of them at once."
    )


@contextlib.contextmanager
def agreed(what: str) -> Iterator[None]:
    """Makes sure once, for a block, that all processes read the same."""
    if not process_zero.is_leading():
        _agree(what)
    before = getattr(_this_thread, "agreed", False)
    _this_thread.agreed = True
    try:
        yield
    finally:
        _this_thread.agreed = before


# ---------------------------------------------------------------------------------------------- to be put back later


class HeldShards:
    """A copy on the host of what this process holds of an array, to be assigned later.

    Args:
        value: the array.
    """

    def __init__(self, value: jax.Array):
        self.shape, self.dtype, self._sharding = value.shape, value.dtype, value.sharding
        copies: dict[str, np.ndarray] = {}
        self._parts = {}
        for shard in value.addressable_shards:
            if (key := str(shard.index)) not in copies:
                copies[key] = np.array(shard.data)
            self._parts[shard.device] = copies[key]

    def restored(self) -> jax.Array:
        """Returns the array as it lay."""
        parts = [jax.device_put(part, device) for device, part in self._parts.items()]
        return jax.make_array_from_single_device_arrays(self.shape, self._sharding, parts, dtype=self.dtype)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(gather(self.restored()), dtype=dtype)


@contextlib.contextmanager
def own_shards_only() -> Iterator[None]:
    """In a block, weights of several processes that are read to be put back are kept as `HeldShards`."""
    before, _this_thread.own_shards = wants_own_shards(), True
    try:
        yield
    finally:
        _this_thread.own_shards = before


def wants_own_shards() -> bool:
    """Whether weights are read to be put back."""
    return getattr(_this_thread, "own_shards", False)

"""Turns host values into sharded arrays: each device receives only its own shard.

Processes do not communicate. Each is given the same value and takes what its devices hold. Whether it was the same is
compared before a step.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding, SingleDeviceSharding

from keras_dist._keras.training_state import own_copy
from keras_dist.mesh.devices import require_attached
from keras_dist.multihost.value_comparison import SAMPLE, digest_of
from keras_dist.variables.layout_change import changed
from keras_dist.variables.lazy_hdf5 import lazy_tensor
from keras_dist.variables.lazy_tensor import Bounds, LazyTensor, slices_of

_sources: dict[int, tuple[weakref.ref, str]] = {}  # arrays, by id, with digests of the host values they were made of


def is_host_tensor(value: Any) -> bool:
    """Whether a value is a numeric array in memory or a file. Numbers, lists and other frameworks' arrays are not."""
    if isinstance(value, (np.ndarray, LazyTensor)):
        return jnp.issubdtype(value.dtype, np.number) or value.dtype == np.bool_
    if isinstance(value, (jax.Array, Tracer)) or not all(hasattr(value, name) for name in ("__array__", "shape")):
        return False
    dtype = getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "biufc" and isinstance(value.shape, tuple)


def to_numpy(value: Any, dtype: Any = None) -> np.ndarray:
    """Converts a host tensor to a new NumPy array as JAX does: by default 64 bits become 32 unless JAX enables 64."""
    return _converted(np.asarray(value), _jax_dtype(value.dtype if dtype is None else dtype), is_own=False)


def place(value: Any, sharding: Sharding, dtype: Any = None) -> jax.Array:
    """Places a host tensor, which is the same on all processes, on devices, shard by shard.

    Without `dtype`, 64 bits become 32 unless JAX enables 64. Raises ValueError if the sharding does not fit the shape.
    """
    shape, dtype = tuple(value.shape), _jax_dtype(value.dtype if dtype is None else dtype)
    holders: dict[Bounds, list] = {}  # replicas of a shard are read once
    for device, bounds in _bounds_by_device(sharding, shape).items():
        holders.setdefault(bounds, []).append(device)
    arrays: list[jax.Array] = []
    for bounds, shard in _read_shards(value, list(holders), dtype):
        for device in holders[bounds]:
            arrays.append(jax.device_put(shard, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)))
    placed = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
    if isinstance(value, np.ndarray) and not (sharding.is_fully_addressable or sharding.is_fully_replicated):
        key = id(placed)
        _sources[key] = weakref.ref(placed, lambda _: _sources.pop(key, None)), digest_of([value], SAMPLE)
    return placed


def source_of(array: Any) -> str:
    """Returns a digest of the host value that an array over several processes was made of, empty if it is unknown."""
    return _sources.get(id(array), (None, ""))[1]


def reshard(value: Any, sharding: Any) -> Any:
    """Places a `jax.Array`, or a host tensor that is the same on all processes, with another sharding or on a device.

    Processes communicate only if they lack shards that they need. An array that has that sharding already may be
    returned itself. Otherwise the two share no memory, so that a step may donate one of them.
    """
    if not isinstance(sharding, Sharding):
        return jax.device_put(value, sharding)
    require_attached(sharding.device_set)
    if is_host_tensor(value):
        return place(value, sharding)
    if isinstance(value, jax.Array) and not sharding.is_fully_addressable:
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        if is_fully_local(value) and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return place(local_numpy(value), sharding)
    if isinstance(value, jax.Array) and value.sharding != sharding:
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return jax.device_put(value, sharding, may_alias=False)
        if (moved := changed(value, sharding)) is not None:
            return moved
        before, after = (_bounds_by_device(each, value.shape).items() for each in (value.sharding, sharding))
        if before & after:  # JAX would return an array with these shards of the devices, without a copy of them
            value = own_copy(value)
    return jax.device_put(value, sharding)


def _bounds_by_device(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Bounds]:
    indices = sharding.addressable_devices_indices_map(shape).items()
    return {device: bounds_of(index or (), shape) for device, index in indices}


def bounds_of(index: Sequence[slice], shape: tuple[int, ...]) -> Bounds:
    return tuple((start, end) for start, end, _ in map(slice.indices, index, shape))


def is_fully_local(value: jax.Array) -> bool:
    """Whether the devices of this process together hold the full array."""
    return value.is_fully_addressable or (value.is_fully_replicated and bool(value.addressable_shards))


def local_numpy(value: jax.Array) -> np.ndarray:
    """Returns the full array, for which `is_fully_local` holds, without communication.

    JAX keeps what it copies to the host as long as the array exists, so another array with the same buffers is read.
    """
    own = value if value.is_fully_addressable else value.addressable_data(0)
    shards = [shard.data for shard in own.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(own.shape, own.sharding, shards))


def _jax_dtype(dtype: Any) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))


def _read_shards(value: Any, shards: Sequence[Bounds], dtype: np.dtype) -> Iterator[tuple[Bounds, np.ndarray]]:
    if not isinstance(value, LazyTensor) and hasattr(value, "read_direct"):  # an `h5py.Dataset`
        value = lazy_tensor(value) or value
    if isinstance(value, LazyTensor):
        for bounds, shard in value.read_shards(shards):
            yield bounds, _converted(shard, dtype, is_own=True)
    else:
        array = np.asarray(value)
        for bounds in shards:
            shard = np.asarray(array[slices_of(bounds)])
            yield bounds, _converted(shard, dtype, is_own=False)


def _converted(array: np.ndarray, dtype: np.dtype, is_own: bool) -> np.ndarray:
    """Converts as JAX does, to memory that nobody else writes to: CPU devices may keep it without a copy."""
    if dtype == jnp.bfloat16:  # from 64 bits via 32 bits, as Keras does
        array = array.astype(_jax_dtype(array.dtype), copy=False)
    return np.array(array, dtype=dtype, order="C", copy=None if is_own else True)

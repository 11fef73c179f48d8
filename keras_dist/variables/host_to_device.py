"""A value becomes the shards of a variable: each device is sent its own part, and none the whole.

Processes do not speak to one another for it. Each is given the same value, and takes what its devices hold.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from keras_dist.variables.lazy_hdf5 import Bounds, StoredTensor, stored_tensor


def is_host_tensor(value: Any) -> bool:
    """Whether a value is an array of numbers in the memory of the host, or in a file.

    Args:
        value: anything. Python numbers and lists are no arrays, arrays of other frameworks are none of the host.
    """
    if isinstance(value, (np.ndarray, StoredTensor)):
        return jnp.issubdtype(value.dtype, np.number) or value.dtype == np.bool_
    if isinstance(value, (jax.Array, Tracer)) or not all(hasattr(value, name) for name in ("__array__", "shape")):
        return False
    dtype = getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "biufc" and isinstance(value.shape, tuple)


def on_host(value: Any, dtype: Any = None) -> np.ndarray:
    """Returns a host tensor as an array of its own that holds what JAX would convert it to.

    Args:
        value: a value of which `is_host_tensor` holds.
        dtype: the dtype to convert it to; by default its own, as far as JAX is told to keep 64 bits.
    """
    return _converted(np.asarray(value), _dtype_in_jax(value.dtype if dtype is None else dtype), is_own=False)


def place(value: Any, sharding: Sharding, dtype: Any = None) -> jax.Array:
    """Lays a host tensor out, part by part.

    Args:
        value: a value of which `is_host_tensor` holds; the same on all processes.
        sharding: where its parts belong.
        dtype: the dtype to convert it to; by default its own, as far as JAX is told to keep 64 bits.

    Returns:
        The array.

    Raises:
        ValueError: the sharding does not divide the shape.

    Example:

    >>> from keras_dist import DeviceMesh, TensorLayout
    >>> layout = TensorLayout(("data", None), DeviceMesh((8,), ["data"]))
    >>> array = place(np.arange(16.0).reshape(8, 2), layout.backend_layout)
    >>> array.dtype, array.addressable_data(3)
    (dtype('float32'), Array([[6., 7.]], dtype=float32))
    """
    shape, dtype = tuple(value.shape), _dtype_in_jax(value.dtype if dtype is None else dtype)
    holders: dict[Bounds, list] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        part = tuple((start, end) for start, end, _ in map(slice.indices, index or (), shape))
        holders.setdefault(part, []).append(device)
    arrays: list[jax.Array] = []
    for devices, piece in _cut(value, holders, dtype):
        arrays.extend(jax.device_put(piece, device) for device in devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def move(value: Any, sharding: Any) -> Any:
    """Lays an array out anew; across processes only where its parts do not lie whole on this one.

    Args:
        value: an array of JAX or of the host; of several processes, the same on all.
        sharding: where its parts belong.

    Returns:
        The array; the same one where it lies so already.
    """
    if not isinstance(sharding, Sharding):
        return jax.device_put(value, sharding)
    if is_host_tensor(value):
        return place(value, sharding)
    if isinstance(value, jax.Array) and not sharding.is_fully_addressable:
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        if has_all_here(value) and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return place(held_here(value), sharding)
    return jax.device_put(value, sharding)


def has_all_here(value: jax.Array) -> bool:
    """Whether the devices of this process hold all of an array."""
    return value.is_fully_addressable or (value.is_fully_replicated and bool(value.addressable_shards))


def held_here(value: jax.Array) -> np.ndarray:
    """Returns an array of which `has_all_here` holds as one of the host, without asking other processes."""
    return np.asarray(value if value.is_fully_addressable else value.addressable_data(0))


def _dtype_in_jax(dtype: Any) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))


def _cut(value: Any, holders: dict[Bounds, list], dtype: np.dtype) -> Iterator[tuple[list, np.ndarray]]:
    """Yields the devices of each part, and the part."""
    parts: Sequence[Bounds] = list(holders)
    if not isinstance(value, (np.ndarray, StoredTensor)):
        value = (stored_tensor(value) if hasattr(value, "read_direct") else None) or np.asarray(value)
    if isinstance(value, StoredTensor):
        for number, piece in value.read_parts(parts):
            yield holders[parts[number]], _converted(piece, dtype, is_own=True)
    else:
        for part in parts:
            piece = value[tuple(slice(start, end) for start, end in part)]
            yield holders[part], _converted(np.asarray(piece), dtype, is_own=False)


def _converted(piece: np.ndarray, dtype: np.dtype, is_own: bool) -> np.ndarray:
    """A part in another dtype, as JAX converts it; in memory of its own, which devices of the host may keep."""
    if dtype == jnp.bfloat16:  # from 64 bits by way of 32, as in Keras
        piece = piece.astype(_dtype_in_jax(piece.dtype), copy=False)
    return np.array(piece, dtype=dtype, order="C", copy=None if is_own else True)

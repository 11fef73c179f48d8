"""Gathers a global array to the host in pieces, of which no device and no process holds more than one at a time."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist.variables import host_to_device
from keras_dist.variables.lazy_tensor import slices_of


def gather(array: Any, keep: bool = True) -> np.ndarray | None:
    """Gathers an array that is sharded over several processes into a new NumPy array.

    All processes must call it for the same arrays in the same order. Nothing is sent if this process holds all shards.
    With `keep=False` it returns None: this process sends its shards and allocates nothing on the host.
    """
    if host_to_device.is_fully_local(array):
        return _assembled(array) if keep else None
    if not isinstance(array.sharding, NamedSharding):  # not made by this library
        gathered: Any = multihost_utils.process_allgather(array, tiled=True)
        return np.array(gathered) if keep else None
    return gather_pieces(array, keep)


def _assembled(array: jax.Array) -> np.ndarray:
    """Copies shards of this process that together are the full array."""
    shards = {host_to_device.bounds_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    result = np.empty(array.shape, array.dtype)
    for bounds, data in shards.items():
        result[slices_of(bounds)] = host_to_device.local_numpy(data)
    return result


def gather_pieces(array: jax.Array, keep: bool, piece_bytes: int = 2**26) -> np.ndarray | None:
    """Gathers an array on a mesh piece by piece, as `gather` does where processes hold different shards.

    Each device holds `piece_bytes` at a time, in addition to its shard. A piece has some rows of every shard, along the
    largest dim of the shards.

    Example: shards of shape (2, 37, 3) on 2 devices, at most 60 elements for each piece of both. A row of dim 1 has
    2 x 3 elements on each device, so that 5 rows fit. They start at 0, 5, ..., 30 and 32: the last piece overlaps the
    one before it, so that one compiled program serves all.
    """
    result = np.empty(array.shape, array.dtype) if keep else None
    if not array.size:
        return result
    shard_shape = array.sharding.shard_shape(array.shape)
    dim = int(np.argmax(shard_shape))
    length = shard_shape[dim]
    max_rows = piece_bytes // array.dtype.itemsize // (array.size // length)
    rows = math.ceil(length / math.ceil(length / max(1, max_rows)))
    program = _gather_program(array.sharding, array.dtype, dim, rows)
    by_shard = (math.prod(array.shape[:dim]), array.shape[dim] // length, -1, math.prod(array.shape[dim + 1 :]))
    for first in range(0, length, rows):
        start = min(first, length - rows)
        piece = program(array, np.int32(start)).addressable_data(0)
        if result is None:
            piece.block_until_ready()  # before the next piece takes memory
        else:
            rows_of_shards = _from_bits(np.asarray(piece), result.dtype).reshape(by_shard)
            result.reshape(by_shard)[:, :, start : start + rows] = rows_of_shards
    return result


@functools.lru_cache(maxsize=1024)
def _gather_program(sharding: NamedSharding, dtype: Any, dim: int, rows: int) -> Any:
    """Compiles once per layout and shape: gathers some rows of all shards, from a given row on, to every device."""

    def take(shard, start):
        return _as_bits(lax.dynamic_slice_in_dim(shard, start, rows, dim))

    in_specs = (sharding.spec, PartitionSpec())
    pieces = jax.shard_map(take, mesh=sharding.mesh, in_specs=in_specs, out_specs=sharding.spec)
    return jax.jit(pieces, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))


def _as_bits(array: jax.Array) -> jax.Array:
    """Reinterprets an array as unsigned integers, because not every backend can send every dtype."""
    if array.dtype == jnp.bool_ or _bits(array.dtype) < 8:
        return array.astype(jnp.int8)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array
    return lax.bitcast_convert_type(array, f"uint{_bits(array.dtype)}")


def _from_bits(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == np.bool_ or _bits(dtype) < 8:
        return array.astype(dtype)
    return array.view(dtype)


def _bits(dtype: Any) -> int:
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * np.dtype(dtype).itemsize

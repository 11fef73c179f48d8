"""Gathers a global array to the host in pieces, of which no device and no process holds more than one at a time."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist.layout.tensor_layout import axis_names
from keras_dist.variables import host_to_device


def gather(array: Any, keep: bool = True) -> np.ndarray | None:
    """Gathers an array that is sharded over several processes into a new NumPy array.

    All processes must call it for the same arrays in the same order. Nothing is sent if this process holds all shards.
    With `keep=False` it returns None: this process sends its shards and allocates nothing on the host.
    """
    if host_to_device.is_fully_local(array):
        return np.array(host_to_device.local_numpy(array)) if keep else None
    if not isinstance(array.sharding, NamedSharding):  # not made by this library
        gathered: Any = multihost_utils.process_allgather(array, tiled=True)
        return np.array(gathered) if keep else None
    return gather_pieces(array, keep)


def gather_pieces(array: jax.Array, keep: bool, piece_bytes: int = 2**26) -> np.ndarray | None:
    """Gathers an array on a mesh piece by piece, as `gather` does where processes hold different shards.

    Each device holds `piece_bytes` at a time, in addition to its shard.
    """
    result = np.empty(array.shape, array.dtype) if keep else None
    if not array.size:
        return result
    pieces = _Pieces(array.sharding, array.shape, piece_bytes // array.dtype.itemsize)
    program = _gather_program(array.sharding, array.dtype, pieces.dim, pieces.rows)
    for start in pieces.starts():
        gathered = program(array, np.int32(start)).addressable_data(0)
        if result is None:
            gathered.block_until_ready()  # before the next piece takes memory
        else:
            for index, rows in zip(pieces.indices(start), np.asarray(gathered), strict=True):
                result[index] = _from_bits(rows, result.dtype)
    return result


class _Pieces:
    """Splits every shard along its largest dim, `dim`, into pieces of `rows` rows.

    Example: shards of shape (2, 37, 3) on 2 devices, at most 60 elements for each piece of both. A row of dim 1 has
    2 x 3 elements on each device, so that 5 rows fit. They start at 0, 5, ..., 30 and 32: the last piece overlaps the
    one before it, so that one compiled program serves all.
    """

    def __init__(self, sharding: Any, shape: tuple[int, ...], max_elements: int):
        self._shard_shape = sharding.shard_shape(shape)
        self._shards = [size // part for size, part in zip(shape, self._shard_shape, strict=True)]  # along each dim
        self.dim = max(range(len(shape)), key=lambda dim: self._shard_shape[dim])
        length = self._shard_shape[self.dim]
        row_elements = math.prod(shape) // length  # of all shards
        count = math.ceil(length / max(1, max_elements // row_elements))
        self.rows = math.ceil(length / count)

    def starts(self) -> Iterator[int]:
        """Yields the first row of each piece within its shard."""
        length = self._shard_shape[self.dim]
        for start in range(0, length, self.rows):
            yield min(start, length - self.rows)

    def indices(self, start: int) -> Iterator[tuple[slice, ...]]:
        """Yields where in the array the piece of each shard belongs, in the order in which they are gathered."""
        for position in np.ndindex(*self._shards):
            index = [slice(at * size, (at + 1) * size) for at, size in zip(position, self._shard_shape, strict=True)]
            first = index[self.dim].start + start
            index[self.dim] = slice(first, first + self.rows)
            yield tuple(index)


@functools.lru_cache(maxsize=1024)
def _gather_program(sharding: NamedSharding, dtype: Any, dim: int, rows: int) -> Any:
    """Compiles once per layout and shape: gathers some rows of all shards, from a given row on, to every device."""
    names = tuple(axis_names(sharding.spec))

    def take(shard, start):
        piece = lax.dynamic_slice_in_dim(shard, start, rows, dim)
        return lax.all_gather(_as_bits(piece), names)

    gathered = jax.shard_map(
        take, mesh=sharding.mesh, in_specs=(sharding.spec, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(gathered)


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

"""A global array becomes a host array, in pieces: no device and no process holds more than one piece beside it."""

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

from keras_dist.variables import host_to_device

PIECE = 2**26  # bytes of a gathered piece, on every device


def gather(array: Any, keep: bool = True, piece: int = PIECE) -> np.ndarray | None:
    """Returns an array that is sharded over several processes as an array of the host.

    All processes call it for the same arrays in the same order. Where this process holds all of an array, nothing is
    sent.

    Args:
        array: a `jax.Array`.
        keep: whether this process wants the values. The others lend their shards and allocate nothing on the host.
        piece: bytes that each device holds at a time, beside its shard.

    Returns:
        The values, in memory that they share with nobody; None where `keep` is False.
    """
    if host_to_device.has_all_here(array):
        return np.array(host_to_device.held_here(array)) if keep else None
    if not isinstance(array.sharding, NamedSharding):  # nothing of ours
        whole: Any = multihost_utils.process_allgather(array, tiled=True)
        return np.array(whole) if keep else None
    return gather_pieces(array, keep, piece)


def gather_pieces(array: jax.Array, keep: bool, piece: int) -> np.ndarray | None:
    """As `gather`, of an array over a mesh, in the way that is needed where processes hold different shards.

    Args:
        array: of any shape, laid out over a mesh.
        keep: whether this process wants the value; it takes part either way.
        piece: bytes that each device holds at a time, beside its shard.

    Returns:
        The whole array, None where it is not kept.
    """
    steps = _Steps.of(array.sharding, array.shape, piece // array.dtype.itemsize)
    result = np.empty(array.shape, array.dtype) if keep else None
    if not array.size:
        return result
    program = _program(array.sharding, array.dtype, steps.dim, steps.rows)
    for start in steps.starts():
        gathered = program(array, np.int32(start)).addressable_data(0)
        if result is None:
            gathered.block_until_ready()  # before the next piece takes memory
        else:
            for index, part in zip(steps.places(start), np.asarray(gathered), strict=True):
                result[index] = _as_it_was(part, result.dtype)
    return result


class _Steps:
    """How the shards of an array are cut: rows of their largest dim at a time, as many at each step.

    Attributes:
        dim: the dim that is cut.
        rows: how many of its rows are sent at a step.
    """

    def __init__(self, axes: tuple[tuple[str, ...], ...], sizes: dict[str, int], shard: tuple[int, ...], elements: int):
        self._axes, self._sizes, self._shard = axes, sizes, shard
        self.dim = max(range(len(shard)), key=lambda dim: shard[dim])
        shards = math.prod(sizes[name] for entry in axes for name in entry)
        length = shard[self.dim]
        row = max(1, math.prod(shard) // max(1, length)) * shards
        count = math.ceil(length / max(1, elements // row))
        self.rows = math.ceil(length / max(1, count))

    @classmethod
    def of(cls, sharding: Any, shape: tuple[int, ...], elements: int) -> "_Steps":
        axes = _axes(sharding.spec, len(shape))
        return cls(axes, dict(sharding.mesh.shape), sharding.shard_shape(shape), elements)

    def starts(self) -> Iterator[int]:
        """Yields where each step begins; the last one takes rows again, so that all are of one size."""
        length = self._shard[self.dim]
        for start in range(0, length, self.rows):
            yield min(start, length - self.rows)

    def places(self, start: int) -> Iterator[tuple[slice, ...]]:
        """Yields where in the array the part of each shard belongs, in the order in which they are gathered."""
        counts = [math.prod(self._sizes[name] for name in entry) for entry in self._axes]
        for position in np.ndindex(*counts):
            index = [slice(at * size, (at + 1) * size) for at, size in zip(position, self._shard, strict=True)]
            first = index[self.dim].start + start
            index[self.dim] = slice(first, first + self.rows)
            yield tuple(index)


def _axes(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dim, outermost first."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return tuple(entries) + ((),) * (rank - len(entries))


@functools.lru_cache(maxsize=1024)
def _program(sharding: NamedSharding, dtype: Any, dim: int, rows: int) -> Any:
    """Compiles once for each layout and shape: the rows of all shards from a number on, on every device."""
    names = tuple(name for entry in sharding.spec for name in ((entry,) if isinstance(entry, str) else entry or ()))

    def take(shard, start):
        rows_of_shard = lax.dynamic_slice_in_dim(shard, start, rows, dim)
        return lax.all_gather(_as_bytes(rows_of_shard), names)

    gathered = jax.shard_map(
        take, mesh=sharding.mesh, in_specs=(sharding.spec, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(gathered)


def _as_bytes(array: jax.Array) -> jax.Array:
    """Numbers as unsigned integers, since not every backend sends every dtype."""
    if array.dtype == jnp.bool_ or jnp.iinfo(jnp.int8).bits > _bits(array.dtype):
        return array.astype(jnp.int8)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array
    return lax.bitcast_convert_type(array, f"uint{_bits(array.dtype)}")


def _as_it_was(part: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == np.bool_ or _bits(dtype) < 8:
        return part.astype(dtype)
    return part.view(dtype)


def _bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return 8 * np.dtype(dtype).itemsize

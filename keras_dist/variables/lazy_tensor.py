"""Arrays in files that are read when they are used, so that a process reads only the shards that it holds."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Bounds = tuple[tuple[int, int], ...]  # first index and end of a shard in each dim


class LazyTensor(NDArrayOperatorsMixin):
    """Stands for an array in a file that is to be assigned to a variable, with `read_shards`.

    Anything else that is done with it reads the full array: operators, indexing, methods, functions of NumPy and JAX.
    Subclasses read it, from `_source`, which is what they were created with.
    """

    def __init__(self, source: Any, shape: Sequence[int], dtype: Any):
        self._source: Any = source
        self._array: np.ndarray | None = None
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.ndim, self.nbytes = len(self.shape), math.prod(self.shape) * self.dtype.itemsize

    def load(self) -> np.ndarray:
        """Reads the full array into memory; the file is not needed afterwards."""
        if self._array is None:
            self._array, self._source = np.asarray(self), None
        return self._array

    def read_shards(self, shards: Sequence[Bounds]) -> Iterator[tuple[Bounds, np.ndarray]]:
        """Yields shards of the array, each with its bounds in all dims, as new arrays."""
        if self._array is not None:
            yield from ((shard, self._array[slices_of(shard)].copy()) for shard in shards)
        else:
            yield from self._read_shards(shards)

    def _read_shards(self, shards: Sequence[Bounds]) -> Iterator[tuple[Bounds, np.ndarray]]:
        yield from ((shard, self._read(shard)) for shard in shards)

    def _read(self, bounds: Bounds) -> np.ndarray:
        """Returns a part of the array as a new array."""
        raise NotImplementedError

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        arrays = [each.load() if isinstance(each, LazyTensor) else each for each in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.load())

    def __array__(self, dtype=None, copy=None):
        if self._array is None:
            return np.array(self._read(tuple((0, size) for size in self.shape)), dtype=dtype, copy=None)
        return np.array(self._array, dtype=dtype, copy=copy)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)

    def __getitem__(self, key):
        return self.load()[key]

    def __len__(self) -> int:
        return self.shape[0]


def slices_of(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in bounds)


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    return tuple(end - start for start, end in bounds)


def overlap(one: Bounds, other: Bounds) -> Bounds | None:
    """Returns the bounds of what two shards have in common, None if that is nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < end for start, end in both) else None


def within(outer: Bounds, bounds: Bounds) -> tuple[slice, ...]:
    """Where `bounds` are in an array that holds `outer`."""
    return tuple(slice(start - first, end - first) for (first, _), (start, end) in zip(outer, bounds, strict=True))

"""A host batch becomes global arrays over the mesh, whatever its number of rows."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import sparse

from keras_dist.mesh.device_mesh import DeviceMesh


class BatchPlacer:
    """Lays host batches over the batch axes of a mesh.

    Dim 0 of an array holds the rows of the batch. It is sharded over all batch axes where their product divides
    the number of rows, else over those of them with the largest product that does, else replicated: results do not
    depend on it, only how much of the mesh works on the batch.

    Args:
        device_mesh: the mesh.
        batch_axes: the axes that batches are sharded over, outermost first; `()` replicates them.

    Example:

    >>> placer = BatchPlacer(DeviceMesh((2, 4), ["data", "fsdp"]), ("data", "fsdp"))
    >>> [placer.axes_for(rows) for rows in (16, 12, 6, 5)]
    [('data', 'fsdp'), ('fsdp',), ('data',), ()]
    """

    def __init__(self, device_mesh: DeviceMesh, batch_axes: Sequence[str]):
        self.device_mesh = device_mesh
        self.batch_axes = tuple(batch_axes)
        sizes = device_mesh.axis_sizes
        subsets = itertools.chain.from_iterable(
            itertools.combinations(self.batch_axes, count) for count in range(len(self.batch_axes), -1, -1)
        )
        # Stable: of equal products the one with more axes comes first, so all batch axes before any part of them.
        self._choices = sorted(
            ((math.prod(sizes[name] for name in subset), subset) for subset in subsets), key=lambda c: -c[0]
        )
        self._shardings: dict[tuple[str, ...], jax.sharding.NamedSharding] = {}

    def axes_for(self, rows: int) -> tuple[str, ...]:
        """Returns the batch axes that a number of rows is sharded over, `()` where it is replicated."""
        return next(axes for size, axes in self._choices if rows % size == 0)

    def sharding(self, shape: Sequence[int]) -> jax.sharding.NamedSharding:
        """Returns the sharding of an array of a batch.

        Args:
            shape: the array's shape. A 0-d array is replicated.

        Returns:
            The sharding of dim 0 over the axes of `axes_for`.
        """
        return self._sharding_over(self.axes_for(shape[0]) if len(shape) else ())

    def _sharding_over(self, axes: tuple[str, ...]) -> jax.sharding.NamedSharding:
        sharding, mesh = self._shardings.get(axes), self.device_mesh.backend_mesh
        if sharding is None or sharding.mesh is not mesh:
            spec = jax.sharding.PartitionSpec(axes) if axes else jax.sharding.PartitionSpec()
            sharding = self._shardings[axes] = jax.sharding.NamedSharding(mesh, spec)
        return sharding

    def place(self, batch: Any) -> Any:
        """Lays every array of a batch over the mesh, all of them in one transfer.

        With several processes each passes the whole batch, and its devices take their rows of it; nothing is sent
        from one process to another.

        Args:
            batch: nested tuples, lists and dicts of arrays and Python scalars; `None` stays `None`. A sharded
                array on this mesh's devices stays as it lies, and so does one on devices of several processes.

        Returns:
            The same structure of `jax.Array`.
        """
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        leaves = [_as_array(leaf) for leaf in leaves]
        if jax.process_count() > 1:
            placed = [self._place_of_several(leaf) for leaf in leaves]
        else:
            placed = jax.device_put(leaves, [self._target(leaf) for leaf in leaves])
        return jax.tree.unflatten(structure, placed)

    def place_parts(self, batch: Any, rows: Sequence[Sequence[int]]) -> Any:
        """Lays a batch over the mesh of which each process passes a part; nothing is sent between processes yet.

        Args:
            batch: the part of this process.
            rows: for each array, how many rows each process passes, in the order of the processes.

        Returns:
            The same structure, for `join_parts`.

        Raises:
            ValueError: a sparse array, whose parts cannot be joined, or one that all processes have already.
        """
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        placed = [self._place_part(_as_array(leaf), of_leaf) for leaf, of_leaf in zip(leaves, rows, strict=True)]
        return jax.tree.unflatten(structure, placed)

    def replicate(self, outputs: Any) -> Any:
        """Brings arrays whole to every device, where every process can read them; all processes call it.

        Args:
            outputs: nested tuples, lists and dicts of arrays that lie on the mesh.

        Returns:
            The same structure.
        """
        return _replicated(self.sharding(()))(outputs)

    def _target(self, leaf) -> jax.sharding.Sharding:
        if is_sparse(leaf):
            return self.sharding(())
        if self.is_sharded_here(leaf):
            return leaf.sharding
        return self.sharding(np.shape(leaf))

    def is_sharded_here(self, value: Any) -> bool:
        """Whether a value is an array that somebody has sharded over this mesh's devices already."""
        return (
            isinstance(value, jax.Array)
            and not value.sharding.is_fully_replicated
            and value.sharding.device_set == self.sharding(()).device_set
        )

    def _place_of_several(self, leaf) -> jax.Array:
        if is_global(leaf):
            return leaf
        if is_sparse(leaf):
            return jax.tree.map(lambda part: _from_host(np.asarray(part), self.sharding(())), leaf)
        leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.result_type(leaf)))
        return _from_host(leaf, self.sharding(leaf.shape))

    def _place_part(self, leaf, rows: Sequence[int]) -> "jax.Array | Parts":
        if is_sparse(leaf):
            raise ValueError(
                "With auto_shard_dataset=False each process passes a part of its own, and parts of sparse arrays "
                "cannot be joined. Pass dense arrays, or auto_shard_dataset=True and the whole dataset in all of them."
            )
        if is_global(leaf):
            raise ValueError(
                "With auto_shard_dataset=False each process passes a part of its own, and holds it in whole. "
                f"Received: an array of shape {leaf.shape} that lies on devices of several processes, which is a whole "
                "batch. Pass the part, or auto_shard_dataset=True."
            )
        if np.ndim(leaf) == 0:
            return self._place_of_several(leaf)
        leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
        shape, starts = (sum(rows), *leaf.shape[1:]), list(itertools.accumulate(rows, initial=0))
        target, mine = self.sharding(shape), starts[jax.process_index()]

        def own(index: Any) -> np.ndarray:
            return leaf[_shifted(index[0], -mine, len(leaf)), *index[1:]]

        of_devices: Any = target.devices_indices_map(shape)
        if all(
            starts[device.process_index] <= (index[0].start or 0)
            and (shape[0] if index[0].stop is None else index[0].stop) <= starts[device.process_index + 1]
            for device, index in of_devices.items()
        ):  # each process brings just the rows of its devices
            return jax.make_array_from_callback(shape, target, own)
        return self._place_in_slots(leaf, rows, target)

    def _place_in_slots(self, leaf: np.ndarray, rows: Sequence[int], target) -> "Parts":
        """Places the rows of each process on its own devices, in slots of one size."""
        devices = list(self.device_mesh.backend_mesh.devices.flat)
        ranks: dict[int, int] = {}
        slots = []  # of each device in the mesh's order: its process, and which of that one's slots
        for device in devices:
            slots.append((device.process_index, ranks.get(device.process_index, 0)))
            ranks[device.process_index] = slots[-1][1] + 1
        size = max(1, *(-(-count // ranks[process]) for process, count in enumerate(rows) if process in ranks))
        padded = np.zeros((ranks[jax.process_index()] * size, *leaf.shape[1:]), leaf.dtype)
        padded[: len(leaf)] = leaf

        def slot(index):
            rank = slots[(index[0].start or 0) // size][1]
            return padded[rank * size : (rank + 1) * size]

        spec = jax.sharding.PartitionSpec(self.device_mesh.backend_mesh.axis_names)
        sharding = jax.sharding.NamedSharding(self.device_mesh.backend_mesh, spec)
        array = jax.make_array_from_callback((len(devices) * size, *leaf.shape[1:]), sharding, slot)
        where = {slot: number for number, slot in enumerate(slots)}
        taken = [
            where[process, row // size] * size + row % size
            for process, count in enumerate(rows)
            for row in range(count)
        ]
        return Parts(array, _from_host(np.asarray(taken, "int32"), self.sharding(())), target)


class Parts(NamedTuple):
    """An array of a batch whose rows lie on the devices of the processes that passed them.

    Attributes:
        slots: the rows, with padding between.
        taken: which rows of `slots` make up the array, in their order.
        target: how the array is to lie.
    """

    slots: jax.Array
    taken: jax.Array
    target: jax.sharding.NamedSharding


def join_parts(batch: Any) -> Any:
    """Brings the rows of all processes where they belong.

    All processes call it for the same batch, and in the same order among all that their devices compute.

    Args:
        batch: what `BatchPlacer.place_parts` returns.

    Returns:
        The same structure of `jax.Array`.
    """
    return jax.tree.map(_join, batch, is_leaf=lambda leaf: isinstance(leaf, Parts))


def _join(leaf: Any) -> Any:
    return _joined(leaf.target)(leaf.slots, leaf.taken) if isinstance(leaf, Parts) else leaf


@functools.cache
def _joined(target: jax.sharding.NamedSharding) -> Callable:
    everywhere = jax.sharding.NamedSharding(target.mesh, jax.sharding.PartitionSpec())

    def join(slots, taken):
        return jax.lax.with_sharding_constraint(slots, everywhere)[taken]

    return jax.jit(join, out_shardings=target)


@functools.cache
def _replicated(sharding: jax.sharding.NamedSharding) -> Callable:
    return jax.jit(lambda outputs: outputs, out_shardings=sharding)


def _from_host(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Places a host array that all processes have; `jax.device_put` would compare it among them first."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def is_global(leaf: Any) -> bool:
    """Whether an array lies on devices of other processes too, so that all of them have it."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _shifted(part: slice, by: int, rows: int) -> slice:
    return slice((part.start or 0) + by, rows if part.stop is None else part.stop + by)


def is_sparse(leaf: Any) -> bool:
    """Whether a value is a sparse array of JAX."""
    return isinstance(leaf, sparse.JAXSparse)


_NUMBERS = (bool, int, float, complex)  # a Python number has no dtype of its own in JAX, and must not be given one


def _as_array(leaf):
    return leaf if isinstance(leaf, (np.ndarray, jax.Array, sparse.JAXSparse, *_NUMBERS)) else np.asarray(leaf)

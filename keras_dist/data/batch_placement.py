"""Places host batches on a mesh as global arrays, whatever their number of rows."""

import collections
import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from keras_dist._keras import internals
from keras_dist._report.units import counted
from keras_dist.mesh.device_mesh import DeviceMesh, as_auto_mesh


class UnequalShards(enum.Enum):
    """Where a compiled step may split rows into shards of unequal sizes.

    XLA does so with the right numbers if the batch axes are all axes of the mesh. Where another axis repeats rows, it
    adds the padding of shards to the gradients of lookups, so what is differentiated is not split there.
    """

    NONE = "nowhere"
    OVER_ALL_AXES = "where each device has rows of its own"
    OVER_ANY_AXES = "also where devices repeat rows"


class BatchPlacer:
    """Shards dim 0 of host batches over the batch axes of a mesh, outermost first, and dim 1 over the sequence axes.

    Dim 0 is sharded over the subset of axes with the largest product that divides the number of rows, since JAX places
    arrays in equal shards only; if no axis does, the array is replicated. A compiled step can split rows unequally.
    Dim 1 is sharded if the sequence axes divide it. `layout_of` chooses the layout of arrays with dims instead, given
    their shape.

    >>> placer = BatchPlacer(DeviceMesh((2, 4), ["data", "fsdp"]), ("data", "fsdp"))
    >>> [placer.axes_for(rows) for rows in (16, 12, 6, 5)]
    [('data', 'fsdp'), ('fsdp',), ('data',), ()]
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        batch_axes: Sequence[str],
        sequence_axes: Sequence[str] = (),
        layout_of: Callable[[Sequence[int]], Any] | None = None,
    ):
        self.device_mesh, self._layout_of = device_mesh, layout_of
        self.batch_axes, self.sequence_axes = tuple(batch_axes), tuple(sequence_axes)
        self.num_sequence_shards = math.prod(device_mesh.axis_sizes[name] for name in self.sequence_axes)
        self._subsets = [  # the product of the sizes of each subset of axes, largest first; ties: more axes first
            (math.prod(device_mesh.axis_sizes[name] for name in subset), subset)
            for count in range(len(self.batch_axes), -1, -1)
            for subset in itertools.combinations(self.batch_axes, count)
        ]
        self._subsets.sort(key=lambda pair: -pair[0])
        self.num_batch_shards = self._subsets[0][0]
        self._has_warned = False
        devices = device_mesh.backend_mesh.devices
        self.is_of_several_processes = len({device.process_index for device in devices.flat}) > 1
        self.is_on_cpu = devices.flat[0].platform == "cpu"
        self.is_one_cpu = self.is_on_cpu and devices.size == 1 and jax.process_count() == 1

    def axes_for(self, rows: int) -> tuple[str, ...]:
        """Returns the batch axes to shard a number of rows over, `()` to replicate them."""
        return next(axes for size, axes in self._subsets if rows % size == 0)

    def axes_in_step(self, rows: int, unequal: UnequalShards) -> tuple[str, ...]:
        """Returns the batch axes over which a compiled step shards a number of rows."""
        return self.batch_axes if self.can_split_unequally(rows, unequal) else self.axes_for(rows)

    def can_split_unequally(self, rows: int, unequal: UnequalShards) -> bool:
        """Returns whether a compiled step shards a number of rows over axes that do not divide it."""
        shards = self.num_batch_shards
        are_right = shards == self.device_mesh.backend_mesh.size or unequal is UnequalShards.OVER_ANY_AXES
        return unequal is not UnequalShards.NONE and are_right and rows > 1 and rows % shards > 0

    def split(self, value: Any, rows: int) -> Any:
        """Returns a traced value, if it has so many rows with these over the batch axes, in shards of unequal sizes."""
        if not np.ndim(value) or value.shape[0] != rows:
            return value
        spec = PartitionSpec(self.batch_axes, *[PartitionSpec.UNCONSTRAINED] * (value.ndim - 1))
        return with_sharding_constraint(value, NamedSharding(self.device_mesh.backend_mesh, spec))

    def warning_for(self, rows: int, axes: Sequence[str]) -> str | None:
        """Returns, once, a warning that a step splits a batch over fewer devices than it could, over `axes`."""
        shards, sizes = self.num_batch_shards, self.device_mesh.axis_sizes
        used = math.prod(sizes[name] for name in axes)
        if self._has_warned or rows == 0 or (used == shards and rows >= shards):
            return None
        self._has_warned = True
        over = ",".join(f"{name}:{sizes[name]}" for name in self.batch_axes)
        fault = "smaller than" if rows < shards else "not divisible by"
        effect = f"{counted(shards - rows, 'device', 'has', 'have')} no rows"
        if used < shards:
            effect = f"each row is computed {shards // used} times"
        return (
            f"Batches of {counted(rows, 'row')} are {fault} the {shards} shards of the batch axes ({over}), so "
            f"{effect}. Use a batch size that is a multiple of {shards}."
        )

    def sharding(self, shape: Sequence[int]) -> jax.sharding.NamedSharding:
        """Returns the sharding of an array of this shape; a 0-d array is replicated."""
        if self._layout_of is not None and len(shape):
            return internals.as_sharding(self._layout_of(shape))
        rows = self.axes_for(shape[0]) if len(shape) else ()
        return _sharding_over(rows, self.sequence_axes_for(shape), self.device_mesh.backend_mesh)

    def sequence_axes_for(self, shape: Sequence[int]) -> tuple[str, ...]:
        """Returns the axes to shard dim 1 of an array over, `()` if they do not divide it."""
        return self.sequence_axes if self.is_sequence(shape) and shape[1] % self.num_sequence_shards == 0 else ()

    def is_sequence(self, shape: Sequence[int]) -> bool:
        """Returns whether an array has a dim 1 with a position for each shard of a sequence."""
        # A symbolic dim, of a layer that is built for any length, is not compared.
        return len(shape) > 1 and isinstance(shape[1], int) and shape[1] >= self.num_sequence_shards

    def place(self, batch: Any, is_for_compiled_step: bool = False) -> Any:
        """Places all arrays of a nested global batch on the mesh, in one transfer.

        With several processes each passes the same global batch and places the rows of its own devices; no data is sent
        between processes. Arrays that are already sharded over these devices, or over several processes, are unchanged.
        CPU devices may share the memory of host arrays. A compiled step on one CPU is passed host arrays themselves.
        """
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        leaves = [_as_array(leaf) for leaf in leaves]
        if is_for_compiled_step and self._stay_on_host(leaves):
            placed = leaves
        elif jax.process_count() > 1:
            placed = [self._place_global(leaf) for leaf in leaves]
        else:
            placed = jax.device_put(leaves, [self._target_sharding(leaf) for leaf in leaves])
        return jax.tree.unflatten(structure, placed)

    def _stay_on_host(self, leaves: Sequence[Any]) -> bool:
        # On one CPU, a compiled function takes host arrays in a tenth of the time of `jax.device_put`.
        return self.is_one_cpu and all(isinstance(leaf, np.ndarray) for leaf in leaves)

    def place_stacked(self, batches: Sequence[Any], rows: Sequence[Sequence[int]] | None = None) -> Any | None:
        """Places batches of equal structure, shapes and dtypes as one, whose new dim 0 counts them, in one transfer.

        With `rows`, as for `place_local`, they are this process's rows. Then the result is None if a shard of an array
        has rows of two processes.
        """
        columns = [list(map(_as_array, column)) for column in zip(*map(jax.tree.leaves, batches), strict=True)]
        if rows is not None:
            placed = [self._stack_local(column, counts) for column, counts in zip(columns, rows, strict=True)]
        elif jax.process_count() > 1:
            placed = [_from_host(_stack_on_host(c), _with_dim_0(self.sharding(np.shape(c[0])))) for c in columns]
        else:
            stacks = [_stack_on_host(c) if isinstance(c[0], np.ndarray) else _stack_on_devices(c) for c in columns]
            shardings = [_with_dim_0(self._target_sharding(column[0])) for column in columns]
            placed = stacks if self._stay_on_host(stacks) else jax.device_put(stacks, shardings)
        is_placed = all(array is not None for array in placed)
        return jax.tree.unflatten(jax.tree.structure(batches[0]), placed) if is_placed else None

    def place_local(self, batch: Any, rows: Sequence[Sequence[int]]) -> Any:
        """Places this process's rows of a batch on its devices, for `assemble`. Nothing is sent between processes yet.

        `rows` contains for each array the number of rows of each process. Sparse and global arrays raise ValueError.
        """
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        placed = [self._place_local(_as_array(leaf), counts) for leaf, counts in zip(leaves, rows, strict=True)]
        return jax.tree.unflatten(structure, placed)

    def replicate(self, outputs: Any) -> Any:
        """Replicates arrays over all devices, so that every process can read them. All processes call it."""
        return _replicated(self.sharding(()))(outputs)

    def _target_sharding(self, leaf) -> jax.sharding.Sharding:
        if is_sparse(leaf):
            return self.sharding(())
        is_sharded = isinstance(leaf, jax.Array) and not leaf.sharding.is_fully_replicated
        if is_sharded and leaf.sharding.device_set == self.sharding(()).device_set:
            return leaf.sharding
        return self.sharding(np.shape(leaf))

    def _place_global(self, leaf) -> jax.Array:
        if is_global(leaf):
            return leaf
        if is_sparse(leaf):
            return jax.tree.map(lambda part: _from_host(np.asarray(part), self.sharding(())), leaf)
        leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.result_type(leaf)))
        return _from_host(leaf, self.sharding(leaf.shape))

    def _place_local(self, leaf, rows: Sequence[int]) -> "jax.Array | LocalShards":
        if is_sparse(leaf):
            raise ValueError(
                f"Sparse array of shape {leaf.shape} with auto_shard_dataset=False: the rows of several processes "
                "cannot be joined in a sparse array. Pass dense arrays, or auto_shard_dataset=True with the same "
                "global dataset in all processes."
            )
        if is_global(leaf):
            raise ValueError(
                f"Array of shape {leaf.shape} spans several processes, but with auto_shard_dataset=False each process "
                "passes its own rows. Pass the local rows as a host array, or use auto_shard_dataset=True."
            )
        if np.ndim(leaf) == 0:
            return self._place_global(leaf)
        leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
        shape = (sum(rows), *leaf.shape[1:])
        sharding = self.sharding(shape)
        if not _processes_have_own_shards(sharding, shape, rows):
            return self._place_padded_shards(leaf, rows, sharding)
        return jax.make_array_from_process_local_data(sharding, leaf, shape)

    def _stack_local(self, column: Sequence[Any], rows: Sequence[int]) -> jax.Array | None:
        stack, shape = _stack_on_host(column), (sum(rows), *column[0].shape[1:])
        if column[0].ndim == 0:
            return _from_host(stack, self.sharding(()))
        sharding = self.sharding(shape)
        if not _processes_have_own_shards(sharding, shape, rows):
            return None
        return jax.make_array_from_process_local_data(_with_dim_0(sharding), stack, (len(column), *shape))

    def _place_padded_shards(self, leaf: np.ndarray, rows: Sequence[int], sharding) -> "LocalShards":
        """Places the rows of each process on its own devices, padded to shards of one size.

        Two processes with two devices each that pass 3 and 2 rows (a, b, c and d, e) make the four shards
        `[a b] [c -] [d e] [- -]`. Elements 0, 1, 2, 4, 5 of the concatenated shards are the global batch.
        """
        mesh = self.device_mesh.backend_mesh
        owners = [device.process_index for device in mesh.devices.flat]  # of each shard
        shard_counts = collections.Counter(owners)
        size = max(1, *(-(-rows[process] // count) for process, count in shard_counts.items()))
        padded = np.zeros((shard_counts[jax.process_index()] * size, *leaf.shape[1:]), leaf.dtype)
        padded[: len(leaf)] = leaf
        over_all_devices = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
        shape = (len(owners) * size, *leaf.shape[1:])
        shards = jax.make_array_from_process_local_data(over_all_devices, padded, shape)
        starts = collections.defaultdict(list)  # of the shards of each process
        for number, process in enumerate(owners):
            starts[process].append(number * size)
        indices = [
            starts[process][row // size] + row % size for process, count in enumerate(rows) for row in range(count)
        ]
        return LocalShards(shards, _from_host(np.asarray(indices, "int32"), self.sharding(())), sharding)


@functools.lru_cache  # the same object each time, since JAX computes once for each what goes to which device
def _sharding_over(
    rows: tuple[str, ...], sequence: tuple[str, ...], mesh: jax.sharding.Mesh
) -> jax.sharding.NamedSharding:
    entries = [rows or None, sequence] if sequence else [rows] if rows else []
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))


@functools.lru_cache
def _with_dim_0(sharding: Any) -> jax.sharding.NamedSharding:
    """Returns the sharding of a stack of arrays, given the `NamedSharding` of each."""
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _stack_on_host(arrays: Sequence[Any]) -> np.ndarray:
    return np.stack(arrays, dtype=jax.dtypes.canonicalize_dtype(arrays[0].dtype))


@jax.jit
def _stack_on_devices(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(arrays)


def _processes_have_own_shards(
    sharding: jax.sharding.NamedSharding, shape: tuple[int, ...], rows: Sequence[int]
) -> bool:
    """Whether the rows that each device has of an array are those of its own process, given those of each."""
    starts = list(itertools.accumulate(rows, initial=0))
    device_indices: Any = sharding.devices_indices_map(shape)
    bounds = ((device.process_index, index[0].indices(shape[0])) for device, index in device_indices.items())
    return all(starts[process] <= start <= stop <= starts[process + 1] for process, (start, stop, _) in bounds)


class LocalShards(NamedTuple):
    """An array of a batch whose rows are on the devices of the processes that passed them."""

    shards: jax.Array  # with padding, over all devices
    indices: jax.Array  # the elements of `shards` that make up the global array, in order
    sharding: jax.sharding.NamedSharding  # of the global array


def assemble(batch: Any) -> Any:
    """Sends rows between processes from where `place_local` has put them to where the global batch has them.

    All processes call it for the same batch, and in the same order relative to everything else that their devices
    compute.
    """
    return jax.tree.map(
        lambda leaf: _gather_rows(leaf.sharding)(leaf.shards, leaf.indices) if isinstance(leaf, LocalShards) else leaf,
        batch,
        is_leaf=lambda leaf: isinstance(leaf, LocalShards),
    )


@functools.cache
def _gather_rows(sharding: jax.sharding.NamedSharding) -> Callable:
    replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())

    def gather(shards, indices):
        return jax.lax.with_sharding_constraint(shards, replicated)[indices]

    return jax.jit(gather, out_shardings=sharding)


@functools.cache
def _replicated(sharding: jax.sharding.NamedSharding) -> Callable:
    return jax.jit(lambda outputs: outputs, out_shardings=sharding)


def _from_host(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Places a host array that all processes have; `jax.device_put` would compare it among them first."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def is_global(leaf: Any) -> bool:
    """Whether an array spans devices of several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, sparse.JAXSparse)


def require_numbers(leaf: Any) -> None:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU":
        raise TypeError(
            f"Array of shape {leaf.shape} has dtype {leaf.dtype}, but JAX computes with numbers only. Convert text in "
            "the data pipeline, for example with keras.layers.StringLookup or TextVectorization, and objects with "
            "array.astype('float32')."
        )


def _as_array(leaf):
    # A Python number has no dtype of its own in JAX, and must not be given one.
    if not isinstance(leaf, (np.ndarray, jax.Array, sparse.JAXSparse, bool, int, float, complex)):
        leaf = np.asarray(leaf)
    require_numbers(leaf)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_types) - {AxisType.Auto}:
        mesh = as_auto_mesh(sharding.mesh).backend_mesh  # layers do not annotate their results
        leaf = jax.device_put(leaf, NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind))
    return leaf

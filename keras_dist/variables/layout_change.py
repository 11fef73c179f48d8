"""Changes the layout of an array on the devices that hold it, by collectives that send few bytes.

Where the axes of two meshes differ in size, XLA gathers the array on every device and then slices it. Here a search
over layouts finds the cheapest chain of moves: slices, all-to-alls, permutations of devices and all-gathers.

Example: an array of 8 MiB on 8 devices, from dim 0 over fsdp:8 to dim 1 over model:4 of a mesh data:2,model:4. XLA
sends 7 MiB to each device. A device lacks 1.75 MiB, and this is what the chain sends. A mesh with axes 0:2,1:4 refines
both. Dim 0 is over (0, 1) at first. An all-to-all over 1 shards dim 1 over 1 and leaves dim 0 over 0: 0.75 MiB. An
all-gather of dim 0 over 0 follows: 1 MiB.
"""

import functools
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_dist._keras.training_state import own_copy
from keras_dist.layout.tensor_layout import axis_tuple
from keras_dist.variables.lazy_tensor import Bounds, overlap, shape_of
from keras_dist.variables.piece_exchange import piece_exchange

Axes = tuple[tuple[str, ...], ...]  # those over which each dim is sharded, the major one first
Move = Callable[[jax.Array], jax.Array]  # of a device's shard


class LayoutChange(NamedTuple):
    """A program that changes the layout of arrays.

    Attributes:
        function: Takes an array and returns one with the shards of the new layout; None where devices have them.
        shape: That of what it takes, which has the shards of the old layout.
        before: The sharding of what it takes.
    """

    function: Callable[[jax.Array], jax.Array] | None
    shape: tuple[int, ...]
    before: NamedSharding


def changed(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array | None:
    """Returns an array with another sharding, in memory of its own.

    Nothing goes through the host. All processes with devices of the mesh must call it for the same arrays in the same
    order.

    Returns:
        None unless both shardings are on meshes of the same devices, in the memory of the devices, and a program of
        reasonable size changes one into the other.
    """
    old = array.sharding
    if not (isinstance(old, NamedSharding) and isinstance(sharding, NamedSharding)):
        return None
    is_in_device_memory = all(map(_is_in_device_memory, (old, sharding)))
    is_ordinary = array.size > 0 and not jnp.issubdtype(array.dtype, jax.dtypes.extended)  # no key of random numbers
    if old.device_set != sharding.device_set or not is_in_device_memory or not is_ordinary:
        return None
    change = layout_change(old, sharding, array.shape)
    if change is None:
        return None
    if change.function is None:
        return own_copy(_relabeled(array, array.shape, sharding))
    return _relabeled(change.function(_relabeled(array, change.shape, change.before)), array.shape, sharding)


@functools.lru_cache(maxsize=512)
def layout_change(old: NamedSharding, new: NamedSharding, shape: tuple[int, ...]) -> LayoutChange | None:
    """Returns the program that changes the layout of arrays of a shape; None if it would be too large."""
    devices, target = [_devices(each).ravel().tolist() for each in (old, new)]
    held, needed = ([_bounds(each, shape)[device] for device in devices] for each in (old, new))
    if held == needed:
        return LayoutChange(None, shape, old)
    lacking = max(_elements(after) - _elements(overlap(own, after)) for own, after in zip(held, needed, strict=True))
    chain = _chain(old, new, shape) if devices == target else None
    if chain is None or chain[0] > 1.02 * lacking:
        exchange = piece_exchange(held, needed)
        if exchange is not None:
            mesh, spec = Mesh(np.array(devices, object), ["device"]), PartitionSpec("device")
            function = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            first, *others = old.shard_shape(shape)
            return LayoutChange(jax.jit(function), (len(devices) * first, *others), NamedSharding(mesh, spec))
    if chain is not None:
        return chain[1]
    return LayoutChange(jax.jit(lambda x: x, out_shardings=new), shape, old) if devices == target else None


def _chain(old: NamedSharding, new: NamedSharding, shape: tuple[int, ...]) -> tuple[int, LayoutChange] | None:
    """Returns the elements that a device is sent, and the program; None if no mesh refines both."""
    common = _common_axes(old, new, len(shape))
    if common is None:
        return None
    sizes, before, after = common
    elements, moves = cheapest_moves(before, after, sizes, shape)
    mesh = Mesh(_devices(old).reshape([*sizes.values()]), [*sizes])
    specs = [PartitionSpec(*(axes or None for axes in each)) for each in (before, after)]

    def move(shard):
        return functools.reduce(lambda x, move: move(x), moves, shard)

    function = jax.shard_map(move, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    return elements, LayoutChange(jax.jit(function), shape, NamedSharding(mesh, specs[0]))


def cheapest_moves(
    old: Axes, new: Axes, sizes: Mapping[str, int], shape: Sequence[int]
) -> tuple[int, tuple[Move, ...]]:
    """Returns the elements that a device is sent by the cheapest moves between two layouts, and the moves.

    They are the shortest path, by Dijkstra's algorithm.

    Dims that neither layout shards, and axes that neither uses, stay as they are.
    """
    dims = [dim for dim in range(len(shape)) if old[dim] or new[dim]]
    axes = [axis for axis in sizes if any(axis in each for each in (*old, *new))]
    best, order = {old: (0, 0)}, itertools.count()
    queue: list[tuple] = [((0, 0), next(order), old, ())]
    while queue:
        cost, _, layout, moves = heapq.heappop(queue)
        if layout == new:
            return cost[0], moves
        if cost > best[layout]:
            continue
        local = math.prod(shape) // _shards(layout, sizes)
        for elements, following, move in _moves(layout, sizes, local, dims, axes):
            total = cost[0] + elements, cost[1] + 1  # of paths with equal bytes the one with fewest moves
            is_even = not any(map(operator.mod, shape, _lengths(following, sizes)))
            if is_even and total < best.get(following, (math.inf,)):
                best[following] = total
                heapq.heappush(queue, (total, next(order), following, (*moves, move)))
    raise AssertionError(f"No path from {old} to {new}.")  # to gather everything and slice is one


def _moves(
    layout: Axes, sizes: Mapping[str, int], local: int, dims: Sequence[int], axes: Sequence[str]
) -> Iterator[tuple[int, Axes, Move]]:
    """Yields the elements that a device receives in a move, the layout after it, and the move."""

    def replaced(changes: dict[int, tuple[str, ...]]) -> Axes:
        return tuple(changes.get(dim, given) for dim, given in enumerate(layout))

    used = [axis for given in layout for axis in given]
    for dim in dims:
        for axis in axes:
            if axis not in used:
                move = functools.partial(_slice, axis=axis, dim=dim, parts=sizes[axis])
                yield 0, replaced({dim: (*layout[dim], axis)}), move
        for first in range(len(layout[dim])):
            kept, group = layout[dim][:first], layout[dim][first:]
            devices = math.prod(sizes[axis] for axis in group)
            move = functools.partial(lax.all_gather, axis_name=group, axis=dim, tiled=True)
            yield (devices - 1) * local, replaced({dim: kept}), move
            for to in dims:
                if to != dim:
                    move = functools.partial(
                        lax.all_to_all, axis_name=group, split_axis=to, concat_axis=dim, tiled=True
                    )
                    yield local - local // devices, replaced({dim: kept, to: (*layout[to], *group)}), move
    for names in itertools.permutations(axes, len(used)):
        following = iter(names)
        renamed = tuple(tuple(itertools.islice(following, len(given))) for given in layout)
        if renamed != layout and _lengths(renamed, sizes) == _lengths(layout, sizes):
            pairs = [*zip(_holders(layout, sizes), _holders(renamed, sizes), strict=True)]
            yield local, renamed, functools.partial(lax.ppermute, axis_name=tuple(sizes), perm=pairs)


def _slice(shard: jax.Array, axis: str, dim: int, parts: int) -> jax.Array:
    size = shard.shape[dim] // parts
    return lax.dynamic_slice_in_dim(shard, lax.axis_index(axis) * size, size, dim)


def _holders(layout: Axes, sizes: Mapping[str, int]) -> list[int]:
    """Returns the positions of the devices that hold the first shard and its copies, those of the second, and so on."""
    names = list(sizes)
    used = [names.index(axis) for axes in layout for axis in axes]
    rest = [index for index in range(len(names)) if index not in used]
    return np.arange(math.prod(sizes.values())).reshape([*sizes.values()]).transpose(used + rest).ravel().tolist()


def _lengths(layout: Axes, sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(sizes[axis] for axis in axes) for axes in layout]


def _shards(layout: Axes, sizes: Mapping[str, int]) -> int:
    return math.prod(_lengths(layout, sizes))


def _common_axes(old: NamedSharding, new: NamedSharding, rank: int) -> tuple[dict[str, int], Axes, Axes] | None:
    """Returns the axes of the coarsest mesh that refines two, and both layouts on it; None if no mesh does.

    Example: fsdp:8 and data:2,model:4 are both coarser than 0:2,1:4. An axis ranges over devices at a distance: fsdp
    from 8 (exclusive) down to 1, data from 8 to 4 and model from 4 to 1.
    """
    shapes = [_devices(each).shape for each in (old, new)]
    distances = sorted({math.prod(shape[i:]) for shape in shapes for i in range(len(shape) + 1)}, reverse=True)
    if any(far % near for far, near in itertools.pairwise(distances)):
        return None
    sizes = {str(i): far // near for i, (far, near) in enumerate(itertools.pairwise(distances))}

    def refined(sharding: NamedSharding, shape: tuple[int, ...]) -> Axes:
        parts = {}
        for i, name in enumerate(sharding.mesh.axis_names):
            far, near = math.prod(shape[i:]), math.prod(shape[i + 1 :])
            parts[name] = [axis for axis, distance in zip(sizes, distances, strict=False) if near < distance <= far]
        entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
        return tuple(tuple(part for axis in axis_tuple(entry) for part in parts[axis]) for entry in entries)

    return sizes, refined(old, shapes[0]), refined(new, shapes[1])


def _devices(sharding: NamedSharding) -> np.ndarray:
    mesh: Any = sharding.mesh
    return mesh.devices


def _is_in_device_memory(sharding: NamedSharding) -> bool:
    kind = sharding.memory_kind
    return kind is None or kind == next(iter(sharding.addressable_devices or sharding.device_set)).default_memory().kind


def _bounds(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Any, Bounds]:
    indices = sharding.devices_indices_map(shape).items()
    return {device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)) for device, index in indices}


def _elements(bounds: Bounds | None) -> int:
    return 0 if bounds is None else math.prod(shape_of(bounds))


def _relabeled(array: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Returns an array of the same shards in the same memory, for a shape and a sharding that have shards of theirs."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=array.dtype)

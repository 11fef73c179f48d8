"""Orders the devices of a mesh: slices and hosts along the axes of `dcn`, short rings on the torus within them."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import mesh_utils

from keras_dist._report.units import counted
from keras_dist.mesh.axes import known_product, parse_dcn, spread_axes
from keras_dist.mesh.devices import Device
from keras_dist.mesh.tpu_generations import tpu_generation_of

# A level of the network: the name of the groups of devices that it joins, and a function from a device to its group.
Level = tuple[str, Callable[[Device], int]]


class Link(NamedTuple):
    """The distance between two devices. Longer links compare greater."""

    dcn: bool  # whether the path crosses the network between slices or hosts
    hops: int  # ICI links between TPU chips, 0 for two cores of one chip; 1 for devices of one host; 0 if `dcn` is true

    def __str__(self):
        return "network" if self.dcn else "no link" if self.hops == 0 else counted(self.hops, "hop")


def arrange_devices(
    devices: Sequence[Device],
    axes: Mapping[str, int],
    dcn: Any = None,
    sort_groups: bool = True,
    allow_split_physical_axes: bool = True,
) -> np.ndarray:
    """Arranges devices in an array of the shape of a mesh, ordered by the links between them.

    The algorithm works from the slowest network inwards:

    1. Slices, or processes if there is one slice, are placed along the axes of `dcn`, which is as in `spread_axes`.
    2. Processes within a slice without a torus are placed along the outermost axes that can hold them.
    3. Within a slice of TPUs, JAX's `mesh_utils` assigns a part of the torus to each axis. Each axis is then reordered
       to run around its part in a ring of links that are as short as possible. If the innermost axis has shorter links
       in JAX's order of devices, that order is used instead. The processes of the chips are irrelevant, since ICI
       links cross hosts at full speed, unless `dcn` has degrees whose product is the number of processes.

    Example: 2 slices of TPU v5e with 2 x 4 chips each, and the axes `data:2,model:8`. `data` can hold both slices, so
    step 1 assigns row 0 of the mesh to slice 0, and row 1 to slice 1. Step 3: `mesh_utils` orders the chips of a slice
    as (0,0) (1,0) (0,1) (1,1) (1,3) (0,3) (1,2) (0,2), with diagonal steps of 2 hops. Reordered to
    (0,1) (0,2) (0,3) (1,3) (1,2) (1,1) (1,0) (0,0), every step is 1 hop, including that from last to first.

    The order within an axis does not change XLA's reductions and gathers, which depend only on the set of devices. It
    shortens communication between neighbors (collective matmuls, pipelines, ring attention).

    `sort_groups` orders slices and hosts by their index instead of by the order of `devices`. Without
    `allow_split_physical_axes`, an axis of the torus that would have to serve several axes of the mesh is a ValueError.
    """
    return _arrange(list(devices), axes, dcn, _levels(devices, axes, dcn), sort_groups, allow_split_physical_axes)


def longest_links(devices: np.ndarray) -> tuple[Link, ...]:
    """Returns the longest link between neighbors on the rings of each axis, for devices in the shape of a mesh."""
    flat = devices.ravel().tolist()
    index = np.arange(devices.size).reshape(devices.shape)
    networks = networks_of(flat)
    torus = None if coordinates_of(flat[0]) is None else Torus(flat, networks)

    def longest(axis: int) -> Link:
        if (networks[index] != networks[np.roll(index, -1, axis)]).any():
            return Link(True, 0)
        return Link(False, int(devices.shape[axis] > 1) if torus is None else torus.longest_hop(index, axis))

    return tuple(map(longest, range(devices.ndim)))


def networks_of(devices: Sequence[Device]) -> np.ndarray:
    """Returns for each device the index of the slice or host within which it has fast links."""
    slices = np.array([slice_of(device) for device in devices])
    if coordinates_of(devices[0]) is not None or np.ptp(slices) > 0:
        return slices
    processes = np.array([device.process_index for device in devices])
    # They are hosts if JAX reports no slices, or a single slice and several devices per process.
    are_hosts = len(np.unique(processes)) < len(devices) or getattr(devices[0], "slice_index", None) is None
    return processes if are_hosts else slices


def slice_of(device: Device) -> int:
    """Returns the index of a device's slice: TPU chips joined by ICI, or GPUs joined by NVLink; 0 if unknown."""
    return getattr(device, "slice_index", None) or 0


def coordinates_of(device: Device) -> tuple[int, ...] | None:
    """Returns the position of a device's chip on the torus of its slice, None for devices without a torus."""
    # GPUs of a compilation target have coordinates, too.
    coordinates = getattr(device, "coords", None) if device.platform == "tpu" else None
    return None if coordinates is None else tuple(coordinates)


class Torus:
    def __init__(self, devices: Sequence[Device], slices: np.ndarray):
        self.coordinates = np.empty((len(devices), 4), int)  # x, y, z and core of each device
        self.coordinates[:, :3] = [device.coords for device in devices]
        self.coordinates[:, 3] = [device.core_on_chip for device in devices]
        self.rings = np.zeros_like(self.coordinates)  # as `_rings` returns them, and 0 for the core
        for number in np.unique(slices):
            here = slices == number
            self.rings[here, :3] = _rings(devices[0].device_kind, self.coordinates[here, :3])

    def longest_hop(self, index: np.ndarray, axis: int) -> int:
        """Returns the largest number of hops between neighbors along one axis of an array of device indices."""
        if index.shape[axis] == 1:
            return 0
        here, there = index.ravel(), np.roll(index, -1, axis).ravel()
        steps, rings = np.abs(self.coordinates[here, :3] - self.coordinates[there, :3]), self.rings[here, :3]
        return int(np.where(rings, np.minimum(steps, rings - steps), steps).sum(axis=1).max())


def _rings(device_kind: str, chips: np.ndarray) -> np.ndarray:
    """Returns the length of each dim's ring, 0 for a dim with two ends; the slice is the bounding box of its chips."""
    sides = np.ptp(chips, axis=0) + 1
    generation = tpu_generation_of(device_kind)
    if generation is not None and generation.is_2d:
        return np.where(sides == generation.longest_side, sides, 0)
    # 3D tori consist of cubes of 4 x 4 x 4 chips; all sides form rings if each is a multiple of 4.
    return np.where((sides % 4 == 0).all(), sides, 0)


def _levels(devices: Sequence[Device], axes: Mapping[str, int], dcn: Any) -> list[Level]:
    """Returns the levels of the network, from the slowest inwards; `dcn` refers to the first."""
    by_slice: Level = ("slices", slice_of)
    by_process: Level = ("processes", lambda device: device.process_index)
    on_torus = coordinates_of(devices[0]) is not None
    inside: list[Level] = [] if on_torus else [by_process]
    if len(set(map(slice_of, devices))) > 1:
        return [by_slice, *inside]
    count = len({device.process_index for device in devices})
    if count == 1:
        return [by_slice]
    if not on_torus and len(np.unique(networks_of(devices))) > 1:
        return [by_process]  # processes are hosts
    # Processes of one slice: dcn refers to them if its degrees or axes can hold exactly their number, else to slices.
    requested = parse_dcn(dcn, axes)
    if isinstance(requested, dict):
        known = known_product(requested)
        matches_count = count % known == 0 if -1 in requested.values() else known == count
        refers_to_processes = matches_count and (known > 1 or not on_torus)
    else:
        can_hold_processes = math.prod(axes[name] for name in requested) % count == 0
        refers_to_processes = dcn is not None and can_hold_processes and not on_torus
    return [by_process] if refers_to_processes else [by_slice, *inside]


def _arrange(
    devices: list[Device], axes: Mapping[str, int], dcn: Any, levels: list[Level], sort: bool, allow_split: bool
) -> np.ndarray:
    """Arranges devices level by level: first the groups of a level, then the devices of each group."""
    if not levels:
        return _arrange_innermost(devices, axes, allow_split)
    (group_name, group_of), *inner_levels = levels
    by_index: dict[int, list[Device]] = defaultdict(list)
    for device in devices:
        by_index[group_of(device)].append(device)
    groups = [by_index[index] for index in (sorted(by_index) if sort else by_index)]
    if len(set(map(len, groups))) > 1:
        if dcn is not None:
            raise ValueError(
                f"dcn={dcn!r} needs {group_name} of equal size, but they have {list(map(len, groups))} devices. Pass "
                "the same number of devices of each, or omit dcn."
            )
        return _object_array([device for group in groups for device in group]).reshape(tuple(axes.values()))
    degrees = spread_axes(axes, len(groups), dcn, group_name)
    inner = {name: size // degrees[name] for name, size in axes.items()}
    blocks = np.stack([_arrange(group, inner, None, inner_levels, sort, allow_split) for group in groups])
    blocks = blocks.reshape(*degrees.values(), *inner.values())
    # (degree a, degree b, inner a, inner b) -> (degree a, inner a, degree b, inner b), which merge to (a, b).
    return blocks.transpose(np.arange(blocks.ndim).reshape(2, -1).T.ravel()).reshape(tuple(axes.values()))


def _arrange_innermost(devices: list[Device], axes: Mapping[str, int], allow_split: bool) -> np.ndarray:
    """Arranges the devices of one slice of TPUs, or of one host."""
    if coordinates_of(devices[0]) is None:
        if devices[0].platform == "gpu":  # JAX orders GPUs by process
            devices = sorted(devices, key=lambda device: device.id)
        return _object_array(devices).reshape(tuple(axes.values()))
    torus = Torus(devices, np.zeros(len(devices), int))
    shape = [size for size in axes.values() if size > 1] or [1]
    # mesh_utils assumes JAX's order for some slices: by host, then by z, y, x and core.
    x, y, z, core = torus.coordinates.T
    as_listed = np.lexsort((core, x, y, z, np.array([device.process_index for device in devices]))).reshape(shape)
    index = _index_by_mesh_utils(devices, as_listed, torus, allow_split)
    if index is not None:
        index = _with_short_rings(index, torus)
    if index is None or torus.longest_hop(as_listed, -1) < torus.longest_hop(index, -1):
        index = _with_short_rings(as_listed, torus)
    return _object_array(devices)[index].reshape(tuple(axes.values()))


def _index_by_mesh_utils(
    devices: list[Device], as_listed: np.ndarray, torus: Torus, allow_split: bool
) -> np.ndarray | None:
    """Returns the arrangement of mesh_utils as indices of devices, in the shape of `as_listed`; None if it has none."""
    shape, ordered = as_listed.shape, [devices[i] for i in as_listed.ravel().tolist()]
    try:
        arranged = mesh_utils.create_device_mesh(shape, ordered, allow_split_physical_axes=allow_split)
    except NotImplementedError:
        sides = np.ptp(torus.coordinates, axis=0)[:3] + 1
        raise ValueError(
            f"A mesh of {' x '.join(map(str, shape))} must split an axis of the torus {' x '.join(map(str, sides))}, "
            "which allow_split_physical_axes=False forbids. Allow it, or choose sizes that are products of axes of the "
            "torus."
        ) from None
    except (AssertionError, TypeError, ValueError):
        # It only supports boxes, for TPU v4 only one device per chip, and before JAX 0.12 no 10 of an axis of 20.
        return None
    index_of = {id(device): i for i, device in enumerate(devices)}
    return np.array([index_of[id(device)] for device in arranged.ravel().tolist()]).reshape(shape)


def _with_short_rings(index: np.ndarray, torus: Torus) -> np.ndarray:
    """Reorders each axis to make its longest hop as short as possible, which does not change the other axes."""
    for axis in range(index.ndim):
        longest = torus.longest_hop(index, axis)
        if longest > 1:
            reordered = np.take(index, _ring_along(index, axis, torus), axis)
            index = reordered if torus.longest_hop(reordered, axis) < longest else index
    return index


def _ring_along(index: np.ndarray, axis: int, torus: Torus) -> np.ndarray:
    """Returns the order in which an axis runs around the box of its chips; the given order if they are not a box."""
    along = torus.coordinates[np.moveaxis(index, axis, 0).reshape(index.shape[axis], -1)[:, 0]]
    values = [np.unique(column) for column in along.T]
    sizes = tuple(map(len, values))
    at = np.arange(len(along))
    if math.prod(sizes) != len(along):
        return at
    closed = [is_closed(column, ring) for column, ring in zip(values, torus.rings[index.flat[0]], strict=True)]
    ranks = tuple(np.searchsorted(column, places) for column, places in zip(values, along.T, strict=True))
    at[np.ravel_multi_index(ranks, sizes)] = np.arange(len(along))
    return at[_ring_order(sizes, closed)]


def is_closed(values: np.ndarray, ring: int) -> bool:
    """Returns whether evenly spaced positions cover a ring, so that the last is next to the first."""
    steps = np.diff(values, append=values[0] + ring)
    return len(values) > 1 and ring > 0 and bool((steps == steps[0]).all())


def _ring_order(sizes: Sequence[int], closed: Sequence[bool]) -> np.ndarray:
    """Returns the row-major indices of the points of a box in the order of a round trip of short steps.

    If one side is even and there is another side, every step has length 1: a snake through the other sides turns the
    box into a rectangle with an even number of rows, whose first column is kept for the way back. For 4 x 3 points:

        0 >  1 >  2          0,  1,  2,
        3    4 <  5               5,  4,
        6    7 >  8               7,  8,
        9 < 10 < 11              11, 10,  and back:  9, 6, 3

    A line with two ends visits every other point and returns over the rest, in steps of 2: 0, 2, 4, 3, 1. So does the
    snake through a box whose sides are all odd.
    """
    order = np.arange(math.prod(sizes)).reshape(sizes)
    sides = [side for side, size in enumerate(sizes) if size > 1]
    rows = next((side for side in sides if sizes[side] % 2 == 0), sides[0])
    if len(sides) == 1 and (closed[rows] or sizes[rows] == 2):
        return order.ravel()
    snake = np.moveaxis(order, rows, 0)
    while snake.ndim > 2:
        snake = _turn_odd_rows(snake).reshape(*snake.shape[:-2], -1)
    snake = snake.reshape(len(snake), -1)
    if len(sides) == 1 or sizes[rows] % 2:
        path = _turn_odd_rows(snake).ravel()
        return np.concatenate([path[::2], path[1::2][::-1]])
    return np.concatenate([_turn_odd_rows(snake[:, 1:]).ravel(), snake[::-1, 0]])


def _turn_odd_rows(rows: np.ndarray) -> np.ndarray:
    turned = rows.copy()
    turned[..., 1::2, :] = rows[..., 1::2, ::-1]
    return turned


def _object_array(devices: Sequence[Device]) -> np.ndarray:
    # Not `as_device_array`, which checks devices: they were checked, and a large mesh has thousands of groups.
    return np.fromiter(devices, object, len(devices))

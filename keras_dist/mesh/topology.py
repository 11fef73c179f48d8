"""Puts devices in a good order: slices and hosts along the axes that may be slow, neighbours on the torus inside."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import mesh_utils

from keras_dist.mesh.axes import known_product, parse_dcn, spread_axes
from keras_dist.mesh.devices import Device
from keras_dist.mesh.tpu_generations import tpu_generation_of

Level = tuple[str, Callable[[Device], int]]  # what granules are called, and the number of the one of a device


class Link(NamedTuple):
    """How far apart two devices are. Longer links compare greater.

    Attributes:
        dcn: whether the way crosses the network between slices or hosts.
        hops: the number of ICI links between TPU chips, 0 for two cores of one chip; 1 for other devices of one host;
            0 where `dcn` is true.
    """

    dcn: bool
    hops: int

    def __str__(self):
        if self.dcn:
            return "DCN"
        return "no link" if self.hops == 0 else "1 hop" if self.hops == 1 else f"{self.hops} hops"


def arrange_devices(
    devices: Sequence[Device],
    axes: Mapping[str, int],
    dcn: Any = None,
    *,
    sort_granules: bool = True,
    allow_split_physical_axes: bool = True,
) -> np.ndarray:
    """Returns devices in an array of the shape of a mesh, in the order that suits their links.

    Slices, or processes where there is one slice, lie along the axes of `dcn`. Processes inside a slice that is no
    torus lie along the outermost axes that can hold them. Inside a slice of TPUs JAX's `mesh_utils` gives each axis its
    part of the torus, and each axis then runs around its part in a ring of links that are as short as they can be;
    where the innermost axis has shorter ones in the order in which JAX lists the devices, that order is taken. Which
    processes the chips of a slice belong to plays no part, since ICI links cross hosts at full speed, unless `dcn` has
    degrees that hold as many processes.

    The order inside of an axis changes no reduction and no gather of XLA, which depend on the set of devices alone; it
    shortens what is sent from neighbour to neighbour (collective matmuls, pipelines, ring attention).

    Args:
        devices: as many as the axes hold.
        axes: the size of each axis by its name, outermost axis first.
        dcn: the axes that cross slices or hosts, as `spread_axes` takes them.
        sort_granules: whether slices and hosts lie in the order of their numbers, else in that of `devices`.
        allow_split_physical_axes: whether one axis of the torus may serve several axes of the mesh.

    Returns:
        An object array of the axes' shape that holds each device once.

    Raises:
        ValueError: `dcn` does not fit, or the torus would have to be split and must not be.
    """
    return _arrange(list(devices), axes, dcn, _levels(devices, axes, dcn), sort_granules, allow_split_physical_axes)


def longest_links(devices: np.ndarray) -> tuple[Link, ...]:
    """Returns for each axis of a mesh the longest link between neighbours on its rings, the last and first included.

    Args:
        devices: the devices in the shape of the mesh.

    Returns:
        One link for each axis; `Link(False, 0)` for an axis of size 1.
    """
    flat = devices.ravel().tolist()
    index = np.arange(devices.size).reshape(devices.shape)
    networks = networks_of(flat)
    torus = None if coordinates_of(flat[0]) is None else Torus(flat, networks)
    links = []
    for axis in range(devices.ndim):
        here, there = networks[index], networks[np.roll(index, -1, axis)]
        if (here != there).any():
            links.append(Link(True, 0))
        elif torus is not None:
            links.append(Link(False, torus.longest_way(index, axis)))
        else:
            links.append(Link(False, int(devices.shape[axis] > 1)))
    return tuple(links)


def networks_of(devices: Sequence[Device]) -> np.ndarray:
    """Returns for each device the number of the slice or host whose devices it shares fast links with.

    Off a torus processes are hosts where JAX knows of no slices, or of one slice and processes of several devices.
    """
    slices = np.array(list(map(slice_of, devices)))
    if coordinates_of(devices[0]) is not None or np.ptp(slices) > 0:
        return slices
    processes = np.array(list(map(_process_of, devices)))
    are_hosts = len(np.unique(processes)) < len(devices) or not _has_slices(devices[0])
    return processes if are_hosts else slices


def slice_of(device: Device) -> int:
    """Returns the number of the slice of a device: chips joined by ICI, or GPUs by NVLink; 0 where there is but one."""
    return device.slice_index if _has_slices(device) else 0


def _has_slices(device: Device) -> bool:
    return getattr(device, "slice_index", None) is not None


def coordinates_of(device: Device) -> tuple[int, ...] | None:
    """Returns where the chip of a device lies on the torus of its slice, None for devices on no torus."""
    if device.platform != "tpu":  # the described GPUs of JAX have coordinates too
        return None
    coordinates = getattr(device, "coords", None)
    return None if coordinates is None else tuple(coordinates)


class Torus:
    """Where the devices of slices of TPUs are on the torus of their slice.

    Attributes:
        coordinates: x, y, z and core of each device, of shape (devices, 4).
        rings: for each of them the length of the ring that the dim closes to, 0 for one that has two ends.
    """

    def __init__(self, devices: Sequence[Device], slices: np.ndarray):
        self.coordinates = np.empty((len(devices), 4), int)
        self.coordinates[:, :3] = [device.coords for device in devices]
        self.coordinates[:, 3] = [device.core_on_chip for device in devices]
        self.rings = np.zeros_like(self.coordinates)
        for number in np.unique(slices):
            here = slices == number
            self.rings[here] = _rings(devices[0].device_kind, self.coordinates[here])

    def longest_way(self, index: np.ndarray, axis: int) -> int:
        """Returns the most links between neighbours along one axis of an array of indices of devices."""
        if index.shape[axis] == 1:
            return 0
        here, there = index.ravel(), np.roll(index, -1, axis).ravel()
        steps, rings = np.abs(self.coordinates[here, :3] - self.coordinates[there, :3]), self.rings[here, :3]
        return int(np.where(rings, np.minimum(steps, rings - steps), steps).sum(axis=1).max())


def _rings(device_kind: str, coordinates: np.ndarray) -> np.ndarray:
    """The length of the ring that each dim of a slice closes to, 0 for one that has two ends; the last dim is cores.

    The slice is taken for the box around the devices at hand.
    """
    lengths = coordinates.max(axis=0) - coordinates.min(axis=0) + 1
    chips = lengths[:-1]
    generation = tpu_generation_of(device_kind)
    if generation is not None and generation.is_2d:
        closes = chips == generation.longest_side
    else:  # 3D tori are made of cubes of 4 x 4 x 4 chips; all their sides close where each is a multiple of 4
        closes = np.full(len(chips), (chips % 4 == 0).all())
    return np.append(np.where(closes, chips, 0), 0)


def _process_of(device: Device) -> int:
    return device.process_index


def _levels(devices: Sequence[Device], axes: Mapping[str, int], dcn: Any) -> list[Level]:
    """What devices are grouped by, from the slowest network inwards; `dcn` is about the first level."""
    by_slice: Level = ("slices", slice_of)
    by_process: Level = ("processes", _process_of)
    slices, processes = list(map(slice_of, devices)), list(map(_process_of, devices))
    on_torus = coordinates_of(devices[0]) is not None
    inside: list[Level] = [] if on_torus else [by_process]
    if len(set(slices)) > 1:
        return [by_slice, *(inside if len(set(zip(slices, processes, strict=True))) > len(set(slices)) else [])]
    count = len(set(processes))
    if count == 1:
        return [by_slice]
    if not on_torus and (len(devices) > count or not _has_slices(devices[0])):
        return [by_process]  # processes of several devices are hosts
    # Several processes that are no network apart: dcn is about them where it counts them, or names axes that hold them.
    wanted = parse_dcn(dcn, axes)
    if isinstance(wanted, dict):
        known = known_product(wanted)
        counts_them = count % known == 0 if -1 in wanted.values() else known == count
        is_about_processes = counts_them and (known > 1 or not on_torus)
    else:
        can_hold_them = math.prod(axes[name] for name in wanted) % count == 0
        is_about_processes = dcn is not None and can_hold_them and not on_torus
    return [by_process] if is_about_processes else [by_slice, *inside]


def _arrange(
    devices: list[Device],
    axes: Mapping[str, int],
    dcn: Any,
    levels: list[Level],
    sort: bool,
    allow_split: bool,
) -> np.ndarray:
    """Devices in the shape of the axes, level by level: granules along some axes, and what is inside of them next."""
    if not levels:
        return _arrange_granule(devices, axes, allow_split)
    (what, number_of), *inner_levels = levels
    granules: dict[int, list[Device]] = defaultdict(list)
    for number, device in zip(map(number_of, devices), devices, strict=True):
        granules[number].append(device)
    groups = [granules[number] for number in (sorted(granules) if sort else granules)]
    if len(set(map(len, groups))) > 1:
        if dcn is not None:
            raise ValueError(
                f"Axes can cross {what} only where all hold equally many devices, but these hold "
                f"{list(map(len, groups))}. Received: dcn={dcn!r}. Pass equally many of each, or leave dcn out."
            )
        return _object_array([device for group in groups for device in group]).reshape(tuple(axes.values()))
    degrees = spread_axes(axes, len(groups), dcn, what)
    inner = {name: size // degrees[name] for name, size in axes.items()}
    blocks = np.stack([_arrange(group, inner, None, inner_levels, sort, allow_split) for group in groups])
    blocks = blocks.reshape(*degrees.values(), *inner.values())
    each_degree_with_its_inner_size = np.arange(blocks.ndim).reshape(2, -1).T.ravel()
    return blocks.transpose(each_degree_with_its_inner_size).reshape(tuple(axes.values()))


def _arrange_granule(devices: list[Device], axes: Mapping[str, int], allow_split: bool) -> np.ndarray:
    """Devices of one slice of TPUs, or of one host, in the shape of the axes."""
    if coordinates_of(devices[0]) is None:
        if devices[0].platform == "gpu":  # JAX's own order of GPUs is that of processes
            devices = sorted(devices, key=lambda device: device.id)
        return _object_array(devices).reshape(tuple(axes.values()))
    torus = Torus(devices, np.zeros(len(devices), int))
    shape = [size for size in axes.values() if size > 1] or [1]
    # mesh_utils relies on JAX's order for some slices: host by host, each by z, y, x and core.
    x, y, z, core = torus.coordinates.T
    as_listed = np.lexsort((core, x, y, z, np.array(list(map(_process_of, devices))))).reshape(shape)
    index = _index_by_mesh_utils(devices, as_listed, torus.coordinates, allow_split)
    if index is not None:
        index = _with_short_rings(index, torus)
    if index is None or torus.longest_way(as_listed, -1) < torus.longest_way(index, -1):
        index = _with_short_rings(as_listed, torus)
    return _object_array(devices)[index].reshape(tuple(axes.values()))


def _index_by_mesh_utils(
    devices: list[Device], as_listed: np.ndarray, coordinates: np.ndarray, allow_split: bool
) -> np.ndarray | None:
    """Where mesh_utils puts devices, by their indices, in the shape of `as_listed`; None where it cannot."""
    shape = as_listed.shape
    try:
        arranged = mesh_utils.create_device_mesh(
            shape, [devices[i] for i in as_listed.ravel().tolist()], allow_split_physical_axes=allow_split
        )
    except NotImplementedError:
        torus = " x ".join(map(str, np.ptp(coordinates, axis=0)[:3] + 1))
        raise ValueError(
            "Without allow_split_physical_axes each axis of the mesh takes whole axes of the torus, but axes of "
            f"{' x '.join(map(str, shape))} must split one of {torus}. Allow it, or choose sizes that are products of "
            "these."
        ) from None
    except (AssertionError, TypeError, ValueError):
        # It places boxes only, of one device to a chip of TPU v4; before JAX 0.12 no part of 10 of an axis of 20.
        return None
    index_of = dict(zip(map(id, devices), range(len(devices)), strict=True))
    return np.array([index_of[id(device)] for device in arranged.ravel().tolist()]).reshape(shape)


def _with_short_rings(index: np.ndarray, torus: Torus) -> np.ndarray:
    """Reorders each axis so that its longest way is as short as can be, which leaves the ways along others alone."""
    for axis in range(index.ndim):
        way = torus.longest_way(index, axis)
        if way > 1:
            reordered = np.take(index, _ring_along(index, axis, torus), axis)
            index = reordered if torus.longest_way(reordered, axis) < way else index
    return index


def _ring_along(index: np.ndarray, axis: int, torus: Torus) -> np.ndarray:
    """The order of one axis in which it runs around the box of its chips, as it is where they are no box."""
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
    """Whether the last of evenly spaced places on a ring is next to the first."""
    steps = np.diff(values, append=values[0] + ring)
    return len(values) > 1 and ring > 0 and bool((steps == steps[0]).all())


def _ring_order(sizes: Sequence[int], closed: Sequence[bool]) -> np.ndarray:
    """Returns the points of a box, by their row-major index, in a round trip of short steps.

    Where a side has an even size and there is another side, all steps are of length 1: a snake through the other sides
    makes of the box a rectangle with an even number of rows, of which one column is kept for the way back. A line with
    two ends is walked on every other point and back on the rest, in steps of 2, as is a snake through odd sides.
    """
    order = np.arange(math.prod(sizes)).reshape(sizes)
    sides = [side for side, size in enumerate(sizes) if size > 1]
    rows = next((side for side in sides if sizes[side] % 2 == 0), sides[0])
    if len(sides) == 1 and (closed[rows] or sizes[rows] == 2):
        return order.ravel()
    order = np.moveaxis(order, rows, 0)
    snake = _snake(order)
    if len(sides) == 1 or sizes[rows] % 2:
        path = _turn_odd_rows(snake).ravel()
        return np.concatenate([path[::2], path[1::2][::-1]])
    return np.concatenate([_turn_odd_rows(snake[:, 1:]).ravel(), snake[::-1, 0]])


def _snake(box: np.ndarray) -> np.ndarray:
    """Returns a box as rows, each of which walks through the other sides in steps of length 1."""
    while box.ndim > 2:
        box = _turn_odd_rows(box).reshape(*box.shape[:-2], -1)
    return box.reshape(len(box), -1)


def _turn_odd_rows(rows: np.ndarray) -> np.ndarray:
    turned = rows.copy()
    turned[..., 1::2, :] = rows[..., 1::2, ::-1]
    return turned


def _object_array(devices: Sequence[Device]) -> np.ndarray:
    return np.fromiter(devices, object, len(devices))

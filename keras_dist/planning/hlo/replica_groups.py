"""Replica groups: the groups of devices that run a collective, and the mesh axes that they follow."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from keras_dist.planning.hlo.shapes import numbers

Groups: TypeAlias = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def parse_groups(text: str, devices: int) -> Groups:
    """Parses `replica_groups`, `device_list` or `source_target_pairs` in any format that XLA prints.

    `{}` is one group of all devices. Raises a ValueError for an unknown format.

    >>> parse_groups("{{0,1},{2,3}}", 4)
    ((0, 1), (2, 3))
    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['a'=2,'b'=2] {'a'}", 4)
    ((0, 2), (1, 3))

    Source: `CollectiveDeviceListBase` in XLA's `xla/hlo/ir/replica_group.h`, `Mesh` and `AxisRef` in
    `xla/hlo/ir/mesh_and_axis.h`.
    """
    text = text.strip()
    if text == "{}":
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return tuple(numbers(group) for group in re.findall(r"\{([\d, ]*)\}", text))
    if text.startswith("mesh["):
        groups = _mesh_groups(text)
    elif "<=" in text:
        groups = _iota(text)
    else:
        raise ValueError(
            f"Cannot parse the replica groups {text[:200]!r}. Known formats are '{{{{0,1}}}}', '[2,4]<=[8]' and "
            "\"mesh['a'=2] {'a'}\"."
        )
    return tuple(map(tuple, groups.tolist()))


def _iota(text: str) -> np.ndarray:
    """`[4,2]<=[2,4]T(1,0)` is `arange(8).reshape(2, 4).transpose(1, 0).reshape(4, 2)`."""
    match = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not match:
        raise ValueError(f"Cannot parse the iota {text[:200]!r}. The known format is '[4,2]<=[2,4]T(1,0)'.")
    sizes, source = numbers(match[1]), numbers(match[2])
    order = numbers(match[3]) if match[3] else range(len(source))
    return np.arange(math.prod(source)).reshape(source).transpose(order).reshape(-1, sizes[-1])


def _mesh_groups(text: str) -> np.ndarray:
    """`mesh['a'=2,'b'=4], device_ids=(...) {'b':(1)2}`: groups along axes of a mesh, or along sub-axes.

    The sub-axis `'b':(2)2` has size 2 and another factor of size 2 outside it. An axis is split into one dim for each
    factor: 'b' of size 8 with `'b':(2)2` becomes the dims 2 x 2 x 2, and the groups run along the middle one.
    """
    mesh, _, named = text.rpartition("{")
    sizes = {axis: int(size) for axis, size in re.findall(r"'?([^',=\[\]]+)'?=(\d+)", mesh.split("]")[0])}
    found = re.findall(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?(?:,|\})", named)
    parts = [(axis, int(outside or 1), int(size or sizes[axis])) for axis, outside, size in found]
    dims: list[tuple[str, int, int]] = []
    for axis, full in sizes.items():
        borders = sorted({1, full, *(b for a, out, size in parts if a == axis for b in (out, out * size))})
        dims += [(axis, low, high // low) for low, high in itertools.pairwise(borders)]
    grouped = [
        number
        for axis, outside, size in parts
        for number, (dim_axis, low, dim_size) in enumerate(dims)
        if dim_axis == axis and outside <= low and low * dim_size <= outside * size
    ]
    others = [number for number in range(len(dims)) if number not in grouped]
    device_ids = re.search(r"device_ids=\((.*)\)", mesh)
    devices = _device_ids(device_ids[1]) if device_ids else np.arange(math.prod(sizes.values()))
    length = math.prod(size for *_, size in parts)
    return devices.reshape([size for *_, size in dims]).transpose(others + grouped).reshape(-1, length)


def _device_ids(text: str) -> np.ndarray:
    """`0,2,1,3`, `[4,2]<=[2,4]T(1,0)`, or `[2,4]T(1,0)`, which is short for the second."""
    if not text.startswith("["):
        return np.array(numbers(text))
    return _iota(text if "<=" in text else f"{text.partition('T')[0]}<={text}")


def groups_along(shape: Sequence[int], dims: Sequence[int]) -> Groups:
    """Returns the groups of positions in a flattened mesh of a shape that differ along some dims only.

    >>> groups_along((2, 2), [1])
    ((0, 1), (2, 3))
    """
    positions = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), dims, range(-len(dims), 0))
    size = math.prod(shape[dim] for dim in dims)
    return tuple(map(tuple, positions.reshape(-1, size).tolist()))


def axes_of_groups(groups: Groups, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes, outermost first, along which the devices of each group differ; () for groups of one.

    `groups` are positions in the flattened mesh, `axes` sizes, outermost first. Groups follow axes if each is a
    Cartesian product of coordinates, and all have the same shape. They may span only a part of an axis, as for a
    collective that is split into one within each slice and one between slices. None if they do not follow axes or do
    not cover the mesh.

    >>> axes_of_groups(((0, 1), (2, 3)), {"data": 2, "model": 2})
    ('model',)
    >>> axes_of_groups(((0, 1), (2, 3)), {"data": 4})
    ('data',)
    >>> axes_of_groups(((0, 3), (1, 2)), {"data": 2, "model": 2}) is None
    True
    """
    if all(len(group) == 1 for group in groups):
        return ()
    sizes = tuple(axes.values())
    if not sizes or sorted(device for group in groups for device in group) != list(range(math.prod(sizes))):
        return None
    shape, *others = {tuple(len(np.unique(each)) for each in np.unravel_index(group, sizes)) for group in groups}
    if others or any(len(group) != math.prod(shape) for group in groups):
        return None
    return tuple(name for name, size in zip(axes, shape, strict=True) if size > 1)


def axes_of_pairs(pairs: Groups, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes, outermost first, along which source and target of any pair of positions differ.

    None without axes, or for devices outside the mesh.

    >>> axes_of_pairs(((0, 1), (1, 0)), {"data": 2, "model": 2})
    ('model',)
    """
    sizes = tuple(axes.values())
    if all(source == target for source, target in pairs):
        return ()
    if not sizes or any(device >= math.prod(sizes) for pair in pairs for device in pair):
        return None
    sources, targets = (np.unravel_index(side, sizes) for side in zip(*pairs, strict=True))
    return tuple(name for name, source, target in zip(axes, sources, targets, strict=True) if (source != target).any())

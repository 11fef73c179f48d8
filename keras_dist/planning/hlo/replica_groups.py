"""Which devices of a mesh run a collective among themselves, and along which axes they differ."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from keras_dist.planning.hlo.parser import numbers

Groups: TypeAlias = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def parse_groups(text: str, devices: int) -> Groups:
    """Returns the groups of devices that run a collective among themselves, in any of XLA's four ways to write them.

    Args:
        text: the attribute `replica_groups`, `device_list` or `source_target_pairs`.
        devices: how many devices run the module, for `{}`, which is all of them.

    Returns:
        The groups, each with the numbers of its devices in order.

    Raises:
        ValueError: another way to write them.

    Example:

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
        return _mesh_groups(text)
    if "<=" in text:
        sizes, order = _iota(text)
        return _rows(order, sizes[-1])
    raise ValueError(
        "Groups of devices are written '{{0,1}}', '[2,4]<=[8]' or \"mesh['a'=2] {'a'}\". "
        f"Received: {text[:200]!r}. Pass the text of compiled.as_text() unchanged."
    )


def _rows(devices: list[int], length: int) -> Groups:
    return tuple(tuple(devices[start : start + length]) for start in range(0, len(devices), length))


def _iota(text: str) -> tuple[tuple[int, ...], list[int]]:
    """`[4,2]<=[2,4]T(1,0)`: count up in the second shape, transpose it, and give it the first shape."""
    match = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not match:
        raise ValueError(f"An iota of devices is written '[4,2]<=[2,4]T(1,0)'. Received: {text[:200]!r}.")
    source = numbers(match[2])
    order = numbers(match[3]) if match[3] else tuple(range(len(source)))
    return numbers(match[1]), transposed(source, order)


def transposed(sizes: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """Returns 0, 1, 2, ... laid out in `sizes`, with the dims put into `order`, flattened.

    Example:

    >>> transposed((2, 3), (1, 0))
    [0, 3, 1, 4, 2, 5]
    """
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    steps = [range(0, sizes[dim] * strides[dim], strides[dim]) for dim in order]
    return [sum(offsets) for offsets in itertools.product(*steps)]


def _mesh_groups(text: str) -> Groups:
    """`mesh['a'=2,'b'=4], device_ids=(...) {'b':(1)2}`: groups along axes, or along parts of axes, of a mesh."""
    mesh, _, named = text.rpartition("{")
    sizes = {axis: int(size) for axis, size in re.findall(r"'?([^',=\[\]]+)'?=(\d+)", mesh.split("]")[0])}
    # An axis is cut into dims at the borders of the parts that are named: `'b':(2)2` is the part of size 2 that
    # has a part of size 2 outside it.
    parts: list[tuple[str, int, int]] = []
    for axis, outside, size in re.findall(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?(?:,|\})", named):
        parts.append((axis, int(outside or 1), int(size or sizes[axis])))
    dims: list[tuple[str, int, int]] = []
    for axis, full in sizes.items():
        borders = sorted({1, full, *(b for a, out, size in parts if a == axis for b in (out, out * size))})
        dims += [(axis, low, high // low) for low, high in itertools.pairwise(borders)] or [(axis, 1, 1)]
    grouped = [
        number
        for axis, outside, size in parts
        for number, (dim_axis, low, dim_size) in enumerate(dims)
        if dim_axis == axis and outside <= low and low * dim_size <= outside * size
    ]
    order = tuple(number for number in range(len(dims)) if number not in grouped) + tuple(grouped)
    positions = transposed(tuple(size for *_, size in dims), order)
    device_ids = re.search(r"device_ids=\((.*)\)", mesh)
    if device_ids:
        ids = _device_ids(device_ids[1])
        positions = [ids[position] for position in positions]
    return _rows(positions, math.prod(size for *_, size in parts))


def _device_ids(text: str) -> Sequence[int]:
    """`0,2,1,3`, `[4,2]<=[2,4]T(1,0)`, or short for the latter `[2,4]T(1,0)`."""
    if not text.startswith("["):
        return numbers(text)
    return _iota(text if "<=" in text else f"{text.partition('T')[0]}<={text}")[1]


def axes_of_groups(groups: Groups, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes along which the devices of each group differ.

    The groups may run along whole axes, or along parts of them, as those of a collective that is taken apart into one
    inside each slice and one between slices. Groups are the places of one axis, or of several axes each with each, and
    all of one shape; otherwise they follow no axes.

    Args:
        groups: positions in the flattened mesh.
        axes: sizes of the mesh's axes by name, outermost first.

    Returns:
        Names of axes, outermost first, () for groups of one; None where the groups follow no axes, or are not all
        devices of the mesh.

    Example:

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
    devices = math.prod(sizes)
    if not sizes or sorted(device for group in groups for device in group) != list(range(devices)):
        return None
    shapes = set()
    for group in groups:
        places = zip(*(_place(device, sizes) for device in group), strict=True)
        shape = tuple(len(set(along)) for along in places)
        if math.prod(shape) != len(group):
            return None
        shapes.add(shape)
    if len(shapes) > 1:
        return None
    return tuple(name for name, size in zip(axes, shapes.pop(), strict=True) if size > 1)


def axes_of_pairs(pairs: Groups, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes along which source and target of any pair differ.

    Args:
        pairs: positions of source and target in the flattened mesh.
        axes: sizes of the mesh's axes by name, outermost first.

    Returns:
        Names of axes, outermost first; None without axes, or for devices outside the mesh.

    Example:

    >>> axes_of_pairs(((0, 1), (1, 0)), {"data": 2, "model": 2})
    ('model',)
    """
    sizes = tuple(axes.values())
    if all(source == target for source, target in pairs):
        return ()
    if not sizes or any(device >= math.prod(sizes) for pair in pairs for device in pair):
        return None
    places = [(_place(source, sizes), _place(target, sizes)) for source, target in pairs]
    return tuple(name for dim, name in enumerate(axes) if any(source[dim] != target[dim] for source, target in places))


def _place(device: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for size in reversed(sizes):
        device, position = divmod(device, size)
        place.append(position)
    return tuple(reversed(place))

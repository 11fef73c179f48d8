"""Mesh axes as plain data: every way to write them becomes one `{name: size}`. No JAX and no Keras in here."""

import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Axes = Mapping[str, int] | Sequence[tuple[str, int]] | Sequence[int] | str

MOST_AXES = 32  # NumPy has no more than 64 dims, and devices are cut into parts along every axis
FORMS = '{"data": 2, "model": 4}, [("data", 2), ("model", 4)], "data:2,model:4", or (2, 4) or "2,4" with axis_names'


def parse_axes(axes: Axes, axis_names: Sequence[str] | None = None) -> dict[str, int]:
    """Returns the axes of a mesh as an ordered `{name: size}`, or says what is wrong with them.

    Args:
        axes: `{"data": 2, "model": 4}`, `[("data", 2), ("model", 4)]`, `"data:2,model:4"`, or only sizes, `(2, 4)` or
            `"2,4"`. One size may be -1: what is left.
        axis_names: one distinct, non-empty name per axis. Where the axes bring their names, the same names.

    Returns:
        The size of each axis by its name, outermost axis first.

    Raises:
        ValueError: no axis, as many names as there are not sizes, a size below 1 that is not the only -1, a name used
            twice, or text that is none of the above.
        TypeError: a size that is no integer, a name that is no string, or axes of another type.

    Example:

    >>> parse_axes("data:2, model:-1")
    {'data': 2, 'model': -1}
    >>> parse_axes((2, 4), ["data", "model"])
    {'data': 2, 'model': 4}
    """
    received = f"Received: axes={_shown(axes)}"
    if axis_names is not None:
        received += f", axis_names={_shown(axis_names)}"
    names = None if axis_names is None else _names(axis_names, received)
    entries = split_axes(axes, received)
    if len(entries) > MOST_AXES:
        raise ValueError(f"A mesh has at most {MOST_AXES} axes. {received}. Merge some of its {len(entries)} axes.")
    if not entries or (names is not None and not names):
        raise ValueError(f"Shape and axis_names cannot be empty. {received}. Write {FORMS}.")
    named = bring_names(entries)
    if not named and names is None:
        raise ValueError(f"Every axis of a mesh needs a name. {received}. Write {FORMS}.")
    if names is not None and len(names) != len(entries):
        raise ValueError(
            f"Shape and axis_names should have same size. {received}. Give one name for each axis of the mesh."
        )
    pairs = entries if named else list(zip(names or (), entries, strict=True))
    parsed: dict[str, int] = {}
    for name, size in pairs:
        if not isinstance(name, str) or not name:
            raise TypeError(f"An axis name must be a non-empty string, not {_shown(name)}. {received}.")
        if name in parsed:
            raise ValueError(
                f"Axis names must be distinct, but {_shown(name)} is used twice. {received}. Rename one of them."
            )
        parsed[name] = _size(size, name, received)
    if names is not None and (any(name not in parsed for name in names) or len(set(names)) != len(names)):
        raise ValueError(f"axes and axis_names must name the same axes. {received}. Leave axis_names out.")
    if list(parsed.values()).count(-1) > 1:
        raise ValueError(f"Only one axis can be -1, what is left. {received}. Give all axes but one a size.")
    return parsed


def solve_axes(axes: dict[str, int], count: int, given: str = "available") -> dict[str, int]:
    """Returns parsed axes whose product is a number of devices, -1 filled in.

    Args:
        axes: the axes, as `parse_axes` returns them.
        count: the number of devices.
        given: what these devices are, for the error.

    Returns:
        The axes, all sizes at least 1.

    Raises:
        ValueError: a product that is another number, with the equation spelled out.

    Example:

    >>> solve_axes({"data": -1, "model": 4}, 8)
    {'data': 2, 'model': 4}
    >>> solve_axes({"data": 3, "model": 4}, 8)
    Traceback (most recent call last):
      ...
    ValueError: Shape does not match the number of devices: data:3 x model:4 = 12 devices, but 8 are available. \
Choose sizes whose product is 8.
    """
    if not count:
        raise ValueError(f"A mesh has at least one device, but none are {given}: {spell_axes(axes)}. Pass some.")
    known = known_product(axes)
    has_rest = -1 in axes.values()
    if count % known == 0 if has_rest else count == known:
        return {name: count // known if size == -1 else size for name, size in axes.items()}
    needs = f"needs a multiple of {_shown(known)}" if has_rest else f"= {_shown(known)}"
    fits_in = known < count and not has_rest and given == "available"
    way_out = f", or take some of the devices: create_device_mesh(..., devices={known})" if fits_in else ""
    raise ValueError(
        f"Shape does not match the number of devices: {spell_axes(axes)} {needs} devices, but {count} are {given}. "
        f"Choose sizes whose product is {count}{way_out}."
    )


def spread_axes(axes: Mapping[str, int], groups: int, dcn: Any = None, what: str = "slices") -> dict[str, int]:
    """Says how much of each axis crosses groups of devices, such as slices or hosts.

    Args:
        axes: the size of each axis by its name, the whole mesh, outermost axis first.
        groups: how many groups of equal size the devices form.
        dcn: which axes may cross. None: the outermost that can. Names, `"data"` or `["data", "fsdp"]`: only these, each
            as much as it can, the first one first. Degrees, in any form of axes, such as `{"data": 2}`, or `(2, 1)`
            with one for each axis of the mesh: exactly these; one may be -1.
        what: what the groups are, for errors.

    Returns:
        For each axis how many groups lie along it; each divides the axis, and their product is `groups`.

    Raises:
        ValueError: the axes cannot hold as many groups, or a name is none of the mesh's.
        TypeError: `dcn` has another type.

    Example:

    >>> spread_axes({"data": 2, "fsdp": 8, "model": 4}, 4)
    {'data': 2, 'fsdp': 2, 'model': 1}
    >>> spread_axes({"data": 2, "fsdp": 8, "model": 4}, 4, "fsdp")
    {'data': 1, 'fsdp': 4, 'model': 1}
    """
    received = f"Received: dcn={_shown(dcn)} for {spell_axes(axes)}"
    wanted = parse_dcn(dcn, axes)
    degrees = dict.fromkeys(axes, 1)
    if isinstance(wanted, dict):
        rest = max(groups // known_product(wanted), 1)
        degrees |= {name: rest if degree == -1 else degree for name, degree in wanted.items()}
    else:
        left = groups
        for name in wanted:
            degrees[name] = math.gcd(axes[name], left)
            left //= degrees[name]
    crossing = {name: degrees[name] for name in wanted}
    if math.prod(crossing.values()) != groups:
        raise ValueError(
            f"The axes that cross {what} must hold all of them: {spell_axes(crossing)} = "
            f"{math.prod(crossing.values())} {what}, but the devices form {groups}. {received}. Choose axes and "
            f"sizes that can hold {groups}, or leave dcn out."
        )
    for name, degree in crossing.items():
        if axes[name] % degree:
            raise ValueError(
                f"As many {what} lie along an axis as divide it, but {degree} does not divide {name}:{axes[name]}. "
                f"{received}. Choose a multiple of {degree} for {name!r}, or leave dcn out."
            )
    return degrees


def parse_dcn(dcn: Any, axes: Mapping[str, int]) -> list[str] | dict[str, int]:
    """Returns which axes may cross groups of devices, or how much of each does.

    Args:
        dcn: as in `spread_axes`.
        axes: the size of each axis by its name, the whole mesh.

    Returns:
        Names of axes, or a degree for each of some of them, one of which may be -1.

    Raises:
        ValueError: other names than those of the mesh, none or twice the same, or degrees that are none.
        TypeError: `dcn` has another type.
    """
    received = f"Received: dcn={_shown(dcn)} for {spell_axes(axes)}"
    if dcn is None:
        return list(axes)
    if isinstance(dcn, str) and ":" not in dcn and not re.fullmatch(r"[-0-9,\s]*", dcn):
        wanted = [name.strip() for name in dcn.split(",")]
    elif isinstance(dcn, (list, tuple)) and any(isinstance(name, str) for name in dcn):
        wanted = list(dcn)
    else:
        try:
            wanted = parse_axes(dcn, None if bring_names(split_axes(dcn, received)) else list(axes))
        except (TypeError, ValueError) as error:
            raise type(error)(f"dcn holds names of axes, or how much of each crosses. {received}. {error}") from None
    if not all(isinstance(name, str) and name in axes for name in wanted) or len(set(wanted)) != len(wanted):
        raise ValueError(f"dcn names axes of the mesh, each once. {received}. Use some of {list(axes)}.")
    return wanted


def split_axes(axes: Any, received: str | None = None) -> list:
    """Returns axes one by one, not validated: a tuple of name and size where they bring names, else a size.

    Args:
        axes: axes in any form.
        received: what to call them in errors.

    Returns:
        A list of tuples or of sizes.

    Raises:
        ValueError: text or pairs of another form.
        TypeError: another type.
    """
    received = received or f"Received: axes={_shown(axes)}"
    if isinstance(axes, str):
        return [_entry(text.strip(), received) for text in axes.split(",")] if axes.strip() else []
    if isinstance(axes, Mapping):
        return list(axes.items())
    entries = _listed(axes)
    if entries is None:
        hint = f", or ({axes},) for one axis" if isinstance(axes, int) and abs(axes) < 10**18 else ""
        raise TypeError(f"The axes of a mesh are a dict, a list, a tuple or text. {received}. Write {FORMS}{hint}.")
    entries = [tuple(entry) if isinstance(entry, (list, tuple)) else entry for entry in entries]
    pairs = [entry for entry in entries if isinstance(entry, tuple)]
    if pairs and (len(pairs) != len(entries) or any(len(pair) != 2 for pair in pairs)):
        raise ValueError(f"A list of axes holds pairs of name and size, or only sizes. {received}. Write {FORMS}.")
    return entries


def bring_names(entries: list) -> bool:
    """Returns whether axes, as `split_axes` returns them, bring their names."""
    return all(isinstance(entry, tuple) for entry in entries)


def known_product(axes: Mapping[str, int]) -> int:
    """Returns the product of all sizes, or degrees, but the -1."""
    return math.prod(size for size in axes.values() if size != -1)


def spell_axes(axes: Mapping) -> str:
    """Returns axes as one side of an equation, `data:2 x model:4`."""
    return " x ".join(f"{name}:{size}" for name, size in axes.items())


def _entry(text: str, received: str) -> Any:
    name, colon, size = text.rpartition(":")
    if not re.fullmatch(r"\s*-?[0-9]{1,18}", size) or ":" in name or (colon and not name.strip()):
        raise ValueError(
            f"An axis is written as name:size, or as a size, but not as {_shown(text)}. {received}. Write {FORMS}."
        )
    return (name.strip(), int(size)) if colon else int(size)


def _names(axis_names: Any, received: str) -> list:
    names = _listed(axis_names)
    if names is None or not all(isinstance(name, str) and name for name in names):
        example = [axis_names] if isinstance(axis_names, str) else ["data", "model"]
        raise TypeError(
            "axis_names must be a list or tuple of names, one per axis, where an axis name must be a non-empty string. "
            f"{received}. Write, for example, axis_names={_shown(example)}."
        )
    return names


def _listed(value: Any) -> list | None:
    """The entries of a collection in their order, None for what has none; an empty text has no entries."""
    if isinstance(value, (str, bytes)):
        return None if value else []
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, (set, frozenset, Mapping)) or not isinstance(value, Collection):
        return None
    return list(value)


def _size(size: Any, name: str, received: str) -> int:
    try:
        value = operator.index(size)
    except Exception:  # of an object's own __index__ too
        value = None
    if value is None or isinstance(size, bool):
        raise TypeError(
            f"The size of an axis must be an integer, but axis {_shown(name)} has size {_shown(size)}. {received}. "
            "Write a whole number, or -1 for what is left."
        )
    if (value < 1 and value != -1) or value.bit_length() > 63:
        raise ValueError(
            f"The size of an axis must be at least 1, or -1 for what is left, but axis {_shown(name)} has size "
            f"{_shown(value)}. {received}. Write how many devices lie along it."
        )
    return value


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of an integer of more than 4,300 digits, for one
        return f"an object of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= 300 else f"{text[:300]}..."

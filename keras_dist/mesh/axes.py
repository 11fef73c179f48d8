"""Mesh axes as plain data: parses every form of axes to `{name: size}`. Imports neither JAX nor Keras."""

import contextlib
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

MeshAxes = Mapping[str, int] | Sequence[tuple[str, int]] | Sequence[int] | str

MAX_AXES = 32  # NumPy allows 64 dims, and arranging devices doubles their number
_FORMS = '{"data": 2, "model": 4}, [("data", 2), ("model", 4)], "data:2,model:4", or (2, 4) or "2,4" with axis_names'


def parse_axes(axes: MeshAxes, axis_names: Sequence[str] | None = None) -> dict[str, int]:
    """Parses the axes of a mesh, in any of `_FORMS`, to an ordered `{name: size}`, outermost axis first.

    One size may be -1, which stands for the remaining devices. If `axes` includes names, `axis_names` must be the same
    ones. Anything else raises ValueError or TypeError.

    >>> parse_axes("data:2, model:-1")
    {'data': 2, 'model': -1}
    >>> parse_axes((2, 4), ["data", "model"])
    {'data': 2, 'model': 4}
    """
    names = "" if axis_names is None else f" with axis_names={_repr(axis_names)}"
    with _prefix_errors(f"Invalid mesh axes {_repr(axes)}{names}"):
        return _parse(_split(axes), None if axis_names is None else _check_names(axis_names))


def solve_axes(
    axes: dict[str, int], count: int, given: str = "available", more: Callable[[int], str] | None = None
) -> dict[str, int]:
    """Returns parsed axes with -1 replaced; their product must be `count` devices, which errors call `given`.

    `more` returns how to get a number of devices, as the end of a sentence, or nothing.

    >>> solve_axes({"data": -1, "model": 4}, 8)
    {'data': 2, 'model': 4}
    """
    if not count:
        raise ValueError(f"Mesh {spell_axes(axes)} needs at least one device, but none are {given}. Pass devices.")
    product = known_product(axes)
    has_rest = -1 in axes.values()
    if count % product == 0 if has_rest else count == product:
        return {name: count // product if size == -1 else size for name, size in axes.items()}
    needs = f"needs a multiple of {_repr(product)} devices" if has_rest else f"= {_repr(product)}"
    only = "only " if product > count else ""
    can_use_fewer = product < count and not has_rest and given == "available"
    hint = f", or use some of the devices with create_device_mesh(..., devices={product})" if can_use_fewer else ""
    if more is not None and product > count:
        hint = more(2 * product if has_rest else product)
    raise ValueError(
        f"Shape does not match the number of devices: {spell_axes(axes)} {needs}, but {only}{count} "
        f"{'is' if count == 1 else 'are'} {given}. Choose sizes whose product {'divides' if has_rest else 'is'} {count}"
        f"{hint}."
    )


def spread_axes(axes: Mapping[str, int], groups: int, dcn: Any = None, group_name: str = "slices") -> dict[str, int]:
    """Returns how many of the groups of devices, such as slices or hosts, each axis spans, a divisor of its size.

    `dcn` are the axes that may cross groups. None: the outermost that can. Names, `"data"` or `["data", "fsdp"]`: only
    these, each as far as possible, the first one first. Degrees in any form of axes, such as `{"data": 2}`, or `(2, 1)`
    with one degree per axis of the mesh: exactly these; one may be -1. `group_name` is a plural, for errors.

    Example: 4 slices; by default `data` spans 2, and `fsdp` the remaining 2 (of its 8 shards, 4 are within a slice):

    >>> spread_axes({"data": 2, "fsdp": 8, "model": 4}, 4)
    {'data': 2, 'fsdp': 2, 'model': 1}
    >>> spread_axes({"data": 2, "fsdp": 8, "model": 4}, 4, "fsdp")
    {'data': 1, 'fsdp': 4, 'model': 1}
    """
    requested = parse_dcn(dcn, axes)
    if isinstance(requested, dict):
        rest = max(groups // known_product(requested), 1)
        crossing = {name: rest if degree == -1 else degree for name, degree in requested.items()}
    else:
        crossing, remaining = {}, groups
        for name in requested:
            crossing[name] = math.gcd(axes[name], remaining)
            remaining //= crossing[name]
    with _prefix_errors(_invalid_dcn(dcn, axes)):
        if math.prod(crossing.values()) != groups:
            raise ValueError(
                f"{spell_axes(crossing)} = {math.prod(crossing.values())} {group_name}, but the devices form {groups}. "
                f"Choose axes and degrees whose product is {groups}, or omit dcn."
            )
        for name, degree in crossing.items():
            if axes[name] % degree:
                raise ValueError(
                    f"axis {name!r} of size {axes[name]} cannot span {degree} {group_name}. "
                    f"Choose a size that is a multiple of {degree}, or omit dcn."
                )
    return dict.fromkeys(axes, 1) | crossing


def parse_dcn(dcn: Any, axes: Mapping[str, int]) -> list[str] | dict[str, int]:
    """Parses the `dcn` of `spread_axes` to names of axes, or to degrees of some of them, one of which may be -1."""
    if dcn is None:
        return list(axes)
    with _prefix_errors(_invalid_dcn(dcn, axes)):
        if isinstance(dcn, str) and ":" not in dcn and not re.fullmatch(r"[-0-9,\s]*", dcn):
            requested = [name.strip() for name in dcn.split(",")]
        elif isinstance(dcn, (list, tuple)) and any(isinstance(name, str) for name in dcn):
            requested = list(dcn)
        else:
            entries = _split(dcn)
            requested = _parse(entries, None if _have_names(entries) else list(axes))
        if unknown := [name for name in requested if not isinstance(name, str) or name not in axes]:
            raise ValueError(f"the mesh has no axis {_repr(unknown[0])}. Use its axes {list(axes)}.")
        if len(set(requested)) != len(requested):
            raise ValueError("an axis is named twice. Name each axis once.")
    return requested


def default_names(axes: Any, names: Sequence[str] | None = None) -> list[str] | None:
    """Returns names for axes that include none, by default `"axis 0"`, `"axis 1"`, ..., and None for axes that do."""
    with _prefix_errors(f"Invalid mesh axes {_repr(axes)}"):
        entries = _split(axes)
    if _have_names(entries):
        return None
    return [f"axis {i}" for i in range(len(entries))] if names is None else list(names)


def known_product(axes: Mapping[str, int]) -> int:
    return math.prod(size for size in axes.values() if size != -1)


def spell_axes(axes: Mapping) -> str:
    """Returns axes as one side of an equation, `data:2 x model:4`."""
    return " x ".join(f"{name}:{size}" for name, size in axes.items())


def _parse(entries: list, names: list[str] | None) -> dict[str, int]:
    if len(entries) > MAX_AXES:
        raise ValueError(f"a mesh has at most {MAX_AXES} axes, not {len(entries)}. Merge some of them.")
    if not entries or names == []:
        raise ValueError(f"Shape and axis_names cannot be empty. Write {_FORMS}.")
    if names is None and not _have_names(entries):
        raise ValueError(f"every axis needs a name. Write {_FORMS}.")
    if names is not None and len(names) != len(entries):
        raise ValueError(
            f"Shape and axis_names should have same size, not {len(entries)} and {len(names)}. Pass one name per axis."
        )
    parsed: dict[str, int] = {}
    for name, size in entries if _have_names(entries) else zip(names or (), entries, strict=True):
        if not isinstance(name, str) or not name:
            raise TypeError(f"an axis name must be a non-empty string, not {_repr(name)}.")
        if name in parsed:
            raise ValueError(f"axis name {_repr(name)} is used twice. Rename one of the axes.")
        parsed[name] = _check_size(size, name)
    if names is not None and set(names) != set(parsed):
        raise ValueError("axes and axis_names contain different names. Omit axis_names.")
    if list(parsed.values()).count(-1) > 1:
        raise ValueError("only one axis can have size -1. Give the others a size.")
    return parsed


def _split(axes: Any) -> list:
    """Splits axes into pairs of name and size, or into sizes, which are not yet validated."""
    if isinstance(axes, str):
        return [_split_text(text.strip()) for text in axes.split(",")] if axes.strip() else []
    if isinstance(axes, Mapping):
        return list(axes.items())
    entries = _as_list(axes)
    if entries is None:
        hint = f", or ({axes},) for one axis" if isinstance(axes, int) and abs(axes) < 10**18 else ""
        raise TypeError(f"expected a dict, a list, a tuple or text. Write {_FORMS}{hint}.")
    entries = [tuple(entry) if isinstance(entry, (list, tuple)) else entry for entry in entries]
    pairs = [entry for entry in entries if isinstance(entry, tuple)]
    if pairs and (len(pairs) != len(entries) or any(len(pair) != 2 for pair in pairs)):
        raise ValueError(f"a list must contain only (name, size) pairs or only sizes. Write {_FORMS}.")
    return entries


def _split_text(text: str) -> Any:
    name, colon, size = text.rpartition(":")
    if not re.fullmatch(r"\s*-?[0-9]{1,18}", size) or ":" in name or (colon and not name.strip()):
        raise ValueError(f"{_repr(text)} is neither 'name:size' nor a size. Write {_FORMS}.")
    return (name.strip(), int(size)) if colon else int(size)


def _have_names(entries: list) -> bool:
    return all(isinstance(entry, tuple) for entry in entries)


def _check_names(axis_names: Any) -> list[str]:
    names = _as_list(axis_names)
    if names is None or not all(isinstance(name, str) and name for name in names):
        is_text = isinstance(axis_names, str)
        example = [name.strip() for name in axis_names.split(",")] if is_text else ["data", "model"]
        raise TypeError(
            f"axis_names must be a list or tuple of non-empty strings. Write, for example, axis_names={_repr(example)}."
        )
    return names


def _as_list(value: Any) -> list | None:
    """Returns the entries of an ordered collection, None for anything else; empty text has no entries."""
    if isinstance(value, (str, bytes)):
        return None if value else []
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, (set, frozenset, Mapping)) or not isinstance(value, Collection):
        return None
    return list(value)


def _check_size(size: Any, name: str) -> int:
    try:
        value = operator.index(size)
    except Exception:  # an object's own __index__ may raise anything
        value = None
    if value is None or isinstance(size, bool):
        raise TypeError(
            f"axis {_repr(name)} has size {_repr(size)}, which is not an integer. Write an integer, or -1 for the "
            "remaining devices."
        )
    if (value < 1 and value != -1) or value.bit_length() > 63:
        raise ValueError(
            f"axis {_repr(name)} has size {_repr(value)}. Write a size of at least 1, or -1 for the remaining devices."
        )
    return value


@contextlib.contextmanager
def _prefix_errors(prefix: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{prefix}: {error}") from None


def _invalid_dcn(dcn: Any, axes: Mapping[str, int]) -> str:
    return f"Invalid dcn {_repr(dcn)} for mesh {spell_axes(axes)}"


def _repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # for example an integer of more than 4,300 digits
        return f"an object of type {type(value).__name__} without a repr"
    return text if len(text) <= 300 else f"{text[:300]}..."

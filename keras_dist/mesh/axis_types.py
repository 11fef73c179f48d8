"""Parses the types of mesh axes."""

from typing import Any

from jax.sharding import AxisType


def parse_axis_types(axis_types: Any, count: int) -> tuple[AxisType, ...]:
    """Converts None (`Auto`), one type or its name, or a list of these, to one `AxisType` for each of `count` axes."""
    by_name = {axis_type.name.lower(): axis_type for axis_type in AxisType}
    types = "auto" if axis_types is None else axis_types
    types = [types] if isinstance(types, (AxisType, str)) else types
    invalid, fix = f"Invalid axis_types {axis_types!r} for {count} axes", f"Use {', '.join(by_name)}."
    if not isinstance(types, (list, tuple)) or not all(isinstance(each, (AxisType, str)) for each in types):
        raise TypeError(f"{invalid}: an axis type is a jax.sharding.AxisType or its name. {fix}")
    if len(types) not in (1, count):
        raise ValueError(f"{invalid}: expected one type, or one per axis.")
    names = [each.strip().lower() if isinstance(each, str) else each.name.lower() for each in types]
    if any(name not in by_name for name in names):
        raise ValueError(f"{invalid}: unknown name. {fix}")
    return tuple(by_name[name] for name in names) * (count if len(names) == 1 else 1)

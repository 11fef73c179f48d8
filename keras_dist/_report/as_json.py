"""Reports as plain data: data classes, mappings and sequences as dicts and lists, which JSON can spell."""

import dataclasses
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Returns data classes, mappings and sequences as dicts and lists, which JSON can spell.

    Example:

    >>> plain({"shape": (2, 3)})
    {'shape': [2, 3]}
    """
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value

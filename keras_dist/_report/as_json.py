"""Converts reports to data that JSON can represent."""

import dataclasses
from collections.abc import Mapping
from typing import Any


def to_plain_data(value: Any) -> Any:
    """Converts dataclasses, mappings and sequences to dicts and lists, recursively.

    >>> to_plain_data({"shape": (2, 3)})
    {'shape': [2, 3]}
    """
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_data(each) for each in value]
    return value

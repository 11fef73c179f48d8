"""`Report`: the base class of everything that prints as a report, and its conversion to plain data."""

import dataclasses
import json
import os
import pathlib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from keras_dist._report.tables import Section, html_page, render_html, render_text


class Report:
    """Prints as text, as HTML in a notebook, and converts to JSON. A subclass implements `_sections` and `to_dict`."""

    def _sections(self) -> Iterable[Section]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as numbers, strings, lists and dicts, which JSON can encode."""
        raise NotImplementedError

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the report as JSON.

        Args:
            indent: Number of spaces per level; None for a single line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as one HTML file, which loads nothing else: to open from disk, to publish or to mail.

        Args:
            path: Name of the file, which is replaced if it exists.
        """
        [(title, _), *_] = sections = list(self._sections())
        pathlib.Path(path).write_text(html_page(title, render_html(sections)), encoding="utf-8")

    def __str__(self) -> str:
        return render_text(self._sections())

    def _repr_html_(self) -> str:
        return render_html(self._sections())


def to_plain_data(value: Any) -> Any:
    """Converts dataclasses, mappings and sequences to dicts and lists, recursively."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_data(each) for each in value]
    return value


def from_plain_data(kind: Any, data: Any) -> Any:
    """Returns the value of a type that `to_plain_data` converted. Raises an error if the data are not of the type.

    Types are numbers, strings, dataclasses, `tuple[..., ...]`, and each of these or None.

    >>> from_plain_data(tuple[tuple[int, ...], ...] | None, [[2, 3], []])
    ((2, 3), ())
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        [kind] = [each for each in arguments if each is not types.NoneType]
        return None if data is None else from_plain_data(kind, data)
    if origin is tuple and isinstance(data, list):
        return tuple(from_plain_data(arguments[0], each) for each in data)
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        fields = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(**{name: from_plain_data(fields[name], each) for name, each in data.items()})
    if type(data) is not kind and (kind, type(data)) != (float, int):
        raise TypeError(f"Data of type {type(data).__name__} are not of type {kind}.")
    return data

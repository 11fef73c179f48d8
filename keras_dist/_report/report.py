"""`Report`: the base class of everything that prints as a report."""

import json
from collections.abc import Iterable
from typing import Any

from keras_dist._report.tables import Section, render_html, render_text


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
            indent: number of spaces per level; None for a single line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return render_text(self._sections())

    def _repr_html_(self) -> str:
        return render_html(self._sections())

"""An immutable, hashable mapping."""

from collections.abc import Iterable, Mapping
from typing import Any


class FrozenMapping(Mapping):
    def __init__(self, pairs: Mapping | Iterable[tuple[Any, Any]] = ()):
        self._values = dict(pairs)

    def __getitem__(self, key):
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def __hash__(self):
        return hash(frozenset(self._values.items()))

    def __repr__(self):
        return repr(self._values)

"""Cases of parametrized tests, of which some are slow."""

import itertools
from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """Returns the values of a slow case."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def slow_unless(is_fast: bool, *values: Any) -> Any:
    """Returns the values of a case, which is slow unless `is_fast`."""
    return pytest.param(*values) if is_fast else slow(*values)


def crossed(*dims: Iterable[Any], fast: Container[tuple] | None = None) -> list[Any]:
    """Returns all combinations of values as parameters, of which those in `fast` are fast.

    Without `fast`, as few are as let each value occur.

    >>> [(each.values, len(each.marks)) for each in crossed("ab", [1, 2])]
    [(('a', 1), 0), (('a', 2), 1), (('b', 1), 1), (('b', 2), 0)]
    """
    if fast is not None:
        return [slow_unless(case in fast, *case) for case in itertools.product(*dims)]
    values = [[*dim] for dim in dims]
    longest = max(map(len, values))
    diagonal = {tuple(index % len(dim) for dim in values) for index in range(longest)}
    return [
        slow_unless(indices in diagonal, *(dim[index] for dim, index in zip(values, indices, strict=True)))
        for indices in itertools.product(*(range(len(dim)) for dim in values))
    ]

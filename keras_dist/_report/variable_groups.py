"""Variables that are alike, as those of equal blocks, as one: which they are, and one path for all of them."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from keras_dist._report.units import bytes_text

PARTS = ("weights", "optimizer", "other")


@dataclass(frozen=True)
class PlacedVariable:
    """A variable and its layout on a mesh.

    Attributes:
        path: path of the variable in the model.
        part: `"weights"`, `"optimizer"` (optimizer state), or `"other"` (metrics and random seeds).
        shape: global shape.
        dtype: dtype of the stored value.
        rule: pattern of the layout map rule that matches it; None if no rule decided its layout. Optimizer state has
            the rule of its weight.
        axes: mesh axes of each dim: None, an axis name, or a tuple of axis names.
        shard_shape: shape on one device.
        bytes: bytes on one device.
    """

    path: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    rule: str | None
    axes: tuple[Any, ...]
    shard_shape: tuple[int, ...]
    bytes: int

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the full variable."""
        return not any(self.axes)


VariableT = TypeVar("VariableT", bound=PlacedVariable)


def groups_of(variables: Iterable[VariableT]) -> list[list[VariableT]]:
    """Returns variables that differ by numbers in their paths only, in one list each, largest first.

    What an optimizer keeps for one variable, such as momentum and velocity, is alike too.

    Args:
        variables: those of a plan or of a coverage.
    """
    groups: dict[tuple, list[Any]] = defaultdict(list)
    v: Any
    for v in variables:
        kind = kind_of(v.path)
        if v.part == "optimizer":
            kind = (*kind[:-1], kind[-1][:-1])  # "adam/dense_kernel_momentum" and "adam/dense_kernel_velocity"
        why = getattr(v, "why", None)  # a coverage tells those without a rule from those that brought a layout
        groups[v.part, kind, v.shape, v.dtype, v.rule, v.axes, v.shard_shape, why].append(v)
    return sorted(groups.values(), key=_minus_bytes)


def _minus_bytes(group: Sequence[Any]) -> int:
    return -sum(v.bytes for v in group)


def cells_of(group: Sequence[Any], note: str) -> tuple[str, ...]:
    """Returns what a table says of variables that are alike, in the columns `GROUP_COLUMNS`.

    Args:
        group: what `groups_of` returns one of.
        note: what is said below the path, "" for nothing.
    """
    first = group[0]
    path = "\n  ".join(folded(text) for text in (path_pattern([v.path for v in group]), note) if text)
    shape, held = f"{first.dtype}{list(first.shape)}", bytes_text(-_minus_bytes(group))
    if first.is_replicated:
        return path, f"{len(group)}", shape, "replicated", held
    shape += f"\n{' ' * len(first.dtype)}{list(first.shard_shape)}"
    layout = ", ".join("+".join(axis) if isinstance(axis, tuple) else str(axis) for axis in first.axes)
    return path, f"{len(group)}", shape, f"({layout})", held


def part_rows(
    variables: Iterable[VariableT], most_rows: Mapping[str, int], note: Callable[[VariableT], str]
) -> list[tuple[str, ...]]:
    """Returns the rows of a table of variables: for each part of the model, the groups with the most bytes.

    Args:
        variables: the variables.
        most_rows: the largest number of rows of each part.
        note: returns the line below a group's path, given its first variable.
    """
    variables, rows = list(variables), []
    for part, most in most_rows.items():
        groups = groups_of(variable for variable in variables if variable.part == part)
        shown = most if len(groups) > most + 1 else len(groups)  # one more row needs no more space than "1 more"
        rows += [cells_of(group, note(group[0])) for group in groups[:shown]]
        rest = [variable for group in groups[shown:] for variable in group]
        if rest:
            replicated = sum(variable.is_replicated for variable in rest)
            text = f"... and {len(rest)} more of {part}" + f", {replicated} of them replicated" * (replicated > 0)
            rows.append((text, "", "", "", bytes_text(sum(variable.bytes for variable in rest))))
    return rows


GROUP_COLUMNS = (">", "shape, on a device", "layout", ">bytes")  # what stands before them is the path and the note


def folded(path: str) -> str:
    """Returns a path, or a rule, in lines that end between its words."""
    return "\n  ".join(re.findall(r".{1,56}(?:(?<=[/_,| ])|$)|.{56}", path))


def kind_of(path: str) -> tuple[tuple[str, ...], ...]:
    """Returns what paths that differ by numbers only have in common: the words of each segment.

    Example:

    >>> kind_of("block_3/dense/kernel") == kind_of("block_12/dense_1/kernel")
    True
    """
    return tuple(map(_kind_of_segment, path.split("/")))


@lru_cache(maxsize=2**16)
def _kind_of_segment(segment: str) -> tuple[str, ...]:
    # Keras calls the first of its kind "dense" and the second one "dense_1".
    return tuple(re.sub(r"\d+", "#", _stem_and_number(word)[0]) for word in _words(segment))


def path_pattern(paths: Sequence[str]) -> str:
    """Returns paths as one, with what differs in braces; those of other numbers of words behind a comma.

    Example:

    >>> path_pattern(["block0/mlp/kernel", "block1/mlp/kernel", "block2/mlp/kernel"])
    'block{0..2}/mlp/kernel'
    >>> path_pattern(["adam/dense_kernel_momentum", "adam/dense_1_kernel_velocity"])
    'adam/dense{,_1}_kernel_{momentum,velocity}'
    """
    return ", ".join("".join(map(_alternatives, columns)) for columns in _columns(paths))


def path_regex(paths: Sequence[str], others: Iterable[str] = ()) -> str:
    """Returns a regex that matches some paths and none of some others.

    Args:
        paths: the paths, which should be alike.
        others: those that it must not match.

    Example:

    >>> path_regex(["block0/mlp/kernel", "block1/mlp/kernel"])
    'block[0-9]+/mlp/kernel'
    >>> path_regex(["block0/mlp/kernel", "block1/mlp/kernel"], ["block2/mlp/kernel"])
    'block(0|1)/mlp/kernel'
    """
    others = list(others)
    for spelled in (_any_numbers, _these_words):
        regex = "|".join("".join(map(spelled, columns)) for columns in _columns(paths))
        if not any(map(re.compile(regex).fullmatch, others)):
            return regex
    return "|".join(map(re.escape, dict.fromkeys(paths)))


def _columns(paths: Sequence[str]) -> list[list[list[str]]]:
    """For each number of words in a path: the distinct first words, the distinct second ones, and so on."""
    by_count: dict[int, list[list[str]]] = defaultdict(list)
    for words in map(_words, paths):
        by_count[len(words)].append(words)
    return [[list(dict.fromkeys(column)) for column in zip(*found, strict=True)] for found in by_count.values()]


def _any_numbers(words: list[str]) -> str:
    """A regex for words that differ by numbers, whatever the numbers; else for these words."""
    if len(words) == 1:
        return re.escape(words[0])
    forms = sorted({re.sub(r"\d+", "[0-9]+", re.escape(word)) for word in words}, key=len)
    if len(forms) == 1:
        return forms[0]
    number = forms[1].removeprefix(forms[0])
    return f"{forms[0]}({number})?" if len(forms) == 2 and number in ("[0-9]+", "_[0-9]+") else _these_words(words)


def _these_words(words: list[str]) -> str:
    """A regex for words and no others."""
    if len(words) == 1:
        return re.escape(words[0])
    stems, numbers = zip(*map(_stem_and_number, words), strict=True)
    stem, differing = (stems[0], numbers) if len(set(stems)) == 1 else ("", words)
    if all(each.startswith("_") for each in differing):
        stem, differing = f"{stem}_", [each[1:] for each in differing]
    return f"{re.escape(stem)}({'|'.join(map(re.escape, differing))})"


def _words(path: str) -> list[str]:
    """The words of a path and what stands between them; a number belongs to the word before it."""
    return re.split(r"(/|_(?!\d))", path)


def _stem_and_number(word: str) -> tuple[str, str]:
    stem = re.sub(r"_?\d+$", "", word)
    return stem, word[len(stem) :]


def _alternatives(words: list[str]) -> str:
    """Distinct words as one, with what differs in braces."""
    if len(words) == 1:
        return words[0]
    stems, numbers = zip(*map(_stem_and_number, words), strict=True)
    stem, differing = (stems[0], numbers) if len(set(stems)) == 1 else ("", words)
    if all(re.match(r"_\d", each) for each in differing):
        stem, differing = f"{stem}_", [each[1:] for each in differing]
    listed = [each for each in differing if each]
    values = [int(each.strip("_")) for each in listed if each.strip("_").isdecimal()]
    if len(values) > 2 and values == list(range(values[0], values[0] + len(listed))):
        listed = [f"{listed[0]}..{listed[-1]}"]
    elif len(listed) > 4:
        listed = [*listed[:2], "..", listed[-1]]
    return f"{stem}{{{','.join([''] * ('' in differing) + listed)}}}"

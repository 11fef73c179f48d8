"""Groups the variables of equal blocks, such as `block{0..2}/dense/kernel`, into one row of a table."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from keras_dist._report.tables import WIDTH
from keras_dist._report.units import bytes_text, counted

PARTS = ("weights", "optimizer", "other")


@dataclass(frozen=True)
class PlacedVariable:
    """A variable and its layout on a mesh."""

    path: str
    part: str  # "weights", "optimizer" (its state), or "other" (metrics and random seeds)
    shape: tuple[int, ...]
    dtype: str  # of the stored value
    rule: str | None  # pattern of the rule that decided its layout; optimizer state has the rule of its weight
    axes: tuple[Any, ...]  # for each dim None, the name of a mesh axis, or a tuple of names
    shard_shape: tuple[int, ...]
    bytes: int  # on one device
    is_on_host: bool = field(default=False, kw_only=True)  # in the memory of the hosts, and not of the devices

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the full variable."""
        return not any(self.axes)


VariableT = TypeVar("VariableT", bound=PlacedVariable)

VARIABLE_COLUMNS = (">", "shape, on a device", "layout", ">bytes")  # after a first column of paths and notes
_OTHERS = list(enumerate(column.removeprefix(">") for column in VARIABLE_COLUMNS))
_MIN_PATH = 56
_REST = {"weights": "more weight", "optimizer": "more optimizer variable", "other": "other variable"}
_BOOKKEEPING_ELEMENTS = 2  # of counters, learning rates, totals of metrics and seeds


def variable_rows(
    variables: Iterable[VariableT], max_rows: Mapping[str, int], note: Callable[[VariableT], str]
) -> list[tuple[str, ...]]:
    """Returns table rows for variables: the largest groups of each part, and one row for the rest of it.

    Replicated scalars that are not weights, such as `adam/iteration` and `loss/total`, never get a row of their own.
    `max_rows` has the parts in order, and the largest number of groups for each. A row is a path, with its `note`
    below it if that is not empty, followed by the cells of `VARIABLE_COLUMNS`. Paths take what these leave of the
    width of text.
    """
    variables, rows = list(variables), []
    for part, most in max_rows.items():
        groups = group_variables(variable for variable in variables if variable.part == part)
        groups.sort(key=lambda group: _is_bookkeeping(group[0]))  # stable: largest first, bookkeeping last
        shown = sum(not _is_bookkeeping(group[0]) for group in groups)
        if shown > most and len(groups) > most + 1:  # the row for the rest would take the room of a single group
            shown = most
        rows += [_group_row(group, note(group[0])) for group in groups[:shown]]
        if rest := [v for group in groups[shown:] for v in group]:
            replicated = sum(v.is_replicated for v in rest)
            replicated_text = f", {replicated} of them replicated" if replicated < len(rest) else ", replicated"
            text = f"... and {counted(len(rest), _REST[part])}" + replicated_text * (replicated > 0)
            rows.append((text, "", "", "", bytes_text(sum(v.bytes for v in rest))))
    cells = [(each, *(cell for _, *row in rows for cell in row[number].split("\n"))) for number, each in _OTHERS]
    room = max(_MIN_PATH, WIDTH - 2 - sum(2 + max(map(len, column)) for column in cells))  # 2: of indented lines
    return [(_fold(path, room), *others) for path, *others in rows]


def _is_bookkeeping(variable: PlacedVariable) -> bool:
    is_small = math.prod(variable.shape) <= _BOOKKEEPING_ELEMENTS
    return variable.part != "weights" and is_small and variable.is_replicated


def _group_row(group: Sequence[PlacedVariable], note: str) -> tuple[str, ...]:
    first = group[0]
    path = "\n".join(text for text in (path_pattern([v.path for v in group]), note) if text)
    shape, size = f"{first.dtype}{list(first.shape)}", bytes_text(sum(v.bytes for v in group))
    layout = "replicated"
    if not first.is_replicated:
        shape += f"\n{' ' * len(first.dtype)}{list(first.shard_shape)}"
        layout = f"({', '.join('+'.join(axis) if isinstance(axis, tuple) else str(axis) for axis in first.axes)})"
    return path, f"{len(group)}", shape, layout + "\non hosts" * first.is_on_host, size


def _fold(text: str, room: int) -> str:
    """Breaks a path and a rule into lines of at most `room` characters, after a separator where there is one."""
    pattern = rf".{{1,{room}}}(?:(?<=[/_,| ])|$)|.{{{room}}}"
    return "\n  ".join(line for each in text.split("\n") for line in re.findall(pattern, each))


def group_variables(variables: Iterable[VariableT]) -> list[list[VariableT]]:
    """Groups variables whose paths differ only in numbers and which are alike otherwise, largest group first."""
    groups: dict[tuple, list[Any]] = defaultdict(list)
    v: Any
    for v in variables:
        kind = path_kind(v.path)
        if v.part == "optimizer":
            kind = (*kind[:-1], kind[-1][:-1])  # joins "adam/dense_kernel_momentum" and "adam/dense_kernel_velocity"
        why = getattr(v, "why", None)  # of a coverage: no rule matches, or the variable came with a layout
        groups[v.part, kind, v.shape, v.dtype, v.rule, v.axes, v.shard_shape, v.is_on_host, why].append(v)
    return sorted(groups.values(), key=lambda group: -sum(v.bytes for v in group))


def path_kind(path: str) -> tuple[tuple[str, ...], ...]:
    """Returns the words of each segment of a path without their numbers, equal for paths of equal blocks."""
    return tuple(map(_segment_kind, path.split("/")))


@lru_cache(maxsize=2**16)
def _segment_kind(segment: str) -> tuple[str, ...]:
    # Keras names the first layer of its kind "dense" and the second "dense_1".
    return tuple(re.sub(r"\d+", "#", _stem_and_number(word)[0]) for word in _words(segment))


def path_pattern(paths: Sequence[str]) -> str:
    """Merges paths into one, with differing words in braces; paths of different lengths are separated by commas.

    >>> path_pattern(["block0/mlp/kernel", "block1/mlp/kernel", "block2/mlp/kernel"])
    'block{0..2}/mlp/kernel'
    >>> path_pattern(["adam/dense_kernel_momentum", "adam/dense_1_kernel_velocity"])
    'adam/dense{,_1}_kernel_{momentum,velocity}'
    """
    return ", ".join("".join(map(_alternatives, columns)) for columns in _columns(paths))


def path_regex(paths: Sequence[str], others: Iterable[str] = ()) -> str:
    """Returns a regex that matches all of `paths` and none of `others`.

    >>> path_regex(["block0/mlp/kernel", "block1/mlp/kernel"])
    'block[0-9]+/mlp/kernel'
    >>> path_regex(["block0/mlp/kernel", "block1/mlp/kernel"], ["block2/mlp/kernel"])
    'block(0|1)/mlp/kernel'
    """
    others = list(others)
    for as_regex in (_any_numbers, _these_words):
        regex = "|".join("".join(map(as_regex, columns)) for columns in _columns(paths))
        if not any(map(re.compile(regex).fullmatch, others)):
            return regex
    return "|".join(map(re.escape, dict.fromkeys(paths)))


def _columns(paths: Sequence[str]) -> list[list[list[str]]]:
    """For each number of words in a path: the distinct first words, the distinct second words, and so on."""
    by_count: dict[int, list[list[str]]] = defaultdict(list)
    for words in map(_words, paths):
        by_count[len(words)].append(words)
    return [[list(dict.fromkeys(column)) for column in zip(*found, strict=True)] for found in by_count.values()]


def _any_numbers(words: list[str]) -> str:
    """Returns a regex for words with any numbers if they differ only in these, else for exactly these words."""
    if len(words) == 1:
        return re.escape(words[0])
    forms = sorted({re.sub(r"\d+", "[0-9]+", re.escape(word)) for word in words}, key=len)
    if len(forms) == 1:
        return forms[0]
    number = forms[1].removeprefix(forms[0])
    return f"{forms[0]}({number})?" if len(forms) == 2 and number in ("[0-9]+", "_[0-9]+") else _these_words(words)


def _these_words(words: list[str]) -> str:
    if len(words) == 1:
        return re.escape(words[0])
    stem, endings = _common_stem(words)
    return f"{re.escape(stem)}({'|'.join(map(re.escape, endings))})"


def _words(path: str) -> list[str]:
    """Splits a path into words and separators; a number belongs to the word before it."""
    return re.split(r"(/|_(?!\d))", path)


def _common_stem(words: list[str]) -> tuple[str, list[str]]:
    """Returns the beginning of words that differ only in their number, and the different endings."""
    stems, numbers = zip(*map(_stem_and_number, words), strict=True)
    stem, endings = (stems[0], list(numbers)) if len(set(stems)) == 1 else ("", words)
    if all(re.match(r"_\d", each) for each in endings):
        return f"{stem}_", [each[1:] for each in endings]
    return stem, endings


def _stem_and_number(word: str) -> tuple[str, str]:
    stem = re.sub(r"_?\d+$", "", word)
    return stem, word[len(stem) :]


def _alternatives(words: list[str]) -> str:
    """Merges distinct words into one, with their differences in braces."""
    if len(words) == 1:
        return words[0]
    stem, endings = _common_stem(words)
    listed = [each for each in endings if each]
    values = [int(each.strip("_")) for each in listed if each.strip("_").isdecimal()]
    if len(values) > 2 and values == list(range(values[0], values[0] + len(listed))):
        listed = [f"{listed[0]}..{listed[-1]}"]
    elif len(listed) > 4:
        listed = [*listed[:2], "..", listed[-1]]
    return f"{stem}{{{','.join([''] * ('' in endings) + listed)}}}"

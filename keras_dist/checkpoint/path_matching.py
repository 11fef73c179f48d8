"""Matches the entries of a checkpoint with the variables of a model by their paths.

Keras names entries by the paths of the variables at the time of saving, and paths change: a model rebuilt from its
configuration lacks the names of the models around its layers (`sequential/dense/kernel` becomes `dense/kernel`,
keras#23251), and the second model of a program is numbered (`sequential_1/dense_2/kernel`).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from keras_dist._keras.internals import is_random_state

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?$")


class Matching(NamedTuple):
    """Which entry of a checkpoint belongs to which variable: entries are given by path, variables by index."""

    pairs: dict[int, str]
    missing: list[int]
    unexpected: list[str]


def match_weights(saved: list[str], paths: list[str], nested_paths: list[str], automatic: set[str]) -> Matching:
    """Returns the matching of a model's weights with the most pairs, the first of several.

    Tried are: equal paths, unique ones first; paths whose names all occur in the nested path of just one weight, in the
    same order; all kinds of paths without the numbers of names that Keras has given. Nested paths have the names of all
    models and layers that a weight is in. `automatic` has the names that Keras gives, without numbers.

    >>> match_weights(["sequential/dense/kernel"], ["dense/kernel"], ["sequential/dense/kernel"], {"dense"}).pairs
    {0: 'sequential/dense/kernel'}
    """

    def without_numbers(path):
        stems = ((part, _split(part)[0]) for part in path.split("/"))
        return "/".join(stem if stem in automatic else part for part, stem in stems)

    unique_paths = unique_weight_paths(paths, nested_paths)
    by_path = _match_by_key(saved, unique_paths)
    if not by_path.missing and not by_path.unexpected:  # the usual case, which needs none of the others
        return by_path
    return _most_pairs(
        by_path,
        _match_by_key(saved, paths),
        _match_by_nesting(saved, nested_paths),
        *(_match_by_key(saved, each, without_numbers) for each in (unique_paths, paths, nested_paths)),
    )


def match_seeds(saved: list[str], paths: list[str]) -> Matching:
    """Matches the states of random generators by path, otherwise by order of creation. `paths` has no duplicates."""
    return _most_pairs(_match_by_key(saved, paths), _match_by_key(saved, paths, lambda _: ""))


def match_optimizer(saved: list[str], paths: list[str], weights: list[tuple[str, str]]) -> Matching:
    """Matches the variables of an optimizer, whose names contain the path of their weight with underscores.

    `weights` has, for each weight of the model, its path and its path in the checkpoint, in the order in which the
    optimizer created its variables.

    >>> match_optimizer(["adam/sequential_dense_kernel_momentum"], ["adam/dense_kernel_momentum"],
    ...                 [("dense/kernel", "sequential/dense/kernel")]).pairs
    {0: 'adam/sequential_dense_kernel_momentum'}
    """
    expected = number_repeated(optimizer_paths(paths, weights))

    def without_number_of_optimizer(path):
        head, _, name = path.rpartition("/")
        if not head:  # a name that Keras gave, such as Nadam's `variable_1`
            return _split(name)[0]
        return "/".join(_split(part)[0] for part in head.split("/")) + "/" + name

    return _most_pairs(_match_by_key(saved, expected), _match_by_key(saved, expected, without_number_of_optimizer))


def optimizer_paths(paths: list[str], weights: list[tuple[str, str]]) -> list[str]:
    """Returns the paths that an optimizer's variables have in a checkpoint. `weights` is as for `match_optimizer`."""
    by_name = defaultdict(list)  # weights that share a path are used in turn: a rebuilt model can have several
    for path, saved in weights:
        by_name[path.replace("/", "_")].append(saved.replace("/", "_"))
    seen: Counter[str] = Counter()

    def renamed(path):
        head, _, name = path.rpartition("/")
        weight = name
        while "_" in weight:
            weight = weight[: weight.rindex("_")]
            if weight in by_name:
                seen[path] += 1
                return f"{head}/{by_name[weight][(seen[path] - 1) % len(by_name[weight])]}{name[len(weight) :]}"
        return path

    return [renamed(path) for path in paths]


def unique_weight_paths(paths: list[str], nested_paths: list[str]) -> list[str]:
    """Returns a unique path for each weight: its own or, if several share it, its nested path.

    Nested paths do not distinguish the states of random generators, which are numbered.

    >>> nested_paths = ["m/a/dense/kernel", "m/b/dense/kernel", "m/head/bias"]
    >>> unique_weight_paths(["dense/kernel", "dense/kernel", "head/bias"], nested_paths)
    ['m/a/dense/kernel', 'm/b/dense/kernel', 'head/bias']
    """
    count = Counter(paths)
    return number_repeated(
        nested if count[path] > 1 and not is_random_state(path) else path
        for path, nested in zip(paths, nested_paths, strict=True)
    )


def number_repeated(paths: Iterable[str]) -> list[str]:
    """Makes paths unique: appends `~1` to the second occurrence of a path, `~2` to the third.

    Nor is a path in a folder that is one itself: of `a/kernel` and `a/kernel/bias`, the first becomes `a/kernel~1`.
    """
    paths = list(paths)
    seen = Counter({path[: end.start()] for path in paths for end in re.finditer("/", path)})
    numbered = []
    for path in paths:
        numbered.append(f"{path}~{seen[path]}" if seen[path] else path)
        seen[path] += 1
    return numbered


def _most_pairs(*matchings: Matching) -> Matching:
    return max(matchings, key=lambda matching: len(matching.pairs))  # the first of several


def _match_by_key(saved: list[str], paths: list[str], key: Callable[[str], str] = lambda path: path) -> Matching:
    """Pairs entries and variables with equal keys, in the order of the numbers in their paths.

    If a key has more entries than variables, or more variables than entries, none of them is paired.
    """
    groups: dict[str, tuple[list, list]] = defaultdict(lambda: ([], []))
    for path in saved:
        groups[key(path)][0].append(path)
    for number, path in enumerate(paths):
        groups[key(path)][1].append(number)
    pairs = {}
    for entries, numbers in groups.values():
        are_distinct = len({paths[number] for number in numbers}) == len(numbers)
        if len(entries) == len(numbers) and are_distinct:
            entries.sort(key=_order)
            numbers.sort(key=lambda number: _order(paths[number]))
            pairs.update(zip(numbers, entries, strict=True))
    return _matching(pairs, saved, paths)


def _match_by_nesting(saved: list[str], nested_paths: list[str]) -> Matching:
    """Pairs each entry with the only weight whose nested path has all names of the entry, in the same order.

    Each round pairs the entries that have one candidate left, and removes these weights from the other entries:
    `b/kernel` may be `m/b/kernel` only, after which `kernel` can no longer be that and must be `m/kernel`.
    """
    by_name = defaultdict(set)
    for number, nested in enumerate(nested_paths):
        by_name[nested.rpartition("/")[2]].add(number)
    candidates = {
        path: {number for number in by_name[path.rpartition("/")[2]] if _is_within(path, nested_paths[number])}
        for path in saved
    }
    pairs: dict[int, str] = {}
    while settled := [path for path, numbers in candidates.items() if len(numbers) == 1]:
        claims = Counter(next(iter(candidates[path])) for path in settled)
        for path in settled:
            (number,) = candidates.pop(path)
            if claims[number] == 1 and number not in pairs:
                pairs[number] = path
        for numbers in candidates.values():
            numbers.difference_update(pairs)
    return _matching(pairs, saved, nested_paths)


def _matching(pairs: dict[int, str], saved: list[str], paths: list[str]) -> Matching:
    used = set(pairs.values())
    missing = [number for number in range(len(paths)) if number not in pairs]
    return Matching(pairs, missing, [path for path in saved if path not in used])


def _is_within(path: str, nested: str) -> bool:
    names = iter(nested.split("/"))
    return all(name in names for name in path.split("/"))


def _split(name: str) -> tuple[str, int]:
    match: Any = _NUMBERED.match(name)
    return match[1], int(match[2] or 0)


def _order(path: str) -> list[tuple[str, int]]:
    return [_split(part) for part in path.split("/")]

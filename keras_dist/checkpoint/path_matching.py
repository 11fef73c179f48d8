"""Which entry of a checkpoint belongs to which variable of a model, by their paths.

A checkpoint of Keras names its entries by the paths that the variables had when it was written, and those change: a
model that is rebuilt from its configuration lacks the names of the models around its layers (`sequential/dense/kernel`
becomes `dense/kernel`, keras#23251), and one that is made a second time in a program is numbered on
(`sequential_1/dense_2/kernel`).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

SEED = "seed_generator_state"  # the last part of the path of a random generator's state

_NUMBER = re.compile(r"(.*?)(?:_(\d+))?$")


class Pairing(NamedTuple):
    """Entries of a checkpoint and the variables they belong to.

    Attributes:
        pairs: the path of the entry for each variable that has one, by the variable's number.
        missing: the numbers of the variables that have none.
        unexpected: the paths of the entries that belong to no variable.
    """

    pairs: dict[int, str]
    missing: list[int]
    unexpected: list[str]

    @property
    def is_complete(self) -> bool:
        """Whether every variable has an entry, and every entry a variable."""
        return not self.missing and not self.unexpected


def pair_weights(saved: list[str], paths: list[str], owners: list[str], automatic: set[str]) -> Pairing:
    """Finds the entry of a checkpoint for each weight of a model.

    Paths that are equal in whole are taken as they are. Else the names of the layers around a weight decide; else the
    same names counted otherwise, where Keras has given them.

    Args:
        saved: the paths in the checkpoint.
        paths: the paths of the model's weights.
        owners: the paths of the same weights with the names of all models and layers they are in.
        automatic: names that Keras gives by itself, without numbers.

    Returns:
        The complete pairing if there is one, else the one that leaves least.

    Example:

    >>> pair_weights(["sequential/dense/kernel"], ["dense/kernel"], ["sequential/dense/kernel"], {"dense"}).pairs
    {0: 'sequential/dense/kernel'}
    """
    attempts: list[Callable[[], Pairing]] = [
        lambda: _by_key(saved, paths, lambda path: path),
        lambda: _by_owners(saved, owners),
        lambda: _by_key(saved, paths, lambda path: _unnumbered(path, automatic)),
        lambda: _by_key(saved, owners, lambda path: _unnumbered(path, automatic)),
    ]
    return _best(attempts)


def pair_seeds(saved: list[str], paths: list[str]) -> Pairing:
    """Finds the entry for the state of each random generator: by path, else in the order in which they were made.

    Args:
        saved: the paths of states in the checkpoint.
        paths: those of the model's generators, none twice.
    """
    return _best([lambda: _by_key(saved, paths, lambda path: path), lambda: _by_key(saved, paths, lambda _: "")])


def pair_slots(saved: list[str], paths: list[str], weights: list[tuple[str, str]]) -> Pairing:
    """Finds the entry for each variable of an optimizer.

    Args:
        saved: the paths in the checkpoint.
        paths: the paths of the optimizer's variables.
        weights: the path of each weight of the model and its path in the checkpoint, in the order in which the
            optimizer made its slots. A slot bears the name of its weight, with underscores.

    Example:

    >>> pair_slots(["adam/sequential_dense_kernel_momentum"], ["adam/dense_kernel_momentum"],
    ...            [("dense/kernel", "sequential/dense/kernel")]).pairs
    {0: 'adam/sequential_dense_kernel_momentum'}
    """
    expected = name_slots(paths, weights)

    def unnumbered(path):  # the name of the optimizer only
        head, _, name = path.rpartition("/")
        return "/".join(_split(part)[0] for part in head.split("/")) + "/" + name

    return _best([lambda: _by_key(saved, expected, lambda path: path), lambda: _by_key(saved, expected, unnumbered)])


def name_slots(paths: list[str], weights: list[tuple[str, str]]) -> list[str]:
    """Returns the paths that an optimizer's variables have in a checkpoint.

    Args:
        paths: their paths in the optimizer.
        weights: as for `pair_slots`.
    """
    flat = defaultdict(list)  # weights of one path are taken in turn: a rebuilt model can have several
    for now, before in weights:
        flat[now.replace("/", "_")].append(before.replace("/", "_"))
    seen: Counter[str] = Counter()

    def as_saved(path):
        head, _, name = path.rpartition("/")
        stem = name
        while "_" in stem:
            stem = stem[: stem.rindex("_")]
            if stem in flat:
                seen[path] += 1
                return f"{head}/{flat[stem][(seen[path] - 1) % len(flat[stem])]}{name[len(stem) :]}"
        return path

    return [as_saved(path) for path in paths]


def name_weights(paths: list[str], owners: list[str]) -> list[str]:
    """Returns under which paths weights are saved: their own, or, where several have the same one, their owners'.

    The states of random generators have no owners that tell them apart, and are numbered.

    Args:
        paths: the paths of the weights.
        owners: as for `pair_weights`.

    Example:

    >>> name_weights(["dense/kernel", "dense/kernel", "head/bias"], ["m/a/dense/kernel", "m/b/dense/kernel", "m/bias"])
    ['m/a/dense/kernel', 'm/b/dense/kernel', 'head/bias']
    """
    count = Counter(paths)
    return number_repeated(
        owner if count[path] > 1 and not path.endswith(SEED) else path
        for path, owner in zip(paths, owners, strict=True)
    )


def number_repeated(paths: Iterable[str]) -> list[str]:
    """Returns paths of which none is another one: `~1` follows the second of the same, `~2` the third."""
    seen: Counter[str] = Counter()
    numbered = []
    for path in paths:
        numbered.append(f"{path}~{seen[path]}" if seen[path] else path)
        seen[path] += 1
    return numbered


def _best(attempts: Iterable[Callable[[], Pairing]]) -> Pairing:
    best = None
    for attempt in attempts:
        pairing = attempt()
        if pairing.is_complete:
            return pairing
        if best is None or len(pairing.pairs) > len(best.pairs):
            best = pairing
    assert best is not None
    return best


def _by_key(saved: list[str], paths: list[str], key: Callable[[str], str]) -> Pairing:
    """Pairs what has the same key, in the order of the numbers in the paths; nothing where one side has more."""
    groups: dict[str, tuple[list, list]] = defaultdict(lambda: ([], []))
    for path in saved:
        groups[key(path)][0].append(path)
    for number, path in enumerate(paths):
        groups[key(path)][1].append(number)
    pairs = {}
    for entries, numbers in groups.values():
        distinct = len({paths[number] for number in numbers}) == len(numbers)
        if len(entries) == len(numbers) and (distinct or len(numbers) == 1):
            entries.sort(key=_order)
            numbers.sort(key=lambda number: _order(paths[number]))
            pairs.update(zip(numbers, entries, strict=True))
    return _pairing(pairs, saved, paths)


def _by_owners(saved: list[str], owners: list[str]) -> Pairing:
    """Pairs each entry with the one weight whose owners have all names in its path, in the same order."""
    by_name = defaultdict(set)
    for number, owner in enumerate(owners):
        by_name[owner.rpartition("/")[2]].add(number)
    candidates = {}
    for path in saved:
        fitting = by_name[path.rpartition("/")[2]]
        candidates[path] = {number for number in fitting if _is_within(path, owners[number])}
    pairs: dict[int, str] = {}
    while settled := [path for path, numbers in candidates.items() if len(numbers) == 1]:
        wanted = Counter(next(iter(candidates[path])) for path in settled)
        for path in settled:
            (number,) = candidates.pop(path)
            if wanted[number] == 1 and number not in pairs:
                pairs[number] = path
        for numbers in candidates.values():
            numbers.difference_update(pairs)
    return _pairing(pairs, saved, owners)


def _pairing(pairs: dict[int, str], saved: list[str], paths: list[str]) -> Pairing:
    taken = set(pairs.values())
    missing = [number for number in range(len(paths)) if number not in pairs]
    return Pairing(pairs, missing, [path for path in saved if path not in taken])


def _is_within(path: str, owner: str) -> bool:
    names = iter(owner.split("/"))
    return all(name in names for name in path.split("/"))


def _split(name: str) -> tuple[str, int]:
    match: Any = _NUMBER.match(name)
    return match[1], int(match[2] or 0)


def _unnumbered(path: str, automatic: set[str]) -> str:
    parts = [_split(part)[0] if _split(part)[0] in automatic else part for part in path.split("/")]
    return "/".join(parts)


def _order(path: str) -> list[tuple[str, int]]:
    return [_split(part) for part in path.split("/")]

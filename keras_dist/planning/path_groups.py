"""Variables that are alike, as those of equal blocks, as one: which they are, and one path for all of them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from keras_dist.planning.plan import PlannedVariable


def groups_of(variables: Iterable[PlannedVariable]) -> list[list[PlannedVariable]]:
    """Returns variables that differ by numbers in their paths only, in one list each, largest first.

    What an optimizer keeps for one variable, such as momentum and velocity, is alike too.

    Args:
        variables: those of a plan.
    """
    groups: dict[tuple, list[PlannedVariable]] = defaultdict(list)
    for v in variables:
        # Keras calls the first of its kind "dense" and the second one "dense_1".
        words = [re.sub(r"\d+", "#", _stem_and_number(word)[0]) for word in _words(v.path)]
        if v.part == "optimizer":
            words[-1] = ""  # "adam/dense_kernel_momentum" and "adam/dense_kernel_velocity"
        groups[v.part, tuple(words), v.shape, v.dtype, v.rule, v.axes, v.shard_shape].append(v)
    return sorted(groups.values(), key=lambda group: -sum(v.bytes for v in group))


def path_pattern(paths: Sequence[str]) -> str:
    """Returns paths of as many words each as one, with what differs in braces.

    Example:

    >>> path_pattern(["block0/mlp/kernel", "block1/mlp/kernel", "block2/mlp/kernel"])
    'block{0..2}/mlp/kernel'
    >>> path_pattern(["adam/dense_kernel_momentum", "adam/dense_1_kernel_velocity"])
    'adam/dense{,_1}_kernel_{momentum,velocity}'
    """
    columns = zip(*map(_words, paths), strict=True)
    return "".join(_alternatives(list(dict.fromkeys(column))) for column in columns)


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

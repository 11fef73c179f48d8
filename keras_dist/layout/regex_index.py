"""Which of many regexes match a path, found without trying them all. No JAX and no Keras in here."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_UNKNOWN = "\0"  # in a skeleton: text that depends on the path


class _Entry(NamedTuple):
    order: int
    pattern: str
    regex: re.Pattern[str]
    literal: str  # text that every match holds, "" where none is certain


class PathIndex:
    """Regexes over paths, sorted by the text that each one's matches must hold.

    Most regexes over paths spell at least one whole segment, such as `attention` in `.*/attention/(query|key)/kernel`.
    They are filed under the rarest segment that they spell, and tried for the paths that have it. Of the regexes filed
    together, or under none, each is tried for the paths that hold the text that tells it best from the others.

    Args:
        regexes: compiled regexes by their patterns; a path matches where the whole of it does.

    Example:

    >>> patterns = [".*/attention/(query|key)/kernel", ".*bias", "head/kernel"]
    >>> index = PathIndex({pattern: re.compile(pattern) for pattern in patterns})
    >>> index.matching("block_3/attention/query/kernel")
    ['.*/attention/(query|key)/kernel']
    """

    def __init__(self, regexes: Mapping[str, re.Pattern[str]]):
        skeletons = {pattern: _skeleton(pattern) for pattern in regexes}
        segments = {pattern: _whole_segments(skeleton) for pattern, skeleton in skeletons.items()}
        uses = Counter(segment for found in segments.values() for segment in found)
        filed: defaultdict[str | None, list[str]] = defaultdict(list)
        for pattern in regexes:
            filed[min(sorted(segments[pattern]), key=lambda segment: uses[segment], default=None)].append(pattern)
        orders = {pattern: order for order, pattern in enumerate(regexes)}
        self._by_segment = {
            segment: [
                _Entry(orders[pattern], pattern, regexes[pattern], literal)
                for pattern, literal in _telling_literals({p: skeletons[p] for p in patterns}).items()
            ]
            for segment, patterns in filed.items()
        }
        self._others = self._by_segment.pop(None, [])

    def matching(self, path: str) -> list[str]:
        """Returns the patterns that match a whole path, in the order they were given.

        Args:
            path: segments joined by `/`.

        Returns:
            The patterns.
        """
        found = [entry for entry in self._others if entry.literal in path and entry.regex.fullmatch(path)]
        for segment in set(path.split("/")):
            for entry in self._by_segment.get(segment, ()):
                if entry.literal in path and entry.regex.fullmatch(path):
                    found.append(entry)
        found.sort()
        return [entry.pattern for entry in found]


def _telling_literals(skeletons: Mapping[str, str]) -> dict[str, str]:
    """Returns the literal text of each pattern that the fewest others have, of those the longest."""
    literals = {pattern: set(skeleton.split(_UNKNOWN)) for pattern, skeleton in skeletons.items()}
    uses = Counter(literal for found in literals.values() for literal in found)
    uses[""] = len(literals) + 1
    return {
        pattern: min(sorted(found), key=lambda literal: (uses[literal], -len(literal)))
        for pattern, found in literals.items()
    }


def _whole_segments(skeleton: str) -> set[str]:
    return {segment for segment in skeleton.split("/") if segment and _UNKNOWN not in segment}


def _skeleton(pattern: str) -> str:
    """Returns the text that every match of a regex holds, with a NUL for each part that depends on the path.

    Where the pattern has more to it than groups, classes, wildcards and quantifiers, nothing is certain, and the
    skeleton is one NUL.

    Args:
        pattern: a valid regex.

    Returns:
        The skeleton.

    Example:

    >>> _skeleton(r"model/.*block_[0-9]+/(query|key)/kernel").replace(_UNKNOWN, "~")
    'model/~block_~/~/kernel'
    """
    parts: list[str] = []
    depth = 0
    for match in _TOKEN.finditer(pattern):
        token, rest = match.group(), pattern[match.end() :]
        if token == "(":
            # `(?:` and `(?P<name>` only group; flags and look-arounds change what the rest means.
            if rest.startswith("?") and not rest.startswith(("?:", "?P<")):
                return _UNKNOWN
            depth += 1
        elif token == ")":
            depth -= 1
            parts.append(_UNKNOWN)
        elif depth:
            continue
        elif token == "|":
            return _UNKNOWN
        elif token in "*?":
            parts[-1] = _UNKNOWN  # what it repeats may be missing
        elif token == "{":
            return _UNKNOWN
        elif token == "+":
            parts.append(_UNKNOWN)  # what it repeats is there, and may be there again
        elif token in ".^$" or token[0] == "[":
            parts.append(_UNKNOWN)
        elif token[0] == "\\" and token[1].isalnum():
            if token[1] not in "dDwWsSbBAZ":
                return _UNKNOWN
            parts.append(_UNKNOWN)
        else:
            parts.append(token[-1])
    return re.sub(f"{_UNKNOWN}+", _UNKNOWN, "".join(parts))

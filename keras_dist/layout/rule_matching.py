"""Which patterns of a layout map match a path."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from re import _constants, _parser  # pyright: ignore[reportAttributeAccessIssue]  (re has no public parser)

# Keras prefixes the paths of a Sequential's variables with the model's name, numbers these names in order of creation,
# and drops the prefix when it loads the model from a file. A rule therefore need not contain such a name.
_AUTOMATIC_MODEL_NAME = re.compile(r"(?:sequential|functional)(?:_\d+)?/")
_ACTIVATION_SUFFIXES = ("output", "input")  # last segments of the paths of layer outputs and inputs
_SPECIAL_CHARACTER = re.compile(r"[.^$*+?{}\[\]\\|()]")  # a pattern without any of these matches only itself
_MATCHES_EVERYTHING = re.compile(r"(?:\.\*|\(\?:\.\*\))+")  # includes `.*(?:.*).*`, from a rule written for re.search


def path_variants(path: str) -> Iterator[str]:
    """Yields a path, then the path without its first automatic model name, without its second, and so on.

    >>> list(path_variants("sequential_3/functional/dense/kernel"))
    ['sequential_3/functional/dense/kernel', 'functional/dense/kernel', 'dense/kernel']
    """
    yield path
    while model_name := _AUTOMATIC_MODEL_NAME.match(path):
        path = path[model_name.end() :]
        yield path


@lru_cache(maxsize=2**16)
def strip_model_names(path: str) -> str:
    """Returns a path without leading automatic model names: the last of its `path_variants`."""
    *_, stripped = path_variants(path)
    return stripped


class Regexes(dict[str, re.Pattern[str]]):
    """Compiled regexes by a name, mostly their pattern, with an index that skips most regexes for most paths.

    Most patterns spell a whole segment of the path. They are tried only for paths with that segment which also contain
    the longest other text that the pattern spells.

    >>> patterns = [".*/attention/(query|key)/kernel", ".*bias", "head/kernel"]
    >>> Regexes({pattern: re.compile(pattern) for pattern in patterns}).full_matches("block_3/attention/key/kernel")
    ['.*/attention/(query|key)/kernel']
    """

    _index: dict[str | None, list[tuple]] | None = None

    def __setitem__(self, name, regex):
        super().__setitem__(name, regex)
        self._index = None

    def __delitem__(self, name):
        super().__delitem__(name)
        self._index = None

    def full_matches(self, path: str) -> list[str]:
        """Returns the names of the regexes that match an entire path, in the order given."""
        if self._index is None:
            self._index = defaultdict(list)
            for number, (name, regex) in enumerate(self.items()):
                texts = required_texts(regex.pattern)
                spelled = _GAP.join(texts).split("/")
                segment = max((s for s in spelled if s and _GAP not in s), key=len, default=None)
                others = [text for text in texts if segment is None or segment not in text]
                self._index[segment].append((number, name, regex, max(others, key=len, default="")))
        segments = self._index.keys() & {None, *path.split("/")}
        entries = [entry for segment in segments for entry in self._index[segment]]
        found = [(number, name) for number, name, regex, text in entries if text in path and regex.fullmatch(path)]
        return [name for _, name in sorted(found)]


_GAP = "\0"  # stands for the parts of a pattern that are not literal text


@lru_cache(maxsize=2**16)
def required_texts(pattern: str) -> list[str]:
    """Returns the texts that every match of a pattern contains, in their order, "" where it begins or ends otherwise.

    >>> required_texts("(a|b)_[0-9]+/kernel"), required_texts("a|b")
    (['', '_', '/kernel'], ['', ''])
    """
    parsed = _parser.parse(pattern)
    texts = [""]
    for operation, argument in parsed:
        if operation is _constants.LITERAL and not parsed.state.flags & (re.IGNORECASE | re.VERBOSE):
            texts[-1] += chr(argument)
        else:
            texts.append("")
    return texts


def matching_patterns(regexes: Regexes, path: str) -> list[str]:
    """Returns the patterns that match a path; if none does, those that match it without automatic model names."""
    return regexes.full_matches(path) or regexes.full_matches(strip_model_names(path))


def applies_to(pattern: str, path: str) -> bool:
    """Returns whether a pattern applies to a path that it matches: to outputs and inputs only if it contains that word.

    Ordered rules often end with `.*`, meant for variables. Applied to layer outputs it would replicate every batch.

    >>> applies_to(".*", "dense/kernel"), applies_to(".*", "dense/output"), applies_to(".*output", "dense/output")
    (True, False, True)
    """
    suffix = path.rpartition("/")[2]
    return suffix not in _ACTIVATION_SUFFIXES or re.search(rf"\b{suffix}\b", pattern) is not None


def is_for_activations(pattern: str) -> bool:
    """Returns whether a pattern is for what layers take or return, and not for variables.

    >>> is_for_activations("dense/output"), is_for_activations(".*output"), is_for_activations("output/kernel")
    (True, True, False)
    """
    return re.search(rf"\b({'|'.join(_ACTIVATION_SUFFIXES)})$", pattern) is not None


def find_shadowing_rule(pattern: str, earlier: Mapping[str, re.Pattern[str]]) -> str | None:
    """Returns the first earlier pattern that certainly makes a later one unreachable, or None.

    That is certain in two cases: the later pattern is a plain path that an earlier regex matches, or an earlier pattern
    matches everything.

    >>> earlier = {"dense.*": re.compile("dense.*")}
    >>> find_shadowing_rule("dense_1/kernel", earlier), find_shadowing_rule("dense_[0-9]/kernel", earlier)
    ('dense.*', None)
    """
    is_path = not _SPECIAL_CHARACTER.search(pattern)
    for candidate, regex in earlier.items():
        if is_path:
            shadows = applies_to(candidate, pattern) and any(map(regex.fullmatch, path_variants(pattern)))
        else:
            shadows = _MATCHES_EVERYTHING.fullmatch(candidate) and not any(s in pattern for s in _ACTIVATION_SUFFIXES)
        if shadows:
            return candidate
    return None

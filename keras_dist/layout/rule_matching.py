"""Which patterns of a layout map match a path."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

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


def full_matches(regexes: Mapping[str, re.Pattern[str]], path: str) -> list[str]:
    """Returns the names of the regexes that match an entire path, in their order; mostly their names are the patterns.

    >>> full_matches({name: re.compile(name) for name in (".*up/kernel", ".*", "up")}, "up/kernel")
    ['.*up/kernel', '.*']
    """
    return [name for name, regex in regexes.items() if regex.fullmatch(path)]


def matching_patterns(regexes: Mapping[str, re.Pattern[str]], path: str) -> list[str]:
    """Returns the patterns that match a path, else those of the first of its variants that any matches."""
    return next((found for variant in path_variants(path) if (found := full_matches(regexes, variant))), [])


def applies_to(pattern: str, path: str) -> bool:
    """Returns whether a pattern applies to a path that it matches: to outputs and inputs only if it contains that word.

    A regex such as `up/.*` or `.*` is meant for variables. Applied to outputs of layers, it would move every batch.

    >>> applies_to(".*", "dense/kernel"), applies_to(".*", "dense/output"), applies_to(".*output", "dense/output")
    (True, False, True)
    """
    suffix = path.rpartition("/")[2]
    return suffix not in _ACTIVATION_SUFFIXES or re.search(rf"\b{suffix}\b", pattern) is not None


def is_for_activations(pattern: str) -> bool:
    """Returns whether a pattern is for what layers take or return, and not for variables.

    >>> is_for_activations("dense/output"), is_for_activations(".*/(input|output)"), is_for_activations("output/kernel")
    (True, True, False)
    """
    end = re.search(r"(?:\((?:\?:)?([\w|]+)\)|\b(\w+))\$?$", pattern)  # a group of alternatives, or a word
    return end is not None and set((end[1] or end[2]).split("|")) <= set(_ACTIVATION_SUFFIXES)


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

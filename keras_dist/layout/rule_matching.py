"""What a rule over paths need not spell, and what the order of rules decides. No JAX and no Keras in here."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from keras_dist.layout.regex_index import PathIndex

# Keras puts the name of a Sequential before the paths of its variables, counts that name up from model to model, and
# drops it when the model is loaded from a file. Names that Keras gives by itself are no part of what a rule spells.
_AUTOMATIC_MODEL_NAME = re.compile(r"(?:sequential|functional)(?:_\d+)?/")
_CALL_WORDS = ("output", "input")  # the ends of paths of what layers return and are called with
_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()]")  # a key without these matches one path, itself
_CATCH_ALL = re.compile(r"(?:\.\*|\(\?:\.\*\))+")  # also as rules for re.search become ones for a whole path


def path_variants(path: str) -> Iterator[str]:
    """Yields a path, then what remains of it without each name that Keras gave a model by itself.

    Args:
        path: segments joined by `/`.

    Yields:
        The path, and its ends.

    Example:

    >>> list(path_variants("sequential_3/functional/dense/kernel"))
    ['sequential_3/functional/dense/kernel', 'functional/dense/kernel', 'dense/kernel']
    """
    yield path
    while model_name := _AUTOMATIC_MODEL_NAME.match(path):
        path = path[model_name.end() :]
        yield path


def applies_to(key: str, path: str) -> bool:
    """Returns whether one of ordered rules is meant for a path that it matches.

    Such rules end in `.*`, which is meant for variables: for what layers return it would replicate every batch.

    Args:
        key: the regex of the rule.
        path: a path that it matches.

    Returns:
        False for the path of what a layer returns or is called with (`/output`, `/input`) where the key does not have
        that word.

    Example:

    >>> applies_to(".*", "dense/kernel"), applies_to(".*", "dense/output"), applies_to(".*output", "dense/output")
    (True, False, True)
    """
    end = path.rpartition("/")[2]
    return end not in _CALL_WORDS or re.search(rf"\b{end}\b", key) is not None


def find_shadowing_rule(key: str, earlier: Mapping[str, re.Pattern[str]]) -> str | None:
    """Returns the rule that leaves a later one no path, where that is certain: of a key that is a path, or behind `.*`.

    Args:
        key: the regex of the later rule.
        earlier: the compiled regexes of the earlier rules by their patterns.

    Returns:
        The pattern of the first such rule, None where the later one may have a path.

    Example:

    >>> earlier = {"dense.*": re.compile("dense.*")}
    >>> find_shadowing_rule("dense_1/kernel", earlier), find_shadowing_rule("dense_[0-9]/kernel", earlier)
    ('dense.*', None)
    """
    is_path = not _SPECIAL.search(key)
    for pattern, regex in earlier.items():
        if is_path:
            hides = applies_to(pattern, key) and any(map(regex.fullmatch, path_variants(key)))
        else:
            hides = _CATCH_ALL.fullmatch(pattern) and not any(word in key for word in _CALL_WORDS)
        if hides:
            return pattern
    return None


@lru_cache(maxsize=2**16)
def strip_model_names(path: str) -> str:
    """Returns a path without the names that Keras gave models by itself.

    Example:

    >>> strip_model_names("sequential_3/functional/dense/kernel")
    'dense/kernel'
    """
    *_, rest = path_variants(path)
    return rest


def matching(index: PathIndex, path: str) -> list[str]:
    """Returns the regexes that match a path, or where none does, what of it is no automatic name.

    Args:
        index: the regexes.
        path: the path of a variable, or of a layer with `/output` or `/input` behind it.

    Returns:
        The patterns.
    """
    return index.matching(path) or index.matching(strip_model_names(path))

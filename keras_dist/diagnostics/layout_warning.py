"""`LayoutMapWarning`: reports likely mistakes in a layout map before the first step; `findings.py` has their texts."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any

import keras

from keras_dist._keras.active_distribution import variables_of
from keras_dist._keras.model_structure import layers_by_path
from keras_dist._report.units import counted
from keras_dist._report.user_warnings import warn
from keras_dist.diagnostics.coverage import Finding, numbered_lines
from keras_dist.diagnostics.explain import explain
from keras_dist.layout.rule_matching import matching_patterns
from keras_dist.sharding.shard_dim import MIN_SHARD_BYTES

_MAX_FINDINGS = 5


class LayoutMapWarning(UserWarning):
    """A layout map probably has a mistake.

    `warnings.simplefilter("ignore", keras_dist.LayoutMapWarning)` silences it.
    """


def check_rules(model: keras.Model, distribution: Any, strict: bool, others: Iterable[keras.Model] = ()) -> None:
    """Warns of the likely mistakes that `explain` finds in a layout map, or raises them as a ValueError if `strict`.

    Not of replicas of few bytes: FullyShardedDataParallel would not shard them either. Nor of rules that match what
    other models have: variables that the distribution has placed, and layers of `others`, which were checked before.
    """
    found = explain(model, distribution).findings
    findings = tuple(each for each in found if each.kind != "replicated" or each.bytes > MIN_SHARD_BYTES)
    if any(each.kind == "no match" for each in findings):
        in_use = _paths_in_use(distribution, others)
        findings = tuple(each for each in findings if each.kind != "no match" or _is_mistake(each, in_use[each.rule]))
    if not findings:
        return
    lines = numbered_lines(findings, _MAX_FINDINGS, "keras_dist.explain(model, distribution).findings")
    text = f"{counted(len(findings), 'possible problem')} in the layout map for {model.name!r}:\n"
    text += "\n".join([*lines, "print(keras_dist.explain(model, distribution)) shows the layout of each variable."])
    if strict:
        raise ValueError(text)
    text += (
        " To make this an error, pass strict=True to the distribution. To silence it, call "
        "warnings.simplefilter('ignore', keras_dist.LayoutMapWarning)."
    )
    warn(text, LayoutMapWarning)


def _paths_in_use(distribution: Any, models: Iterable[keras.Model]) -> Mapping[str | None, set[str]]:
    """Returns, by the key of a rule, which variables that a distribution has placed it matches, and which layers."""
    paths = {variable.path for variable in variables_of(distribution)}
    layers = {path for model in models for path in layers_by_path(model)}
    paths |= {f"{layer}/{suffix}" for layer in layers for suffix in ("input", "output")}
    regexes = {pattern: re.compile(pattern) for pattern, _ in distribution.layout_rules() or ()}
    found = defaultdict(set)
    for path in paths:
        for pattern in matching_patterns(regexes, path):
            found[pattern].add(path)
    return found


def _is_mistake(unmatched: Finding, in_use: Set[str]) -> bool:
    """Whether a rule matches nothing at all, or else what another model has under a longer path, as if loaded anew."""
    return not in_use or any(path.endswith(f"/{shorter}") for path in in_use for shorter in unmatched.paths)

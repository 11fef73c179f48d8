"""Few rules for many weights: one for all paths that differ in numbers alone."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

from keras_dist.layout.layout_map import LayoutMap
from keras_dist.layout.rule_matching import strip_model_names
from keras_dist.layout.tensor_layout import Axes
from keras_dist.mesh.device_mesh import DeviceMesh

Rules = dict[str, Axes | None]
"""Axes by path; None for a path that no rule may match."""


def merged_layout_map(rules: Rules, mesh: DeviceMesh, model_name: str | None = None) -> LayoutMap:
    """Returns a layout map with few rules: one for paths that differ in numbers alone, if all have the same axes.

    Keras names the first layer of a kind without a number: 'block_0/rotary' and 'block_1/rotary_1' are alike, too.
    Paths may start with the name that Keras has given to a subclassed model, without number `model_name`. Other models
    of the class have other numbers, and one that is loaded from a file has paths without it.
    """
    axes_by_name: defaultdict[str, set[Axes | None]] = defaultdict(set)
    for path, axes in rules.items():
        axes_by_name[strip_model_names(path)].add(axes)
    model_start = re.compile(rf"{re.escape(model_name or '')}(_\d+)?/")

    def regex(path: str) -> str:
        name = strip_model_names(path)
        # Nested models that Keras named may have equal paths for different weights. Then these names tell them apart.
        is_one_rule = len(axes_by_name[name]) == 1
        start = model_start.match(name) if model_name and is_one_rule else None
        if start and name[start.end() :] not in axes_by_name:
            return f"({model_name}(_[0-9]+)?/)?{_escaped(name[start.end() :])}"
        return _escaped(name if is_one_rule else path)

    patterns = {regex(path): axes for path, axes in rules.items()}
    patterns = _merge_alike(patterns, lambda pattern: re.sub(r"\d+", "[0-9]+", pattern))
    layout_map = LayoutMap(mesh)
    for pattern, axes in _merge_alike(patterns, _without_numbers).items():
        if axes and (any(axes) or len(axes) > 1):  # a replicated kernel has a rule, too: it shows that this is intended
            layout_map[pattern] = axes
    return layout_map


def _escaped(path: str) -> str:
    return re.escape(path).replace(r"\-", "-")


def _merge_alike(patterns: Rules, form: Callable[[str], str]) -> Rules:
    """Joins the patterns that have one form and the same axes."""
    groups: defaultdict[str, Rules] = defaultdict(dict)
    for pattern, axes in patterns.items():
        groups[form(pattern)][pattern] = axes
    merged: Rules = {}
    for members in groups.values():
        names = zip(*(pattern.split("/") for pattern in members), strict=True)
        joined = {"/".join(map(_joined_names, names)): next(iter(members.values()))}
        merged |= joined if len(set(members.values())) == 1 else members
    return merged


def _joined_names(names: Sequence[str]) -> str:
    if len(set(names)) == 1:
        return names[0]
    stem = _without_numbers(names[0])
    if all(_without_numbers(name) == stem for name in names):
        return f"{stem}(_[0-9]+)?" if stem in names else f"{stem}_[0-9]+"
    return re.sub(r"\d+", "[0-9]+", names[0])


def _without_numbers(pattern: str) -> str:
    return re.sub(r"_(\d+|\[0-9\]\+)(?=/|$)", "", pattern)

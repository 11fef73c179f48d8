"""What of a coverage is probably not what was meant: rules that match nothing or do not fit, and large replicas.

Each finding has a message that ends in rules that can be pasted.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from keras_dist._report.units import bytes_text, percent_text
from keras_dist._report.variable_groups import group_variables, path_pattern
from keras_dist.diagnostics.coverage import SEVERAL_RULES, Coverage, CoveredVariable
from keras_dist.diagnostics.suggestions import (
    Group,
    Unmatched,
    assignment,
    fitting,
    looked_up,
    meant_by_unmatched_rules,
    regex_of,
)
from keras_dist.layout.derived_weights import base_weight_of
from keras_dist.layout.regex_index import PathIndex
from keras_dist.layout.rule_matching import matching, strip_model_names
from keras_dist.layout.tensor_layout import Axes, axis_tuple, layout_error

LARGE_PART = 0.02  # of the weights' bytes; more than that replicated is worth a word
_MOST_PATHS = 8  # that a rule without a match may have meant
_MOST_REPLICAS, _SMALL_PART = 5, 0.002  # what is named of it: so many groups, and none that is smaller


@dataclass(frozen=True)
class Finding:
    """Something that is probably not what was meant.

    Attributes:
        kind: `"does not fit"` (a rule and a variable), `"several rules"` (match a path), `"random state"` (a rule that
            shards one), `"no match"` (of a rule), `"shadowed"` (a rule whose paths others take) or `"replicated"`.
        message: the rule of the house, what came, where, and the way out.
        bytes: of the variables that it is about, each counted once.
        paths: of these variables; where a rule matches nothing, the first of those that it may have meant.
        rule: the key of the layout map that it is about, if it is about one.
    """

    kind: str
    message: str
    bytes: int
    paths: tuple[str, ...]
    rule: str | None


def findings_of(coverage: Coverage) -> tuple[Finding, ...]:
    """Returns what of a coverage is probably not what was meant.

    Args:
        coverage: what `keras_dist.explain` returns.

    Returns:
        What cannot be laid out first, then rules that lay nothing out, then what is replicated; each with most bytes
        first.
    """
    unmatched = list(meant_by_unmatched_rules(coverage))
    found = (
        _misfits(coverage),
        _several_rules(coverage),
        _random_states(coverage),
        _unmatched_rules(coverage, unmatched),
        _shadowed_rules(coverage),
        _replicas(coverage, unmatched),
    )
    return tuple(each for findings in found for each in sorted(findings, key=lambda finding: -finding.bytes))


# ---------------------------------------------------------------------------------- variables that cannot be laid out


def _misfits(coverage: Coverage) -> Iterator[Finding]:
    rules, groups = dict(coverage.rules), defaultdict(list)
    for v in looked_up(coverage):
        if not v.fits and v.why != SEVERAL_RULES and not _is_random_state(v):
            groups[v.rule, v.shape, v.why, _lora_factor(v)].append(v)
    for (pattern, shape, why, lora_factor), group in groups.items():
        if pattern not in rules or not layout_error(rules[pattern].axes, shape, coverage.mesh.axis_sizes):
            yield _finding("does not fit", f"The distribution must lay out {_named(group)}: {why}", group, pattern)
            continue
        wanted, sizes = rules[pattern].axes, coverage.mesh.axis_sizes
        # The first factor has the first dims of its weight, the second one the last dim.
        by_factor = {"a": (*wanted[:-1], None), "b": (None, *wanted[-1:])}
        axes = by_factor.get(lora_factor, wanted)
        if layout_error(axes, shape, sizes):
            axes = fitting(wanted, shape, sizes)
        problem = layout_error(wanted, shape, sizes)
        swaps = len(shape) == 2 and any(axes) and axes == wanted[::-1]
        yield _finding(
            "does not fit",
            f"A rule must fit what it matches. Received: {pattern!r}, {wanted}, which matches {_named(group)} (shape "
            f"{shape}{', a LoRA factor of its layer' if lora_factor else ''}): {problem} "
            f"{'Swapping the axes fits' if swaps else 'This fits'}: {_own_rule(coverage, pattern, group, axes)}.",
            group,
            pattern,
        )


def _several_rules(coverage: Coverage) -> Iterator[Finding]:
    undecided = [v for v in looked_up(coverage) if v.why == SEVERAL_RULES]
    if not undecided:
        return
    sizes, rules = coverage.mesh.axis_sizes, dict(coverage.rules)
    index = PathIndex({pattern: re.compile(pattern) for pattern in rules})
    for group in group_variables(undecided):
        patterns = matching(index, group[0].path)
        axes = next((rules[p].axes for p in patterns if not layout_error(rules[p].axes, group[0].shape, sizes)), ())
        keys = "; ".join(assignment(v.path, axes) for v in group[:3]) + "; ..." * (len(group) > 3)
        yield _finding(
            "several rules",
            f"One rule may match a path. Received: {_named(group)}, which {patterns} match. Narrow the regexes, or "
            f"add the paths themselves as keys, which win: {keys}.",
            group,
            None,
        )


def _random_states(coverage: Coverage) -> Iterator[Finding]:
    sharding, groups = {rule.pattern for rule in coverage.rules if any(rule.layout.axes)}, defaultdict(list)
    for v in looked_up(coverage):
        if _is_random_state(v) and v.rule in sharding:
            groups[v.rule].append(v)
    for pattern, group in groups.items():
        yield _finding(
            "random state",
            "The state of a random generator must stay whole, so that every device draws the same numbers. Received: "
            f"rule {pattern!r}, which matches {_named(group)}. Replicate it: "
            f"{_own_rule(coverage, pattern, group, (None,))}.",
            group,
            pattern,
        )


def _own_rule(coverage: Coverage, pattern: str, group: Group, axes: Axes) -> str:
    """Rules by which some of the variables that a rule matches get other axes, and the others keep theirs."""
    in_group = {v.path for v in group}
    others = [v for v in looked_up(coverage) if v.rule == pattern and v.path not in in_group]
    if not others:
        return f"{assignment(pattern, axes)} in its place"
    own = assignment(regex_of(coverage, group), axes)
    if coverage.first_match_wins:
        return f"{own} before it"
    if len(in_group) == 1:
        # A key that is the whole path wins over every regex that matches the whole path.
        path = group[0].path if re.fullmatch(pattern, group[0].path) else strip_model_names(group[0].path)
        return f"{assignment(path, axes)}, since a key that is the path itself wins"
    wanted = next(rule.layout.axes for rule in coverage.rules if rule.pattern == pattern)
    kept = group_variables(v for v in others if v.fits)
    if len(kept) > 3:
        return f"{own}, and narrow {pattern!r} so that it does not match these"
    return f"{'; '.join([own, *(assignment(regex_of(coverage, each), wanted) for each in kept)])} in its place"


def _is_random_state(variable: CoveredVariable) -> bool:
    return variable.path.endswith("seed_generator_state")


def _lora_factor(variable: CoveredVariable) -> str:
    """Which of the two factors that LoRA adds to a weight a variable is, `"a"` or `"b"`; else `""`."""
    name = variable.path.rpartition("/")[2]
    return name[-1] if re.fullmatch(r"lora_\w+_[ab]", name) else ""


# ----------------------------------------------------------------------------------- rules that lay out nothing


def _unmatched_rules(coverage: Coverage, unmatched: Sequence[Unmatched]) -> Iterator[Finding]:
    for pattern, group, way_out in unmatched:
        message = "A rule must match a variable, or the output of a layer. "
        message += f"Received: {pattern!r}, which matches nothing in {coverage.model!r}. {way_out}"
        paths = tuple(v.path for v in group[:_MOST_PATHS])
        yield Finding("no match", message, _whole_bytes(group), paths, pattern)


def _shadowed_rules(coverage: Coverage) -> Iterator[Finding]:
    paths = {path for v in looked_up(coverage) for path in (v.path, strip_model_names(v.path))}
    for pattern, takers in coverage.unused.items():
        if not takers:
            continue
        taken = ", ".join(f"{count} by {taker!r}" for taker, count in Counter(takers).most_common(3))
        more = f" and {len(takers) - 3} more rules" * (len(takers) > 3)
        before = [taker for taker in takers if taker not in paths]
        way_out = (
            f"Put it before {before[0]!r}, or delete it"
            if coverage.first_match_wins and before
            else "A key that is the path itself wins: delete these keys, or this rule"
        )
        yield Finding(
            "shadowed",
            f"A rule must lay something out. Received: {pattern!r}, all of whose paths are taken: {taken}{more}. "
            f"{way_out}.",
            0,
            (),
            pattern,
        )


# ------------------------------------------------------------------------------------------------------- replicas


def _replicas(coverage: Coverage, unmatched: Sequence[Unmatched]) -> Iterator[Finding]:
    weights = [v for v in coverage.variables if v.part == "weights"]
    # What a rule replicates is meant to be whole; vectors, biases and scales, are so in every recipe, and what belongs
    # to another weight lies as that does.
    replicating = {rule.pattern for rule in coverage.rules if not any(rule.layout.axes)}
    candidates = [v for v in weights if v.fits and len(v.shape) > 1 and v.rule not in replicating]
    # For what an unmatched rule is thought to mean there is a suggestion already.
    suggested = {v.path for _, group, _ in unmatched for v in group}
    candidates = [v for v in candidates if base_weight_of(v.path) is None and v.path not in suggested]
    total, sizes = _whole_bytes(weights), coverage.mesh.axis_sizes

    def over(axis: str) -> list[CoveredVariable]:
        return [v for v in candidates if axis not in _names(v.axes)]

    # An axis of which no rule speaks is not for rules to use: ready distributions shard over it what rules leave.
    for_variables = [rule for rule in coverage.rules if not rule.pattern.endswith(("/output", "/input"))]
    meant = {name for rule in for_variables for name in _names(rule.layout.axes)}
    axes = [axis for axis, size in sizes.items() if size > 1 and axis in meant]
    axes = [axis for axis in axes if _whole_bytes(over(axis)) > LARGE_PART * total]
    if not axes:
        return
    whole = [v for v in candidates if not set(axes) <= set(_names(v.axes))]
    groups = sorted(group_variables(whole), key=_whole_bytes, reverse=True)[:_MOST_REPLICAS]
    groups = groups[:1] + [group for group in groups[1:] if _whole_bytes(group) > _SMALL_PART * total]
    named = " and ".join(f"{axis!r} (size {sizes[axis]})" for axis in axes)
    held = _whole_bytes(whole)
    yield _finding(
        "replicated",
        f"Weights are meant to be sharded over {'axis' if len(axes) == 1 else 'axes'} {named}, since others are. "
        f"Received: {percent_text(held / total)} of their bytes ({bytes_text(held)}) replicated over "
        f"{'it' if len(axes) == 1 else 'one of them or more'}, the largest of them "
        f"{'; '.join(f'{_named(group)}: {_way_to_shard(coverage, group, axes)}' for group in groups)}. "
        "What is meant to be whole needs a rule that says so, with axes of None only.",
        [v for group in groups for v in group],
        None,
    )


def _names(axes: Axes) -> tuple[str, ...]:
    return tuple(name for entry in axes for name in axis_tuple(entry))


def _way_to_shard(coverage: Coverage, group: Group, meant: Sequence[str]) -> str:
    first = group[0]
    figures = f"{len(group)} x {first.shape}" if len(group) > 1 else f"{first.shape}"
    figures += f", {bytes_text(_whole_bytes(group))}"
    by_rule = next((rule.layout.axes for rule in coverage.rules if rule.pattern == first.rule), ())
    axes = before = (*by_rule, *[None] * (len(first.shape) - len(by_rule)))
    for axis in meant:
        if axis not in _names(axes):
            axes = _sharded_over(axis, axes, first, coverage.mesh.axis_sizes)
    if axes == before:
        return f"{figures}, none of whose dims it divides"
    in_place = f" in place of {first.rule!r}" if first.rule is not None else ""
    return f"{figures}, {assignment(regex_of(coverage, group), axes)}{in_place}"


def _sharded_over(axis: str, axes: Axes, variable: CoveredVariable, sizes: Mapping[str, int]) -> Axes:
    """Axes with one more: over the largest dim that it divides, of a matrix the last one first; else as they are."""
    shape = variable.shape

    def with_axis(dim: int) -> Axes:
        entry = (*axis_tuple(axes[dim]), axis)
        return (*axes[:dim], entry if len(entry) > 1 else axis, *axes[dim + 1 :])

    dims = [dim for dim in range(len(shape)) if not layout_error(with_axis(dim), shape, sizes)]
    is_matrix = len(shape) == 2 and variable.path.endswith("kernel")
    best = max(dims, key=lambda dim: (not axes[dim], is_matrix and dim, shape[dim], dim), default=None)
    return axes if best is None else with_axis(best)


# --------------------------------------------------------------------------------------------------------- words


def _whole_bytes(group: Group) -> int:
    return sum(v.whole_bytes for v in group)


def _named(group: Group) -> str:
    return f"'{path_pattern([v.path for v in group])}'"


def _finding(kind: str, message: str, group: Group, rule: str | None) -> Finding:
    return Finding(kind, message, _whole_bytes(group), tuple(v.path for v in group), rule)

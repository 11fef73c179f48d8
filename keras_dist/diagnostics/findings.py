"""Likely mistakes in a layout map, each with its fix: rules that can be pasted."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from keras_dist._keras.internals import is_random_state
from keras_dist._report.units import bytes_text, counted, percent_text
from keras_dist._report.variable_groups import group_variables, path_pattern
from keras_dist.diagnostics.coverage import SEVERAL_RULES, Coverage, CoveredVariable, Finding
from keras_dist.diagnostics.experts import Experts, experts_by_path
from keras_dist.diagnostics.suggestions import (
    Group,
    Unmatched,
    assignment,
    axes_with,
    can_shard,
    regex_for,
    suggest_for_unmatched_rules,
    variables_with_rules,
)
from keras_dist.layout.rule_matching import full_matches, is_for_activations, matching_patterns, strip_model_names
from keras_dist.layout.tensor_layout import Axes, axis_names, axis_tuple, layout_error, nearest_fitting_axes

_LARGE_FRACTION = 0.02  # of the bytes of all weights; replicas that take more are reported
_SMALL_FRACTION = 0.002  # groups that take less are not listed
_MAX_REPLICAS = 5  # groups listed
_MAX_PATHS = 8  # listed for a rule without a match
_ENTIRE_PATHS_FIRST = (
    "A match of the entire path takes precedence over one without the name that Keras generated for the model"
)
_DERIVE_RULES = "keras_dist.tensor_parallel_layout_map(model, device_mesh)"


def find_mistakes(coverage: Coverage) -> tuple[Finding, ...]:
    """Returns what prevents a layout, then rules without effect, replicas and idle axes; of each, most bytes first."""
    unmatched = list(suggest_for_unmatched_rules(coverage))
    kinds = (
        _misfits(coverage),
        _several_rules(coverage),
        _random_states(coverage),
        _unmatched_rules(coverage, unmatched),
        _shadowed_rules(coverage),
        _replicas(coverage, unmatched),
        _idle_axes(coverage),
    )
    return tuple(each for findings in kinds for each in sorted(findings, key=lambda finding: -finding.bytes))


def _misfits(coverage: Coverage) -> Iterator[Finding]:
    rules, sizes, groups = dict(coverage.rules), coverage.mesh.axis_sizes, defaultdict(list)
    for v in variables_with_rules(coverage):
        if not v.fits and v.why != SEVERAL_RULES and not is_random_state(v.path):
            groups[v.rule, v.shape, v.why, _lora_factor(v)].append(v)
    for (pattern, shape, why, lora_factor), group in groups.items():
        problem = layout_error(rules[pattern].axes, shape, sizes) if pattern in rules else None
        if problem is None:
            yield _finding("does not fit", f"The distribution cannot shard {_named(group)}: {why}", group, pattern)
            continue
        wanted = rules[pattern].axes
        # LoRA's first factor has the first dims of the weight, the second factor the last dim.
        by_factor = {"a": (*wanted[:-1], None), "b": (None, *wanted[-1:])}
        axes = by_factor.get(lora_factor, wanted)
        if layout_error(axes, shape, sizes):
            axes = nearest_fitting_axes(wanted, shape, sizes)
        is_swap = len(shape) == 2 and any(axes) and axes == wanted[::-1]
        yield _finding(
            "does not fit",
            f"Rule {pattern!r}, {wanted}, does not fit {_named(group)} (shape {shape}"
            f"{', a LoRA factor' if lora_factor else ''}): {problem}{' The swapped axes fit.' * is_swap} "
            f"{_fix_for_group(coverage, pattern, group, axes)}",
            group,
            pattern,
        )


def _several_rules(coverage: Coverage) -> Iterator[Finding]:
    sizes, rules = coverage.mesh.axis_sizes, dict(coverage.rules)
    regexes = {pattern: re.compile(pattern) for pattern in rules}
    for group in group_variables(v for v in variables_with_rules(coverage) if v.why == SEVERAL_RULES):
        patterns = matching_patterns(regexes, group[0].path)
        axes = next((rules[p].axes for p in patterns if not layout_error(rules[p].axes, group[0].shape, sizes)), ())
        keys = [assignment(v.path, axes) for v in group[:3]] + ["..."] * (len(group) > 3)
        yield _finding(
            "several rules",
            f"Several rules match {_named(group)}: {patterns}. Narrow the regexes, or add the paths themselves as "
            f"keys, which take precedence over regexes:{_code(keys)}",
            group,
            None,
        )


def _random_states(coverage: Coverage) -> Iterator[Finding]:
    sharding, groups = {rule.pattern for rule in coverage.rules if any(rule.layout.axes)}, defaultdict(list)
    for v in variables_with_rules(coverage):
        if is_random_state(v.path) and v.rule in sharding:
            groups[v.rule].append(v)
    for pattern, group in groups.items():
        yield _finding(
            "random state",
            f"Rule {pattern!r} shards {_named(group)}, the state of a random generator. It must be replicated, so that "
            f"every device draws the same numbers. {_fix_for_group(coverage, pattern, group, (None,))}",
            group,
            pattern,
        )


def _fix_for_group(coverage: Coverage, pattern: str, group: Group, axes: Axes) -> str:
    """Returns rules that give some of the variables that a rule matches other axes, and keep those of the others."""
    in_group = {v.path for v in group}
    others = [v for v in variables_with_rules(coverage) if v.rule == pattern and v.path not in in_group]
    if not others:
        return f"Replace the rule with:{_code([assignment(pattern, axes)])}"
    rule = assignment(regex_for(coverage, group), axes)
    if coverage.first_match_wins:
        return f"Add before it:{_code([rule])}"
    if len(in_group) == 1:
        # Only a key that is the entire path takes precedence over a regex that matches the entire path.
        path = group[0].path if re.fullmatch(pattern, group[0].path) else strip_model_names(group[0].path)
        return f"Add the path as a key, which takes precedence over regexes:{_code([assignment(path, axes)])}"
    wanted = next(rule.layout.axes for rule in coverage.rules if rule.pattern == pattern)
    # Weights that have the layout of their base weight will have its new layout, and need no rule.
    rule_of = {v.path: v.rule for v in coverage.variables}
    kept = group_variables(v for v in others if v.fits and (v.base is None or rule_of.get(v.base) != v.rule))
    if len(kept) > 3:
        return f"Narrow the rule so that it does not match these, and add:{_code([rule])}"
    rules = [rule, *(assignment(regex_for(coverage, each), wanted) for each in kept)]
    return f"Replace the rule with:{_code(rules)}"


def _lora_factor(variable: CoveredVariable) -> str:
    """Returns `"a"` or `"b"` for the first or second LoRA factor, else `""`."""
    name = variable.path.rpartition("/")[2]
    return name[-1] if re.fullmatch(r"lora_\w+_[ab]", name) else ""


def _unmatched_rules(coverage: Coverage, unmatched: Sequence[Unmatched]) -> Iterator[Finding]:
    for pattern, group, fix in unmatched:
        what = "layer" if is_for_activations(pattern) else "variable"
        message = f"Layout map rule {pattern!r} matches no {what} of {coverage.model!r}. {fix}"
        yield Finding("no match", message, _whole_bytes(group), tuple(v.path for v in group[:_MAX_PATHS]), pattern)


def _shadowed_rules(coverage: Coverage) -> Iterator[Finding]:
    paths = {path for v in variables_with_rules(coverage) for path in (v.path, strip_model_names(v.path))}
    for pattern, takers in coverage.unused.items():
        if not takers:
            continue
        counts = ", ".join(f"{count} by {taker!r}" for taker, count in Counter(takers).most_common(3))
        more = f" and {counted(len(takers) - 3, 'more rule')}" * (len(takers) > 3)
        others = [taker for taker in takers if taker not in paths]
        if not others:
            fix = "Keys that are paths take precedence over regexes: delete these keys, or this rule."
        elif coverage.first_match_wins:
            fix = f"Move it before {others[0]!r}, or delete it."
        else:
            fix = f"{_ENTIRE_PATHS_FIRST}: narrow {others[0]!r}, or delete this rule."
        message = (
            f"Layout map rule {pattern!r} has no effect, because other rules take precedence for all paths that it "
            f"matches: {counts}{more}. {fix}"
        )
        yield _finding("shadowed", message, (), pattern)
    yield from _partly_shadowed_rules(coverage)


def _partly_shadowed_rules(coverage: Coverage) -> Iterator[Finding]:
    """Yields rules that apply to some paths, but not to others that they match without automatic model names."""
    rules, losses = dict(coverage.rules), defaultdict(list)
    regexes = {pattern: re.compile(pattern) for pattern in rules}
    for v in variables_with_rules(coverage):
        stripped = strip_model_names(v.path)
        if coverage.first_match_wins or v.rule is None or stripped == v.path or v.base is not None:
            continue
        losers = set(full_matches(regexes, stripped)).difference(full_matches(regexes, v.path), coverage.unused)
        # A rule that spells the model's name is meant to take precedence.
        if losers and regexes[v.rule].fullmatch(stripped):
            for pattern in losers:
                if rules[pattern].axes != rules[v.rule].axes:
                    losses[pattern, v.rule].append(v)
    for (pattern, taker), group in losses.items():
        yield _finding(
            "shadowed",
            f"Layout map rule {pattern!r} has no effect on {_named(group)}, which {taker!r} matches, too. "
            f"{_ENTIRE_PATHS_FIRST}. In a functional model, or one that is loaded from a file, paths lack that name, "
            "and two rules for one path are an error. Narrow one of the two, or create the map with "
            "LayoutMap.from_rules, in which the first match wins.",
            group,
            pattern,
        )


def _replicas(coverage: Coverage, unmatched: Sequence[Unmatched]) -> Iterator[Finding]:
    weights = [v for v in coverage.variables if v.part == "weights"]
    # Not reported: weights that a rule replicates on purpose, vectors (biases and scales, which every recipe
    # replicates), weights that have the layout of another weight, and those that a rule without a match is meant for.
    replicating = {rule.pattern for rule in coverage.rules if not any(rule.layout.axes)}
    suggested = {v.path for _, group, _ in unmatched for v in group}
    candidates = [v for v in weights if v.fits and len(v.shape) > 1 and v.base is None]
    experts = experts_by_path(coverage)
    # All experts of a layer are reported together, and their router is best replicated.
    suggested = suggested.difference(experts) | {each.router.path for each in experts.values()}
    candidates = [v for v in candidates if v.rule not in replicating and v.path not in suggested]
    total, sizes = _whole_bytes(weights), coverage.mesh.axis_sizes
    # Only axes that a rule for variables uses: the others are for the batch, or for a distribution to shard over.
    for_variables = [rule for rule in coverage.rules if not is_for_activations(rule.pattern)]
    used = {name for rule in for_variables for name in axis_names(rule.layout.axes)}
    axes = [axis for axis, size in sizes.items() if size > 1 and axis in used]

    def is_replica(v: CoveredVariable, axis: str) -> bool:
        return axis not in axis_names(v.axes) and can_shard(v, axis, coverage, experts)

    replicated_bytes = {axis: _whole_bytes(v for v in candidates if is_replica(v, axis)) for axis in axes}
    axes = [axis for axis in axes if replicated_bytes[axis] > _LARGE_FRACTION * total]
    if not axes:
        return
    replicas = [v for v in candidates if any(is_replica(v, axis) for axis in axes)]
    size = _whole_bytes(replicas)
    groups = sorted(group_variables(replicas), key=_whole_bytes, reverse=True)[:_MAX_REPLICAS]
    groups = groups[:1] + [group for group in groups[1:] if _whole_bytes(group) > _SMALL_FRACTION * total]
    named = " or ".join(f"{axis!r} (size {sizes[axis]})" for axis in axes)
    sharding = {axis for weight in weights for axis in axis_names(weight.axes)}
    others = "other weights are sharded" if sharding.issuperset(axes) else "the layout map has rules that shard"
    yield _finding(
        "replicated",
        f"{percent_text(size / total)} of weight bytes ({bytes_text(size)}) are replicated over axis {named}, although "
        f"{others} over {'it' if len(axes) == 1 else 'them'}. The largest, with rules that fit:"
        f"{_code(_rule_for_replica(coverage, group, axes, experts) for group in groups)}"
        f"{''.join(_sharded_routers(coverage, replicas, experts, axes))}\n  {_DERIVE_RULES} derives rules that "
        "also keep communication low. To replicate a weight intentionally, give it a rule of only None.",
        [v for group in groups for v in group],
        None,
    )


def _idle_axes(coverage: Coverage) -> Iterator[Finding]:
    kind = coverage.distribution.lstrip("<").split()[0]
    batch = ""
    if kind == "ModelParallel" and coverage.batch_axes:
        axes = " and ".join(map(repr, coverage.batch_axes))
        batch = f": the batch is sharded over {axes}, and the argument batch_dim_name chooses another axis"
    for axis in coverage.idle_axes:
        size = coverage.mesh.axis_sizes[axis]
        empty = "" if coverage.rules or kind == "DataParallel" else "The layout map is empty: "
        yield _finding(
            "idle axis",
            f"{empty}{'m' if empty else 'M'}esh axis {axis!r} (size {size}) shards nothing, so the {size} devices "
            f"along it do the same work. Shard weights over it with layout map rules ({_DERIVE_RULES} derives them), "
            f"or give its devices to the batch axis{batch}.",
            (),
            None,
        )


def _sharded_routers(
    coverage: Coverage, replicas: Group, experts: Mapping[str, Experts], axes: Sequence[str]
) -> Iterator[str]:
    """Yields, for each rule that shards routers over an axis that replicates their experts, what to do."""
    for axis in axes:
        members = [v for v in replicas if v.path in experts and axis not in axis_names(v.axes)]
        routers, size = defaultdict(dict), sum(v.bytes for v in members)
        for router in (experts[v.path].router for v in members):
            if router.rule is not None and axis in axis_tuple(router.axes[1]):
                routers[router.rule][router.path] = router
        for pattern, by_path in routers.items():
            group = [*by_path.values()]
            yield (
                f"\n  Weights of experts are among them, although rule {pattern!r} shards their router {_named(group)} "
                f"over {axis!r}: they take {bytes_text(size)} on each device, and sharded over {axis!r} "
                f"{bytes_text(size // coverage.mesh.axis_sizes[axis])}. Replicate the router, whose sharding only adds "
                f"communication. {_fix_for_group(coverage, pattern, group, (None, None))}"
            )


def _rule_for_replica(
    coverage: Coverage, group: Group, wanted_axes: Sequence[str], experts: Mapping[str, Experts]
) -> str:
    first = group[0]
    size = f"{f'{len(group)} x ' * (len(group) > 1)}{first.shape}, {bytes_text(_whole_bytes(group))}"
    by_rule = next((rule.layout.axes for rule in coverage.rules if rule.pattern == first.rule), ())
    axes = before = (*by_rule, *[None] * (len(first.shape) - len(by_rule)))
    axes = axes_with(wanted_axes, axes, first, coverage, experts)
    if axes == before:
        return f"# {_named(group)}: {size}, no dim is divisible"
    replaced = f", replaces {first.rule!r}" if first.rule is not None else ""
    return f"{assignment(regex_for(coverage, group), axes)}  # {size}{replaced}"


def _whole_bytes(group: Iterable[CoveredVariable]) -> int:
    return sum(v.whole_bytes for v in group)


def _named(group: Group) -> str:
    return f"'{path_pattern([v.path for v in group])}'"


def _code(lines) -> str:
    return "".join(f"\n    {line}" for line in lines)


def _finding(kind: str, message: str, group: Group, rule: str | None) -> Finding:
    return Finding(kind, message, _whole_bytes(group), tuple(v.path for v in group), rule)

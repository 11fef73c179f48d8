"""Rules that a fix suggests: how they are written, and what rules without a match were probably meant to be."""

import contextlib
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches

from keras_dist._report.variable_groups import path_kind, path_regex
from keras_dist.diagnostics.coverage import Coverage, CoveredVariable
from keras_dist.diagnostics.experts import Experts, experts_by_path
from keras_dist.layout.rule_matching import full_matches, is_for_activations, strip_model_names
from keras_dist.layout.tensor_layout import Axes, axis_names, axis_tuple, layout_error, nearest_fitting_axes

Group = Sequence[CoveredVariable]
Unmatched = tuple[str, Group, str]  # a rule that matches no variable, the variables it was meant for, and the fix

_NAME_OF_HEAD = re.compile(r"(?:^|[^A-Za-z])(?:head|logits|unembed|unembedding|reverse_embeddings)(?![A-Za-z_])")
_WORD = re.compile(r"(?<!\\)[A-Za-z]{2,}")  # in a regex or a path


def variables_with_rules(coverage: Coverage) -> Iterator[CoveredVariable]:
    """Yields the variables that a layout map is asked for: all but optimizer state, which has its weight's layout."""
    return (v for v in coverage.variables if v.part != "optimizer")


def assignment(pattern: str, axes: Axes) -> str:
    return f"layout_map[{pattern!r}] = {axes}"


def regex_for(coverage: Coverage, group: Group) -> str:
    """Returns a regex for the paths of a group and no others, without automatic model names unless it needs them."""
    in_group = sorted({v.path for v in group})
    others = {v.path for v in variables_with_rules(coverage)}.difference(in_group)
    short, short_others = sorted(set(map(strip_model_names, in_group))), set(map(strip_model_names, others))
    if not short_others.isdisjoint(short):
        return path_regex(in_group, others)
    return path_regex(short, others | short_others)


def axes_with(
    names: Iterable[str], axes: Axes, variable: CoveredVariable, coverage: Coverage, experts: Mapping[str, Experts]
) -> Axes:
    """Returns axes that also use the axes `names`, where they divide a dim; those of the batch take the dims left.

    Expert axes take dim 0 of experts' weights only.
    """
    group, sizes = experts.get(variable.path), coverage.mesh.axis_sizes
    for name in sorted(names, key=lambda name: name in coverage.batch_axes):
        if name in axis_names(axes) or not can_shard(variable, name, coverage, experts):
            continue
        order = group.dims(variable, sizes[name], name in coverage.batch_axes) if group else ()
        axes = _with_axis(name, axes, variable, sizes, (0, 1, 2) if name in coverage.expert_axes else order)
    return axes


def can_shard(variable: CoveredVariable, axis: str, coverage: Coverage, experts: Mapping[str, Experts]) -> bool:
    """Whether a rule for a variable may use an axis: expert axes are for the weights of experts."""
    return axis not in coverage.expert_axes or variable.path in experts


def _with_axis(
    axis: str, axes: Axes, variable: CoveredVariable, sizes: Mapping[str, int], order: Sequence[int]
) -> Axes:
    """Returns axes that also use `axis`: on the first dim in `order`, the last dim of a matrix, or the largest dim."""
    shape = variable.shape

    def with_axis(dim: int) -> Axes:
        entry = (*axis_tuple(axes[dim]), axis)
        return (*axes[:dim], entry if len(entry) > 1 else axis, *axes[dim + 1 :])

    def preference(dim: int) -> tuple[int, ...]:
        return not axes[dim], -order.index(dim) if order else 0, is_matrix and dim, shape[dim], dim

    dims = [dim for dim in range(len(shape)) if not layout_error(with_axis(dim), shape, sizes)]
    is_matrix = len(shape) == 2 and variable.path.endswith("kernel")
    best = max(dims, key=preference, default=None)
    return axes if best is None else with_axis(best)


def suggest_for_unmatched_rules(coverage: Coverage) -> Iterator[Unmatched]:
    axes = {rule.pattern: rule.layout.axes for rule in coverage.rules}
    rules = [pattern for pattern, takers in coverage.unused.items() if not takers]
    if not rules:
        return
    paths, regexes, sizes, experts = _Paths(coverage), {}, coverage.mesh.axis_sizes, experts_by_path(coverage)
    globs = {rule: re.sub(r"(?<![.\])])\*", ".*", rule) for rule in rules}  # `block_*/kernel`
    corrected = {rule: _WORD.sub(lambda match: paths.closest_word(match[0]), rule) for rule in rules}
    # A model that is loaded from a file lacks the names of nested models that were built when they were called.
    shorter = [
        {rule: "/".join(rule.split("/")[start:]) for rule in rules if rule.count("/") > start} for start in (1, 2)
    ]
    rewritten = [paths.with_match(each) for each in (paths.with_prefix(rules), globs, corrected, *shorter)]
    for pattern in rules:
        is_activation = is_for_activations(pattern)
        better, found = next((each[pattern] for each in rewritten if pattern in each), (None, []))
        if better is None and not is_activation and (embedding := paths.tied_embedding(pattern)):
            yield pattern, embedding, _advice_on_tied_head(coverage, embedding, axes[pattern])
            continue
        if better is None and (found := paths.nearest(pattern, None if is_activation else len(axes[pattern]))):
            if found[0] not in regexes:  # many rules may resemble the same path
                group = paths.variables(found)
                regexes[found[0]] = regex_for(coverage, group) if group else path_regex(found)
            better = regexes[found[0]]
        group, wanted, taken = (), axes[pattern], better if better in axes else None
        if not taken and not coverage.first_match_wins and better not in found:  # a regex: several rules would match
            taken = next((v.rule for v in paths.variables(found) if v.rule is not None and v.base is None), None)
        if better is None:
            fix = "No path resembles it: print(keras_dist.explain(model)) lists the paths."
        elif taken and not is_activation:
            fix = (
                f"The path that resembles it most has the rule {taken!r} already: delete this rule, or correct its "
                "path. Optimizer state has the layout of its weight, and needs no rule."
            )
        else:
            group = paths.variables(found)
            if group and group[0].path in experts and len(wanted) != 3:
                wanted = axes_with(axis_names(wanted), (None,) * 3, group[0], coverage, experts)
            elif group and not is_activation and group[0].base is None:
                wanted = nearest_fitting_axes(wanted, group[0].shape, sizes)
            fix = f"Did you mean:\n    {assignment(better, wanted)}"
            start = pattern.removesuffix(better)
            if start.endswith("/") and len(start) > 1:
                fix += (
                    "\nKeras leaves out the names of models and layers around a layer where it loads them from a file. "
                    f"If that is so here, let the rule match both: '({start})?{better}'."
                )
            if _text_of_regex(pattern).replace("#", "") == _text_of_regex(better).replace("#", ""):
                fix += (
                    "\nKeras numbers layers that have no name, and counts on where a model is built or loaded again. "
                    "If this is one of them, give it a name, or call keras.utils.clear_session() before each build."
                )
        yield pattern, group, fix


def _advice_on_tied_head(coverage: Coverage, embedding: Group, axes: Axes) -> str:
    first = embedding[0]
    start = f"The model has no such head: it seems to use its embedding '{first.path}' as its head, too (tied weights)."
    if any(first.axes):
        return f"{start} The embedding is sharded already, by {first.why}: delete this rule."
    # As a head the embedding is transposed.
    wanted = nearest_fitting_axes(axes[::-1], first.shape, coverage.mesh.axis_sizes)
    return f"{start} Shard the embedding instead:\n    {assignment(regex_for(coverage, embedding), wanted)}"


class _Paths:
    """The paths that a layout map is asked for, without automatic model names, and ways to search them."""

    def __init__(self, coverage: Coverage):
        self._variables: dict[str, list[CoveredVariable]] = defaultdict(list)
        for v in variables_with_rules(coverage):
            self._variables[strip_model_names(v.path)].append(v)
        suffixes = {rule.pattern.rpartition("/")[2] for rule in coverage.rules} & {"output", "input"}
        activations = [f"{layer}/{suffix}" for layer in coverage.layers for suffix in sorted(suffixes)]
        self._paths = [*self._variables, *map(strip_model_names, activations)]
        self._kinds: dict[tuple, list[str]] = defaultdict(list)  # paths that differ only in numbers
        for path in self._paths:
            self._kinds[path_kind(path)].append(path)
        self._kinds_with_word: dict[str, list[list[str]]] = defaultdict(list)
        for paths in self._kinds.values():
            for word in set(_WORD.findall(paths[0])):
                self._kinds_with_word[word].append(paths)
        words = sorted(self._kinds_with_word)
        self._words, self._word_by_letters = words, {"".join(sorted(word)): word for word in words}
        self.closest_word = functools.cache(self._closest_word)
        self._nearest: dict[tuple, list[str]] = {}

    def variables(self, paths: Sequence[str]) -> Group:
        return [v for path in paths for v in self._variables.get(path, ())]

    def with_prefix(self, rules: Sequence[str]) -> dict[str, str]:
        """Returns the rules that match the end of paths, with the missing prefix added."""
        regexes, prefixes = {rule: re.compile(rule) for rule in rules}, defaultdict(dict)
        for path in self._paths:
            start = path.find("/") + 1
            while start:
                for rule in full_matches(regexes, path[start:]):
                    prefixes[rule].setdefault(path, path[:start])
                start = path.find("/", start) + 1
        return {rule: _add_prefix(rule, set(found.values())) for rule, found in prefixes.items()}

    def with_match(self, rewritten: Mapping[str, str]) -> dict[str, tuple[str, list[str]]]:
        """Returns the rules that match once they are rewritten: the new pattern, and the paths that it matches."""
        regexes = {}
        for rule, better in rewritten.items():
            with contextlib.suppress(re.error):  # flags, for example, must be at the start of a regex
                if better != rule:
                    regexes[rule] = re.compile(better)
        found: dict[str, list[str]] = defaultdict(list)
        for path in self._paths:
            for rule in full_matches(regexes, path):
                found[rule].append(path)
        return {rule: (rewritten[rule], paths) for rule, paths in found.items()}

    def _closest_word(self, word: str) -> str:
        close = [word] if word in self._kinds_with_word else get_close_matches(word, self._words, 1, 0.7)
        # A short word with two letters swapped has a low ratio: it is found by its letters.
        return close[0] if close else self._word_by_letters.get("".join(sorted(word)), word)

    def tied_embedding(self, rule: str) -> Group:
        """Returns the embedding of a model without a head, if the rule is for a head."""
        if not _NAME_OF_HEAD.search(rule) or any(map(_NAME_OF_HEAD.search, self._paths)):
            return ()
        tables = [v for v in self.variables(self._paths) if v.path.endswith("embeddings") and len(v.shape) == 2]
        return [max(tables, key=lambda v: v.shape[0])] if tables else ()

    def nearest(self, rule: str, dims: int | None) -> list[str]:
        """Returns paths most similar to a rule (to its end, if it starts with `.*`); they differ only in numbers.

        Of several similar paths, that of a variable with as many dims as the rule's layout comes first.
        """
        text = _text_of_regex(rule)
        segments = text.count("/") + 1 if re.match(r"\(?\.\*", rule) else 0  # 0: all
        words = [word for word in _WORD.findall(rule) if word in self._kinds_with_word]
        word = min(words, key=lambda word: len(self._kinds_with_word[word]), default=None)
        key = text, segments, word, dims
        if key not in self._nearest:
            candidates: dict[str, list[str]] = {}
            for paths in self._kinds.values() if word is None else self._kinds_with_word[word]:
                candidates.setdefault(re.sub(r"_?\d+", "#", "/".join(paths[0].split("/")[-segments:])), paths)
            is_rare = word is not None and 2 * len(self._kinds_with_word[word]) <= len(self._kinds)
            close = [candidates[each] for each in get_close_matches(text, candidates, 3, 0.3 if is_rare else 0.6)]
            fitting = [paths for paths in close if any(len(v.shape) == dims for v in self.variables(paths[:1]))]
            self._nearest[key] = next(iter(fitting + close), [])
        return self._nearest[key]


def _add_prefix(rule: str, prefixes: set[str]) -> str:
    rule = f"(?:{rule})" if "|" in rule else rule
    is_one_kind = len(set(map(path_kind, prefixes))) == 1
    return f"{path_regex(sorted(prefixes)) if is_one_kind else '.*/'}{rule}"


def _text_of_regex(regex: str) -> str:
    """Returns a text similar to the paths that a regex matches, with "#" for numbers."""
    text = re.sub(r"_?(\[0-9\]|\\d|\d)[+*]?", "#", regex)
    text = re.sub(r"\((?:\?:)?([^()|]*)\|[^()]*\)", r"\1", text)
    return re.sub(r"\.[*+?]|\\|[\^$()\[\]?]", "", text).strip("/")

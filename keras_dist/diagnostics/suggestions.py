"""Which rules would do what was probably meant."""

import contextlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from keras_dist._report.variable_groups import path_kind, path_regex
from keras_dist.diagnostics.coverage import Coverage, CoveredVariable
from keras_dist.diagnostics.nearest import Nearest
from keras_dist.layout.regex_index import PathIndex
from keras_dist.layout.rule_matching import strip_model_names
from keras_dist.layout.tensor_layout import Axes, axis_tuple

Group = Sequence[CoveredVariable]
Unmatched = tuple[str, Group, str]  # a rule, what it may have meant, and the way out


def looked_up(coverage: Coverage) -> Iterator[CoveredVariable]:
    """Yields the variables that are looked up in a layout map; slots of the optimizer follow their weights."""
    return (v for v in coverage.variables if v.part != "optimizer")


def assignment(pattern: str, axes: Axes) -> str:
    """Returns the line of Python that adds a rule.

    Example:

    >>> print(assignment("dense/kernel", (None, "model")))
    layout_map['dense/kernel'] = (None, 'model')
    """
    return f"layout_map[{pattern!r}] = {axes}"


def regex_of(coverage: Coverage, group: Group) -> str:
    """Returns a regex that matches the paths of variables that are alike, and no other path of a coverage.

    Names that Keras gave models by itself are left out, where that is clear enough.
    """
    in_group = sorted({v.path for v in group})
    others = {v.path for v in looked_up(coverage)}.difference(in_group)
    short, short_others = sorted(set(map(strip_model_names, in_group))), set(map(strip_model_names, others))
    if not short_others.isdisjoint(short):
        return path_regex(in_group, others)
    return path_regex(short, others | short_others)


def fitting(axes: Axes, shape: Sequence[int], sizes: dict[str, int]) -> Axes:
    """Returns the axes nearest to those of a rule that a shape can have.

    Args:
        axes: those of the rule.
        shape: the shape of a variable.
        sizes: the sizes of the mesh's axes.

    Returns:
        Axes that keep as much of it sharded as can be; of these, with as many dims as can be as they were; of these,
        over the largest dims.

    Example:

    >>> fitting(("model", None), (6, 16), {"model": 4})
    (None, 'model')
    >>> fitting((None, None, "model"), (16, 32), {"model": 4})
    (None, 'model')
    """
    rank = len(shape)
    wanted = axes[len(axes) - rank :] if len(axes) > rank else (*axes, *[None] * (rank - len(axes)))
    entries = [entry for entry in axes if entry is not None]

    def parts(entry) -> int:
        return math.prod(sizes[name] for name in axis_tuple(entry))

    def merit(candidate: Axes) -> tuple[int, int, int]:
        kept = math.prod(map(parts, candidate))
        same = sum(one == other for one, other in zip(candidate, wanted, strict=True))
        return kept, same, math.prod(size for size, entry in zip(shape, candidate, strict=True) if entry)

    ways = set(itertools.permutations([*entries, *[None] * rank], rank))
    fits = [way for way in ways if all(size % parts(entry) == 0 for size, entry in zip(shape, way, strict=True))]
    return max(sorted(fits, key=str), key=merit)


# ------------------------------------------------------------------------------------------- rules that match nothing

_NAME_OF_A_HEAD = re.compile(r"(?:^|[^A-Za-z])(?:head|logits|unembed|unembedding|reverse_embeddings)(?![A-Za-z_])")
_WORD = re.compile(r"(?<!\\)[A-Za-z]{2,}")  # in a regex or a path


def meant_by_unmatched_rules(coverage: Coverage) -> Iterator[Unmatched]:
    """Yields each rule that matches nothing, the variables that it may have meant, and a sentence with the way out."""
    axes = {rule.pattern: rule.layout.axes for rule in coverage.rules}
    rules = [pattern for pattern, takers in coverage.unused.items() if not takers]
    if not rules:
        return
    paths, regexes = _Paths(coverage), {}
    prefixed, corrected = paths.with_prefix(rules), paths.with_words_corrected(rules)
    sizes = coverage.mesh.axis_sizes
    for pattern in rules:
        of_output = pattern.endswith(("/output", "/input"))

        def rule_for(better: str, group: Group, pattern=pattern, of_output=of_output) -> str:
            wanted = axes[pattern]
            return assignment(better, wanted if of_output or not group else fitting(wanted, group[0].shape, sizes))

        better, found = prefixed.get(pattern) or corrected.get(pattern) or (None, [])
        group = paths.variables(found)
        if better is not None:
            yield pattern, group, f"Did you mean {rule_for(better, group)}?"
        elif not of_output and (embedding := paths.tied_embedding(pattern)):
            yield pattern, embedding, _tied(coverage, embedding, axes[pattern])
        elif found := paths.nearest(pattern):
            group = paths.variables(found)
            if found[0] not in regexes:  # many rules may be like one path
                regexes[found[0]] = regex_of(coverage, group) if group else path_regex(found)
            better = regexes[found[0]]
            yield pattern, group, f"Did you mean {rule_for(better, group)}?"
        else:
            yield pattern, (), "No path is like it; print(keras_dist.explain(model)) lists them. Delete the rule."


def _tied(coverage: Coverage, embedding: Group, axes: Axes) -> str:
    first = embedding[0]
    start = f"The model has no such head: it seems to use its embedding, '{first.path}', as its head too (tied). "
    if any(first.axes):
        return f"{start}That is sharded already, by {first.why}; delete this rule."
    # The head is the embedding turned over.
    wanted = fitting(axes[::-1], first.shape, coverage.mesh.axis_sizes)
    return f"{start}Shard that: {assignment(regex_of(coverage, embedding), wanted)}."


class _Paths:
    """The paths that rules are looked up for, without the names that Keras gave models by itself."""

    def __init__(self, coverage: Coverage):
        self._variables: dict[str, list[CoveredVariable]] = defaultdict(list)
        for v in looked_up(coverage):
            self._variables[strip_model_names(v.path)].append(v)
        ends = {rule.pattern.rpartition("/")[2] for rule in coverage.rules} & {"output", "input"}
        outputs = [strip_model_names(f"{layer}/{end}") for layer in coverage.layers for end in sorted(ends)]
        self._paths = [*self._variables, *outputs]
        self._kinds: dict[tuple, list[str]] = defaultdict(list)
        for path in self._paths:
            self._kinds[path_kind(path)].append(path)
        self._with_word: dict[str, list[list[str]]] = defaultdict(list)
        for paths in self._kinds.values():
            for word in set(_WORD.findall(paths[0])):
                self._with_word[word].append(paths)
        self._nearest: dict[tuple, tuple[Nearest, dict[str, list[str]]]] = {}

    def variables(self, paths: Sequence[str]) -> Group:
        """Returns the variables of paths."""
        return [v for path in paths for v in self._variables.get(path, ())]

    def with_prefix(self, rules: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
        """Returns rules that match the end of paths: with what is missing before it, and with the paths."""
        index, found = PathIndex({rule: re.compile(rule) for rule in rules}), defaultdict(dict)
        for path in self._paths:
            start = path.find("/") + 1
            while start:
                for rule in index.matching(path[start:]):
                    found[rule].setdefault(path, path[:start])
                start = path.find("/", start) + 1
        better = {rule: (_with_prefix(rule, set(paths.values())), list(paths)) for rule, paths in found.items()}
        return {rule: (longer, paths) for rule, (longer, paths) in better.items() if _matches(longer, paths[0])}

    def with_words_corrected(self, rules: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
        """Returns rules that match once their words are spelled as the nearest of the model's, with the paths."""
        nearest, corrected, regexes = Nearest(sorted(self._with_word)), {}, {}
        by_letters = {
            "".join(sorted(word)): word for word in sorted(self._with_word)
        }  # short words with letters swapped

        def correct(match: re.Match[str]) -> str:
            word = match[0]
            if word in self._with_word:
                return word
            return nearest.to(word, 0.7) or by_letters.get("".join(sorted(word)), word)

        for rule in rules:
            with_words = _WORD.sub(correct, rule)
            with contextlib.suppress(re.error):  # the name of a group was corrected, for example
                if with_words != rule:
                    regexes[with_words], corrected[rule] = re.compile(with_words), with_words
        index, found = PathIndex(regexes), defaultdict(list)
        for path in self._paths:
            for with_words in index.matching(path):
                found[with_words].append(path)
        return {rule: (better, found[better]) for rule, better in corrected.items() if better in found}

    def tied_embedding(self, rule: str) -> Group:
        """Returns the embedding of a model without a head, where a rule is for a head."""
        if not _NAME_OF_A_HEAD.search(rule) or any(map(_NAME_OF_A_HEAD.search, self._paths)):
            return ()
        tables = [v for group in self._variables.values() for v in group if v.path.endswith("embeddings")]
        tables = [v for v in tables if len(v.shape) == 2]
        return [max(tables, key=lambda v: v.shape[0])] if tables else ()

    def nearest(self, rule: str) -> list[str]:
        """Returns the paths, alike but for numbers, that a rule is most like: of those that have its rarest word."""
        text = _text_of_regex(rule)
        segments = text.count("/") + 1 if re.match(r"\(?\.\*", rule) else 0  # the last ones; 0: all
        words = [word for word in _WORD.findall(rule) if word in self._with_word]
        word = min(words, key=lambda word: len(self._with_word[word]), default=None)
        if (segments, word) not in self._nearest:
            kinds: dict[str, list[str]] = {}
            for paths in self._kinds.values() if word is None else self._with_word[word]:
                kinds.setdefault(re.sub(r"_?\d+", "#", "/".join(paths[0].split("/")[-segments:])), paths)
            self._nearest[segments, word] = Nearest(kinds), kinds
        nearest, kinds = self._nearest[segments, word]
        is_rare = word is not None and 2 * len(self._with_word[word]) <= len(self._kinds)
        found = nearest.to(text, 0.3 if is_rare else 0.6)
        return [] if found is None else kinds[found]


def _matches(regex: str, path: str) -> bool:
    """Whether a regex made of a rule matches; it may be none, since flags, for example, stand at the beginning."""
    try:
        return re.fullmatch(regex, path) is not None
    except re.error:
        return False


def _with_prefix(rule: str, prefixes: set[str]) -> str:
    rule = f"(?:{rule})" if "|" in rule else rule
    one_kind = len(set(map(path_kind, prefixes))) == 1
    return f"{path_regex(sorted(prefixes)) if one_kind else '.*/'}{rule}"


def _text_of_regex(regex: str) -> str:
    """A regex as a path that it may match, "#" for numbers."""
    text = re.sub(r"_?(\[0-9\]|\\d|\d)[+*]?", "#", regex)
    text = re.sub(r"\((?:\?:)?([^()|]*)\|[^()]*\)", r"\1", text)
    return re.sub(r"\.[*+?]|\\|[\^$()\[\]?]", "", text).strip("/")

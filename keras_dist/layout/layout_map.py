"""`LayoutMap`: rules from regexes over variable paths to layouts."""

import copy
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import keras

from keras_dist.layout.regex_index import PathIndex
from keras_dist.layout.rule_matching import applies_to, find_shadowing_rule, path_variants
from keras_dist.layout.tensor_layout import TensorLayout, as_tensor_layout
from keras_dist.mesh.device_mesh import DeviceMesh, as_auto_mesh


class Rule(NamedTuple):
    """A rule of a `LayoutMap`: its key and the layout that it gives."""

    pattern: str
    layout: TensorLayout


class LayoutMap(keras.distribution.LayoutMap):
    """A dict from regexes over variable paths to layouts.

    A path is looked up as a key first; then each key is a regex that must match the whole path. Where none
    matches and the path begins with a name that Keras gave a model by itself (`sequential_3/`), the rest of the path is
    looked up, so that the rules of a functional model, of the same layers in a `Sequential`, and of either one
    loaded from a file are the same. Keys that end in `/output` give the layout of what a layer returns, keys that end
    in `/input` that of what a layer is called with; a key without that word is not for inputs, whatever it matches.

    A path that several rules match is an error, unless the map was made by `from_rules`, whose first match wins. Maps
    are merged by `|` and `|=`, as dicts are. They are equal when their rules and meshes are, and the order of rules
    where it counts.

    Args:
        device_mesh: the mesh of the layouts that bring none.

    Raises:
        ValueError: anything but a mesh.

    Example:

    >>> mesh = DeviceMesh((2, 4), ["data", "model"])
    >>> layout_map = LayoutMap(mesh)
    >>> layout_map["dense.*/kernel"] = (None, "model")
    >>> layout_map["dense_1/kernel"].axes
    (None, 'model')
    >>> layout_map["sequential_3/dense_1/kernel"].axes
    (None, 'model')
    >>> "dense_1/bias" in layout_map
    False
    """

    def __init__(self, device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh | None):
        self._first_match_wins = False
        self._layout_map: OrderedDict[str, TensorLayout] = OrderedDict()
        self._device_mesh = None if device_mesh is None else as_auto_mesh(device_mesh)
        self._regexes: dict[str, re.Pattern[str]] = {}
        self._index: PathIndex | None = None  # made anew at the first look-up after a change
        self._rules: dict[str, Rule | None] = {}  # what was looked up since then

    @classmethod
    def from_rules(
        cls,
        rules: Iterable[tuple[str, Any]],
        device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh | None,
    ) -> "LayoutMap":
        """Returns a map of ordered rules: of those that match a path the first gives it its layout.

        Made for partition rules such as those of t5x and EasyLM. They are meant for `re.search`, but here a pattern
        must match the whole path: `attention/kernel` is to be written `.*attention/kernel.*`. A last rule `.*` is for
        variables alone: what layers return and are called with is left to keys with the word `output` or `input`.
        `layout_map[key] = axes` adds a rule at the end.

        Args:
            rules: pairs of a key and what `layout_map[key] = ...` takes, in the order in which they are tried.
            device_mesh: the mesh of the layouts that bring none.

        Returns:
            The map.

        Raises:
            ValueError: what a `LayoutMap` refuses, or a rule that those before it leave no path to.
            TypeError: something else than pairs, or a key that is no string.

        Example:

        >>> from jax.sharding import PartitionSpec
        >>> rules = [("attention/kernel", PartitionSpec("model")), (".*", PartitionSpec())]
        >>> layout_map = LayoutMap.from_rules(
        ...     [(f".*(?:{pattern}).*", axes) for pattern, axes in rules], DeviceMesh("data:2,model:4")
        ... )
        >>> layout_map["block_1/attention/kernel"].axes, layout_map["block_1/bias"].axes
        (('model',), ())
        """
        layout_map = cls(device_mesh)
        layout_map._first_match_wins = True
        for rule in rules:
            if not isinstance(rule, (tuple, list)) or len(rule) != 2:
                raise TypeError(
                    f"Each rule is a pair of a pattern and axes. Received: {rule!r}. Write, for example, "
                    "[('.*kernel', (None, 'model'))], or pass the items() of a dict."
                )
            layout_map[rule[0]] = rule[1]
        return layout_map

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of the layouts that bring none."""
        return self._device_mesh

    def rule(self, path: str) -> Rule | None:
        """Returns the rule that gives a path its layout.

        Args:
            path: the path of a variable, or of a layer with `/output` behind it.

        Returns:
            The key and its layout, or None where no rule matches.

        Raises:
            ValueError: several rules match.
        """
        if path in self._rules:
            return self._rules[path]
        patterns = self._matching(path)
        if len(patterns) > 1:
            raise ValueError(
                f"Path '{path}' matches multiple layout specification keys: {patterns}. Make sure that each path "
                "matches at most one: narrow the regexes, or add the path itself as a key, which wins."
            )
        rule = Rule(patterns[0], self._layout_map[patterns[0]]) if patterns else None
        self._rules[path] = rule
        return rule

    def __getitem__(self, key: str) -> TensorLayout | None:
        """Returns the layout that the rules give a path, None where no rule matches.

        Args:
            key: the path of a variable, or a key of the map.

        Returns:
            The layout, or None.

        Raises:
            ValueError: several rules match.
        """
        rule = self.rule(key)
        return rule.layout if rule else None

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the layout that the rules give a path, `default` where no rule matches.

        Args:
            key: the path of a variable, or a key of the map.
            default: what to return where no rule matches.

        Returns:
            The layout, or `default`.

        Raises:
            ValueError: several rules match.
        """
        rule = self.rule(key)
        return rule.layout if rule else default

    def __contains__(self, key: object) -> bool:
        """Whether a rule matches the path."""
        return isinstance(key, str) and bool(self._matching(key))

    def __setitem__(self, key: str, layout: Any) -> None:
        """Adds a rule.

        Args:
            key: a regex, which must match a whole path, or a path.
            layout: a `TensorLayout`, or axes: a tuple, a list or a `jax.sharding.PartitionSpec`. One without a mesh
                is given the map's.

        Raises:
            ValueError: a key that is there already or is no regex, no layout, or an axis that the mesh does not have;
                where the first match wins, also a key that the rules before it leave no path to.
            TypeError: a key that is no string.
        """
        if not isinstance(key, str):
            raise TypeError(f"A key of a LayoutMap must be a string, a regex over paths. Received: {key!r}.")
        if key in self._layout_map:
            raise ValueError(
                f"{key} already exist in the LayoutMap with value {self._layout_map[key]}. Keys must not be repeated; "
                "delete the old rule first."
            )
        try:
            regex = re.compile(key)
        except re.error as error:
            raise ValueError(
                f"A key of a LayoutMap must be a regex. Received: {key!r}, which is none: {error}. "
                "Escape characters that stand for themselves, for example with re.escape."
            ) from None
        if self._first_match_wins and (earlier := find_shadowing_rule(key, self._regexes)):
            raise ValueError(
                "Where the first match wins, no rule stands behind one that matches all of its paths. Received: "
                f"{key!r} behind {earlier!r}. Put it before that one, or delete that one."
            )
        try:
            self._layout_map[key] = as_tensor_layout(layout).with_map_mesh(self._device_mesh)
        except (TypeError, ValueError) as error:
            raise type(error)(f"Rule {key!r}: {error}") from None
        self._regexes[key] = regex
        self._rules_changed()

    def __delitem__(self, key: str) -> None:
        """Removes the rule of a key, which must be the key itself and no path that it matches.

        Args:
            key: a key of the map.

        Raises:
            KeyError: there is no such key.
        """
        del self._layout_map[key]
        del self._regexes[key]
        self._rules_changed()

    def __len__(self) -> int:
        return len(self._layout_map)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout_map)

    def pop(self, key: str, *default: Any) -> Any:
        """Removes the rule of a key, which must be the key itself, and returns its layout.

        Args:
            key: a key of the map.
            *default: what to return where there is no such key.

        Returns:
            The layout.

        Raises:
            KeyError: there is no such key, and no default.
        """
        if key not in self._layout_map and default:
            return default[0]
        layout = self._layout_map[key]
        del self[key]
        return layout

    def setdefault(self, key: str, default: Any = None) -> TensorLayout:
        """Adds a rule unless its key is there already, and returns the layout of the key.

        Args:
            key: a key of the map.
            default: the layout to add.

        Returns:
            The layout that the key has now.
        """
        if key not in self._layout_map:
            self[key] = default
        return self._layout_map[key]

    def __or__(self, other: keras.distribution.LayoutMap) -> "LayoutMap":
        """Returns a new map of the rules of both, as of two dicts: where both have a key, the layout of `other`.

        Args:
            other: a map of ours or of Keras, on an equal mesh, or one of both maps without a mesh.

        Returns:
            The map, its rules in the order of this one, then what `other` has more.

        Raises:
            ValueError: two meshes, one map whose first match wins with one where several matches are an error, or a
                rule that cannot be added to the others.

        Example:

        >>> layout_map = LayoutMap(DeviceMesh("data:2,model:4"))
        >>> layout_map["up/kernel"] = (None, "model")
        >>> more = LayoutMap(None)
        >>> more["down/kernel"] = ("model", None)
        >>> list(layout_map | more)
        ['up/kernel', 'down/kernel']
        """
        if not isinstance(other, keras.distribution.LayoutMap):
            return NotImplemented
        other = as_layout_map(other)
        if self._first_match_wins != other._first_match_wins:
            raise ValueError(
                "Maps are merged when the first match wins in both, or in neither. Received: "
                f"{self} and {other}. Make the other kind of one with LayoutMap.from_rules(layout_map.items(), mesh), "
                "or with LayoutMap(mesh) and update(layout_map)."
            )
        meshes = [mesh for mesh in (self._device_mesh, other._device_mesh) if mesh is not None]
        if len(set(meshes)) > 1:
            raise ValueError(
                f"Maps that are merged have one mesh. Received: {meshes[0]} and {meshes[1]}. Make one of the maps with "
                "LayoutMap(None): its rules are given the mesh of the other."
            )
        merged = type(self)(meshes[0] if meshes else None)
        merged._first_match_wins = self._first_match_wins
        for key, layout in (self._layout_map | other._layout_map).items():
            merged[key] = copy.copy(layout)  # which may be given a mesh
        return merged

    def __ior__(self, other: keras.distribution.LayoutMap) -> "LayoutMap":
        """Adds the rules of another map, as `|` does; where it cannot, nothing is changed."""
        self.__dict__.update(vars(self | other))
        return self

    def __eq__(self, other: object) -> bool:
        """Whether rules and meshes are equal, and where the first match wins, the order too."""
        if not isinstance(other, keras.distribution.LayoutMap):
            return super().__eq__(other)
        return (
            self._first_match_wins == getattr(other, "_first_match_wins", False)
            and self._device_mesh == other.device_mesh
            and (not self._first_match_wins or list(self) == list(other))
            and super().__eq__(other)
        )

    def to_source(self, device_mesh: str = "device_mesh") -> str:
        """Returns Python source that makes an equal map, one rule a line.

        Args:
            device_mesh: what stands for the mesh there: the name of a variable, or an expression such as
                `'kd.create_device_mesh("data:2,model:4")'`.

        Returns:
            Statements after which `layout_map` is the map.

        Raises:
            ValueError: a layout on another mesh than the map's.
            TypeError: something else than a string.

        Example:

        >>> mesh = DeviceMesh("data:2,model:4")
        >>> layout_map = LayoutMap(mesh)
        >>> layout_map["block_[0-9]+/up/kernel"] = (None, "model")
        >>> print(layout_map.to_source("mesh"))
        import keras_dist as kd
        <BLANKLINE>
        layout_map = kd.LayoutMap(mesh)
        layout_map['block_[0-9]+/up/kernel'] = (None, 'model')
        <BLANKLINE>
        """
        if not isinstance(device_mesh, str):
            raise TypeError(
                "In source a name or an expression stands for the mesh. Received: "
                f"device_mesh={device_mesh!r}. Write, for example, to_source('mesh')."
            )
        for key, layout in self._layout_map.items():
            if layout.device_mesh != self._device_mesh:
                raise ValueError(
                    f"All layouts in source lie on the mesh of the map, {self._device_mesh}. Received: rule {key!r} on "
                    f"{layout.device_mesh}. Give the rule axes in place of a layout that brings its mesh."
                )
        mesh = "None" if self._device_mesh is None else device_mesh
        if self._first_match_wins:
            rules = [f"    ({key!r}, {layout.axes})," for key, layout in self._layout_map.items()]
            lines = ["rules = [", *rules, "]", f"layout_map = kd.LayoutMap.from_rules(rules, {mesh})"]
        else:
            rules = [f"layout_map[{key!r}] = {layout.axes}" for key, layout in self._layout_map.items()]
            lines = [f"layout_map = kd.LayoutMap({mesh})", *rules]
        return "\n".join(["import keras_dist as kd", "", *lines, ""])

    def __repr__(self) -> str:
        rules = ", ".join(f"{key!r}: {layout.axes}" for key, layout in self._layout_map.items())
        first = ", first match wins" if self._first_match_wins else ""
        return f"<{type(self).__name__} {{{rules}}}{first}, device_mesh={self._device_mesh}>"

    def __getstate__(self):
        # A copy has rules of its own, and finds them anew.
        own = {"_layout_map": self._layout_map.copy(), "_regexes": self._regexes.copy(), "_index": None, "_rules": {}}
        return vars(self) | own

    def _matching(self, path: str) -> list[str]:
        if path in self._layout_map:
            return [path]
        if self._index is None:
            self._index = PathIndex(self._regexes)
        found: list[str] = []  # where the first match wins, by all path_variants: a last `.*` matches the whole path
        for spelling in path_variants(path):
            found += [spelling] if spelling in self._layout_map else self._index.matching(spelling)
            if found and not self._first_match_wins:
                # Keras knows no rules for inputs: one that does not say so is for variables, and outputs.
                return [key for key in found if applies_to(key, path)] if path.endswith("/input") else found
        return [key for key in self._layout_map if key in found and applies_to(key, path)][:1] if found else []

    def _rules_changed(self) -> None:
        self._index = None
        self._rules.clear()


def as_layout_map(layout_map) -> LayoutMap:
    """Returns a layout map as ours: ours itself, or one with the rules of a plain `keras.distribution.LayoutMap`.

    Args:
        layout_map: a map of ours or of Keras.

    Returns:
        A `LayoutMap` of this package; of a plain one it holds the rules that it has now.

    Raises:
        ValueError: anything else.
    """
    if isinstance(layout_map, LayoutMap):
        return layout_map
    if not isinstance(layout_map, keras.distribution.LayoutMap):
        raise ValueError(
            f"Argument `layout_map` must be a `LayoutMap` instance. Received: layout_map={layout_map!r} "
            f"(of type {type(layout_map).__name__}). Make one with keras_dist.LayoutMap(device_mesh)."
        )
    ours = LayoutMap(layout_map.device_mesh)
    for key in layout_map:
        ours[key] = layout_map[key]
    return ours

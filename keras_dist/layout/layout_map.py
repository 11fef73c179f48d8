"""`LayoutMap`: a mapping from regexes over variable paths to layouts."""

import contextlib
import copy
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import keras

from keras_dist.layout.rule_matching import applies_to, find_shadowing_rule, full_matches, path_variants
from keras_dist.layout.tensor_layout import TensorLayout, as_tensor_layout, with_map_mesh
from keras_dist.mesh.device_mesh import DeviceMesh, as_auto_mesh


class Rule(NamedTuple):
    """A rule of a `LayoutMap`: its key and its layout."""

    pattern: str
    layout: TensorLayout


class LayoutMap(keras.distribution.LayoutMap):
    """A dict from regexes over variable paths to layouts.

    A path that is itself a key gets the layout of that key. Otherwise each key is used as a regex that must match the
    entire path. If none matches and the path starts with a name that Keras generated for the model (`sequential_3/`),
    the lookup is repeated without that name, so the same rules work for a functional model, for a `Sequential` of the
    same layers, and for either one after loading it from a file.

    A key that ends in `/output` gives the layout of a layer's outputs, one that ends in `/input` that of a layer's
    inputs. A key that does not contain the word `output` or `input` never applies to these: `up/.*` is for variables.

    Several regexes that match raise an error, unless the map was created by `from_rules`: then the first match
    wins. `|` and `|=` merge maps as they merge dicts. Two maps are equal if their rules and meshes are equal; the order
    of rules is compared only if the first match wins.

    Args:
        device_mesh: Mesh for layouts that have none.

    Raises:
        ValueError: `device_mesh` is not a mesh.

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
        self._keys_by_path: dict[str, list[str]] = {}  # found before; replaced when a rule changes

    @classmethod
    def from_rules(
        cls, rules: Iterable[tuple[str, Any]], device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh | None
    ) -> "LayoutMap":
        """Creates a map in which the first rule that matches a path wins.

        Partition rules of t5x and EasyLM work this way, except that they are passed to `re.search`. Here a pattern
        must match the entire path: write `attention/kernel` as `.*attention/kernel.*`. `layout_map[key] = axes` appends
        a rule.

        Args:
            rules: Pairs of a key and a value as in `layout_map[key] = value`, in the order in which they are tried.
            device_mesh: Mesh for layouts that have none.

        Raises:
            ValueError: A rule that a `LayoutMap` rejects, or one that earlier rules make unreachable.
            TypeError: `rules` does not contain pairs, or a key is not a string.

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
                    f"Rule {rule!r} is not a pair of a pattern and axes. Write, for example, "
                    "[('.*kernel', (None, 'model'))], or pass the items() of a dict."
                )
            layout_map[rule[0]] = rule[1]
        return layout_map

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Mesh for layouts that have none."""
        return self._device_mesh

    def rule(self, path: str) -> Rule | None:
        """Returns the rule for a path.

        Args:
            path: Path of a variable, or path of a layer followed by `/output` or `/input`.

        Returns:
            The key and its layout, or None if no rule matches.

        Raises:
            ValueError: Several rules match.
        """
        patterns = self._matching(path)
        if len(patterns) > 1:
            raise ValueError(
                f"Path '{path}' matches multiple layout specification keys: {patterns}. Narrow the regexes, or add "
                "the path itself as a key: it takes precedence over regexes."
            )
        return Rule(patterns[0], self._layout_map[patterns[0]]) if patterns else None

    def __getitem__(self, key: str) -> TensorLayout | None:
        """Returns the layout for a path or key, or None, as `get` does."""
        return self.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the layout for a path or key, or `default` if no rule matches. Raises the errors of `rule`."""
        rule = self.rule(key)
        return rule.layout if rule else default

    def __contains__(self, key: object) -> bool:
        """Whether a rule matches the path."""
        return isinstance(key, str) and bool(self._matching(key))

    def __setitem__(self, key: str, layout: Any) -> None:
        """Adds a rule.

        Args:
            key: A regex that must match an entire path, or a path.
            layout: A `TensorLayout`, or axes: a tuple, a list or a `jax.sharding.PartitionSpec`. A layout without a
                mesh is given the map's mesh.

        Raises:
            ValueError: The key exists already or is not a valid regex, the value is not a layout or has an axis that
                the mesh does not have, or (if the first match wins) earlier rules make the key unreachable.
            TypeError: The key is not a string.
        """
        if not isinstance(key, str):
            raise TypeError(f"A key of a LayoutMap must be a string (a path or a regex over paths), but got {key!r}.")
        if key in self._layout_map:
            raise ValueError(
                f"{key} already exist in the LayoutMap with value {self._layout_map[key]}. Delete the old rule first: "
                f"del layout_map[{key!r}]."
            )
        try:
            regex = re.compile(key)
        except re.error as error:
            raise ValueError(f"Layout map key {key!r} is not a valid regex: {error}. {_regex_advice(key)}") from None
        if self._first_match_wins and (earlier := find_shadowing_rule(key, self._regexes)):
            raise ValueError(
                f"Rule {key!r} is unreachable: rule {earlier!r} comes before it and matches all of its paths, and the "
                "first match wins. Move it before that rule, or remove one of the two."
            )
        try:
            given = with_map_mesh(as_tensor_layout(layout), self._device_mesh)
        except (TypeError, ValueError) as error:
            raise type(error)(f"Rule {key!r}: {error}") from None
        if given.memory_kind is not None:
            raise ValueError(
                f"Rule {key!r}: memory_kind={given.memory_kind!r} cannot be that of a rule, since layers compute with "
                "what is in device memory. Leave it out, and keep optimizer state or activations in host memory with "
                "StepOptions(offload=...)."
            )
        self._layout_map[key] = given
        self._regexes[key] = regex
        self._keys_by_path = {}

    def __delitem__(self, key: str) -> None:
        """Removes the rule with this key. Anything else is a KeyError, also a path that the key matches."""
        del self._layout_map[key]
        del self._regexes[key]
        self._keys_by_path = {}

    def __len__(self) -> int:
        return len(self._layout_map)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout_map)

    def pop(self, key: str, *default: Any) -> Any:
        """Removes the rule with this key and returns its layout, or `default` if the map has no such key.

        Raises:
            KeyError: The map has no such key, and no default is passed.
        """
        if key not in self._layout_map and default:
            return default[0]
        layout = self._layout_map[key]
        del self[key]
        return layout

    def setdefault(self, key: str, default: Any = None) -> TensorLayout:
        """Adds a rule unless the map has this key already, and returns the layout of the key."""
        if key not in self._layout_map:
            self[key] = default
        return self._layout_map[key]

    def __or__(self, other: keras.distribution.LayoutMap) -> "LayoutMap":
        """Merges two maps into a new one; if both have a key, the layout of `other` is used.

        Args:
            other: A map of this package or of Keras. Its mesh must be equal to this map's, unless one of the two has
                none.

        Returns:
            A map with the rules of this one, in order, followed by the additional rules of `other`.

        Raises:
            ValueError: The meshes differ, the first match wins in only one of the maps, or a rule cannot be added to
                the others.

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
                f"Cannot merge {self} and {other}: the first match wins in only one of them. Convert one of them with "
                "LayoutMap.from_rules(layout_map.items(), mesh), or with LayoutMap(mesh) and update(layout_map)."
            )
        meshes = [mesh for mesh in (self._device_mesh, other._device_mesh) if mesh is not None]
        if len(set(meshes)) > 1:
            raise ValueError(
                f"Cannot merge layout maps with different meshes, {meshes[0]} and {meshes[1]}. Create one of the maps "
                "with LayoutMap(None): its rules are given the mesh of the other map."
            )
        merged = type(self)(meshes[0] if meshes else None)
        merged._first_match_wins = self._first_match_wins
        for key, layout in (self._layout_map | other._layout_map).items():
            merged[key] = copy.copy(layout)  # which may be given a mesh
        return merged

    def __ior__(self, other: keras.distribution.LayoutMap) -> "LayoutMap":
        """Adds the rules of another map, as `|` does. If that fails, this map is unchanged."""
        self.__dict__.update(vars(self | other))
        return self

    def __eq__(self, other: object) -> bool:
        """Whether rules and meshes are equal, and if the first match wins, the order of rules too."""
        if not isinstance(other, keras.distribution.LayoutMap):
            return super().__eq__(other)
        return (
            self._first_match_wins == getattr(other, "_first_match_wins", False)
            and self._device_mesh == other.device_mesh
            and (not self._first_match_wins or list(self) == list(other))
            and super().__eq__(other)
        )

    def to_source(self, device_mesh: str | None = None) -> str:
        """Returns Python source code that creates an equal map, with one rule per line.

        Args:
            device_mesh: The expression for the mesh in that code: the name of a variable, or for example
                `'kd.create_device_mesh("data:2,model:4")'`. By default the code creates a mesh of the same axes, of the
                devices of the machine that it runs on.

        Returns:
            Statements that assign the map to `layout_map`.

        Raises:
            ValueError: A layout has another mesh than the map.
            TypeError: `device_mesh` is not a string.

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
        if not isinstance(device_mesh, str | None):
            raise TypeError(
                f"device_mesh={device_mesh!r} must be a string, the expression for the mesh in the generated code. "
                "Write, for example, to_source('mesh')."
            )
        for key, layout in self._layout_map.items():
            if layout.device_mesh != self._device_mesh:
                raise ValueError(
                    f"Rule {key!r} has a layout on {layout.device_mesh}, not on the map's mesh, {self._device_mesh}, "
                    "which to_source() requires. Assign axes to the rule instead of a layout with its own mesh."
                )
        mesh = "None" if self._device_mesh is None else device_mesh or "device_mesh"
        lines = ["import keras_dist as kd", ""]
        if self._device_mesh is not None and device_mesh is None:
            axes = ",".join(f"{name}:{size}" for name, size in self._device_mesh.axis_sizes.items())
            lines.append(f'device_mesh = kd.create_device_mesh("{axes}")')
        if self._first_match_wins:
            rules = [f"    ({key!r}, {layout.axes})," for key, layout in self._layout_map.items()]
            lines += ["rules = [", *rules, "]", f"layout_map = kd.LayoutMap.from_rules(rules, {mesh})"]
        else:
            rules = [f"layout_map[{key!r}] = {layout.axes}" for key, layout in self._layout_map.items()]
            lines += [f"layout_map = kd.LayoutMap({mesh})", *rules]
        return "\n".join([*lines, ""])

    def __repr__(self) -> str:
        rules = ", ".join(f"{key!r}: {layout.axes}" for key, layout in self._layout_map.items())
        first = ", first match wins" if self._first_match_wins else ""
        return f"<{type(self).__name__} {{{rules}}}{first}, device_mesh={self._device_mesh}>"

    def __getstate__(self):
        copies = {"_layout_map": self._layout_map.copy(), "_regexes": self._regexes.copy(), "_keys_by_path": {}}
        return vars(self) | copies

    def _matching(self, path: str) -> list[str]:
        """Returns the keys that apply to a path; at most one if the first match wins."""
        known = self._keys_by_path
        if path not in known:
            known[path] = self._find_matching(path)
        return known[path]

    def _find_matching(self, path: str) -> list[str]:
        if path in self._layout_map:
            return [path]
        found: list[str] = []
        for variant in path_variants(path):
            keys = [variant] if variant in self._layout_map else full_matches(self._regexes, variant)
            found += [key for key in keys if applies_to(key, path)]
            # If the first match wins, all variants count: a final `.*` matches the path with the model's name in front,
            # but must not hide an earlier rule that matches the path without it.
            if found and not self._first_match_wins:
                return found
        return [key for key in self._layout_map if key in found][:1]


def _regex_advice(key: str) -> str:
    with contextlib.suppress(re.error):
        regex = re.sub(r"(?<![.\])\w])\*+", ".*", key)  # `*up/kernel`, a glob
        re.compile(regex)
        return f"In a regex, any text is '.*': did you mean {regex!r}?"
    return "Escape characters that are meant literally, for example with re.escape."


def as_layout_map(layout_map) -> LayoutMap:
    """Converts a layout map of Keras, whose rules are copied, to a `LayoutMap`; returns one of this package as is."""
    if isinstance(layout_map, LayoutMap):
        return layout_map
    if not isinstance(layout_map, keras.distribution.LayoutMap):
        raise ValueError(
            f"Argument `layout_map` must be a `LayoutMap` instance, but got {layout_map!r} (of type "
            f"{type(layout_map).__name__}). Create one with keras_dist.LayoutMap(device_mesh)."
        )
    converted = LayoutMap(layout_map.device_mesh)
    converted.update(layout_map)
    return converted

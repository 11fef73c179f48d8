"""`explain`: which rule lays out which variable of a model. Nothing is compiled, and no values are made."""

import contextlib
import copy
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import keras

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import distribution_of
from keras_dist.diagnostics.coverage import SEVERAL_RULES, Coverage, CoveredVariable
from keras_dist.layout.derived_weights import base_weight_of
from keras_dist.layout.layout_map import LayoutMap, Rule
from keras_dist.layout.regex_index import PathIndex
from keras_dist.layout.rule_matching import matching
from keras_dist.layout.tensor_layout import Axes, TensorLayout, axis_tuple, layout_error
from keras_dist.mesh.device_mesh import DeviceMesh, as_device_mesh
from keras_dist.mesh.devices import device_name
from keras_dist.strategies.base import Distribution
from keras_dist.variables.model_or_builder import built
from keras_dist.variables.variable_layouts import (
    VariableSpec,
    all_variables,
    layout_under,
    optimizer_state_layout,
    optimizer_state_owners,
)


def explain(model_or_builder: Any, distribution: Distribution | None = None) -> Coverage:
    """Says which rule lays out which variable of a model, what each device holds, and what is probably not meant.

    It takes no step, no batch and no `compile`. A rule that does not fit a variable is no error here: the coverage
    says so, and goes on.

    Args:
        model_or_builder: a built model or layer, real or deferred; or a function without arguments that returns one,
            which is called without making values, and leaves Keras's automatic names and random seeds as they are.
        distribution: how things lie. By default the installed distribution.

    Returns:
        The coverage; print it.

    Raises:
        TypeError: no model and no function, or no distribution of this package.
        ValueError: no distribution is installed and none is given, or a model that is not built.

    Example:

    >>> from keras_dist import create_device_mesh, ModelParallel
    >>> layout_map = LayoutMap(create_device_mesh("data:2,model:4"))
    >>> layout_map["dense/kernel"] = (None, "model")
    >>> distribution = ModelParallel(layout_map=layout_map)
    >>> def build():
    ...     return keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, name="dense")])
    >>> kernel, bias = explain(build, distribution).variables
    >>> kernel.why, kernel.shard_shape, bias.why, bias.shard_shape
    ("rule 'dense/kernel'", (16, 2), 'no rule matches', (8,))
    """
    if distribution is None:
        distribution = internals.current_distribution()
        if distribution is None:
            raise ValueError(
                "A model is explained under a distribution. Received: none, and none is installed. Pass one, or call "
                "keras_dist.set_distribution(...) before."
            )
    if not isinstance(distribution, Distribution):
        raise TypeError(
            "explain takes a distribution of keras_dist. Received: "
            f"distribution={distribution!r} ({type(distribution).__name__}). Pass, for example, "
            "keras_dist.ModelParallel(layout_map=...)."
        )
    if isinstance(model_or_builder, keras.Layer):
        silence = contextlib.nullcontext()
    else:
        silence = _laying_nothing_out(distribution)
    with silence, built(model_or_builder) as model:
        return _coverage(model, distribution)


@contextlib.contextmanager
def _laying_nothing_out(distribution: Distribution) -> Iterator[None]:
    """Installs a copy of a distribution that lays nothing out, so that no rule is refused while a model is made."""
    kind = type(distribution)
    installed = copy.copy(distribution)
    silent: Any = lambda self, *args: None  # noqa: E731
    asked = ("variable", "compute", "update", "tensor")
    methods = {f"get_{what}_layout": silent for what in asked} | {"layout_rules": silent}
    installed.__class__ = type(kind.__name__, (kind,), methods)
    with installed.scope():
        yield


# ------------------------------------------------------------------------------------------------- who lays out what


class _Answer(NamedTuple):
    """How a distribution lays a variable out, and why."""

    layout: Any  # None: it cannot
    rule: str | None
    why: str


def _coverage(model: keras.Layer, distribution: Distribution) -> Coverage:
    variables, layout_map = list(all_variables(model)), getattr(distribution, "_layout_map", None)
    answers = _answers(model, variables, distribution)
    weights = {id(variable) for variable in model.weights}
    slots = {id(variable) for variable in getattr(getattr(model, "optimizer", None), "variables", ())}
    placer, held, rows = _Placer(distribution.device_mesh), Counter(), []
    for variable in variables:
        key, shape, itemsize = id(variable), tuple(variable.shape), _itemsize(internals.stored_dtype(variable))
        layout, rule, why = answers[key]
        axes, shard_shape, devices = placer.place(layout, shape)
        row = CoveredVariable(
            path=variable.path,
            part="weights" if key in weights else "optimizer" if key in slots else "other",
            shape=shape,
            dtype=internals.stored_dtype(variable),
            trainable=variable.trainable,
            whole_bytes=math.prod(shape) * itemsize,
            rule=rule,
            axes=axes,
            shard_shape=shard_shape,
            bytes=math.prod(shard_shape) * itemsize,
            why=why,
            fits=layout is not None,
        )
        held[devices] += row.bytes
        rows.append(row)
    layers = internals.layer_paths(model)
    everywhere = held.pop(None, 0)
    device_bytes = Counter({device_name(d): everywhere for d in distribution.device_mesh.backend_mesh.devices.flat})
    for devices, size in held.items():
        device_bytes.update({device_name(device): size for device in devices or ()})
    return Coverage(
        model=model.name,
        mesh=distribution.device_mesh,
        distribution=repr(distribution),
        variables=tuple(rows),
        layers=tuple(layers),
        rules=() if layout_map is None else tuple(Rule(key, layout_map[key]) for key in layout_map),
        first_match_wins=layout_map is not None and layout_map._first_match_wins,
        unused={} if layout_map is None else _unused(layout_map, rows, layers),
        device_bytes=device_bytes,
    )


@lru_cache
def _itemsize(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


def _answers(model: keras.Layer, variables: Iterable[keras.Variable], distribution: Distribution) -> dict[int, _Answer]:
    """Returns how each variable is laid out, by its `id`: an optimizer slot as the update of its weight is."""
    owners = optimizer_state_owners(model, variables)
    answers = {id(variable): _answer(variable, distribution) for variable in variables if id(variable) not in owners}
    of_slots: dict[int, _Answer] = {}
    for slot, owner in owners.items():
        key = id(owner)
        if key not in of_slots:
            given = of_slots[key] = answers[key]
            if given.layout is not None:
                layout = optimizer_state_layout(owner, given.layout, distribution)
                if layout != given.layout:
                    why = f"follows {owner.path!r}, changed by {type(distribution).__name__}"
                    of_slots[key] = _Answer(layout, given.rule, why)
        answers[slot] = of_slots[key]
    return answers


def _answer(variable: keras.Variable, distribution: Distribution) -> _Answer:
    rule, of_weight, several, kind = None, None, False, type(distribution).__name__
    weight = base_weight_of(variable.path)
    try:
        rule = distribution.rule(variable.path)
        of_weight = None if weight is None else distribution.rule(weight.path)
    except ValueError:
        several = True
    pattern = None if rule is None else rule.pattern
    author = distribution_of(variable)
    try:
        layout = layout_under(variable, distribution)
        wanted = distribution.get_variable_layout(VariableSpec.of(variable)) if author is distribution else layout
    except ValueError as error:
        sizes = distribution.device_mesh.axis_sizes
        problem = None if rule is None else layout_error(rule.layout.axes, variable.shape, sizes)
        why = f"rule {pattern!r} does not fit: {problem.partition('. ')[0]}" if problem else str(error)
        return _Answer(None, pattern, SEVERAL_RULES if several else why)
    if author is None and layout is internals.variable_layout(variable):
        return _Answer(layout, None, "brought its own layout")
    if layout != wanted:
        return _Answer(layout, pattern, "lies as before the rules were changed; redistribute(model) moves it")
    if weight and of_weight and rule in (None, of_weight):
        return _Answer(layout, of_weight.pattern, f"follows {weight.path!r}")
    if rule is not None:
        return _Answer(layout, pattern, f"rule {pattern!r}" + (f" and {kind}" if layout != rule.layout else ""))
    if any(layout.axes):
        return _Answer(layout, None, f"laid out by {kind}")
    has_rules = bool(getattr(distribution, "_layout_map", None))
    return _Answer(layout, None, "no rule matches" if has_rules else f"replicated by {kind}")


class _Placed(NamedTuple):
    """How a tensor lies."""

    axes: Axes
    shard_shape: tuple[int, ...]
    devices: frozenset | None  # None: all of the mesh


class _Placer:
    """Says how tensors lie under their layouts; what tensors of one shape and layout have in common is computed once.

    Args:
        mesh: the mesh of layouts that bring none.
    """

    def __init__(self, mesh: DeviceMesh):
        self._mesh = mesh
        self._placed: dict[Any, _Placed] = {}

    def place(self, layout: Any, shape: tuple[int, ...]) -> _Placed:
        """Returns how a tensor lies, as if it were replicated where there is no layout."""
        if isinstance(layout, jax.sharding.NamedSharding) and isinstance(layout.mesh, jax.sharding.Mesh):
            layout = TensorLayout(tuple(layout.spec), layout.mesh)
        if not isinstance(layout, keras.distribution.TensorLayout):
            return _Placed((None,) * len(shape), shape, None if layout is None else frozenset(layout.device_set))
        mesh = layout.device_mesh
        mesh = self._mesh if mesh is None or mesh is self._mesh or self._mesh == mesh else as_device_mesh(mesh)
        key = layout.axes, shape, id(mesh)
        if key not in self._placed:
            axes = (*layout.axes, *[None] * (len(shape) - len(layout.axes)))
            counts = [math.prod(mesh.axis_sizes[name] for name in axis_tuple(entry)) for entry in axes]
            shard_shape = tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))
            devices = None if mesh is self._mesh else frozenset(mesh.backend_mesh.devices.flat)
            self._placed[key] = _Placed(axes, shard_shape, devices)
        return self._placed[key]


def _unused(layout_map: LayoutMap, variables: Iterable[CoveredVariable], layers: Iterable[str]) -> dict:
    """Returns the rules that lay nothing out, each with the rules that take the paths that it matches."""
    used = {v.rule for v in variables}
    unused = {key: re.compile(key) for key in layout_map if key not in used}
    if not unused:
        return {}
    index, takers = PathIndex(unused), {key: Counter() for key in unused}
    outputs = [f"{path}/{end}" for path in layers for end in ("output", "input")]
    for path in [*(v.path for v in variables if v.part != "optimizer"), *outputs]:
        for key in matching(index, path):
            try:
                rule = layout_map.rule(path)
            except ValueError:  # several rules match, which is another matter
                used.add(key)
                continue
            if rule is not None and rule.pattern == key:
                used.add(key)
            elif rule is not None:  # None: an ordered rule is not meant for every output that it matches
                takers[key][rule.pattern] += 1
    return {key: dict(takers[key]) for key in unused if key not in used}

"""`explain`: which rule shards which variable of a model. Nothing is compiled, and no values are created."""

import copy
import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from keras import layers

from keras_dist._keras import internals, model_structure
from keras_dist._keras.active_distribution import distribution_of, what_instead_of_a_distribution
from keras_dist._report.units import bytes_text
from keras_dist.diagnostics.coverage import SEVERAL_RULES, Coverage, CoveredVariable
from keras_dist.diagnostics.findings import find_mistakes
from keras_dist.layout.derived_weights import base_weight_of, derived_axes, paths_derived_later
from keras_dist.layout.layout_map import LayoutMap, Rule
from keras_dist.layout.rule_matching import matching_patterns
from keras_dist.layout.tensor_layout import Axes, TensorLayout, axis_names, axis_tuple, is_in_host_memory, layout_error
from keras_dist.mesh.device_mesh import DeviceMesh, as_device_mesh
from keras_dist.mesh.devices import device_name
from keras_dist.sharding.shard_dim import MIN_SHARD_BYTES
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.data_parallel import DataParallel
from keras_dist.strategies.fsdp import FullyShardedDataParallel
from keras_dist.variables import variable_layouts
from keras_dist.variables.deferred import built
from keras_dist.variables.variable_layouts import VariableSpec

_CONVOLUTIONS = (
    *(layers.Conv1D, layers.Conv2D, layers.Conv3D),
    *(layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose),
    *(layers.DepthwiseConv1D, layers.DepthwiseConv2D, layers.SeparableConv1D, layers.SeparableConv2D),
)
_MAX_POOLING = layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D
_ADAPTIVE_MAX_POOLING = layers.AdaptiveMaxPooling1D, layers.AdaptiveMaxPooling2D, layers.AdaptiveMaxPooling3D


def explain(
    model_or_builder: keras.Layer | Callable[[], keras.Layer], distribution: Distribution | None = None
) -> Coverage:
    """Reports which rule shards which variable of a model, the memory per device, and likely mistakes.

    It runs no step and needs no batch. If a rule does not fit a variable, no error is raised: the report describes the
    mismatch.

    Args:
        model_or_builder: A built model or layer, real or deferred; or a function without arguments that returns one.
            The function is called without creating values, and leaves Keras's automatic names and random seeds
            unchanged. If it compiles the model, the optimizer state is included.
        distribution: The distribution to use. By default the installed one.

    Returns:
        The coverage. Print it.

    Raises:
        TypeError: `model_or_builder` is neither a model nor a function, or `distribution` is not from this package.
        ValueError: No distribution is passed or installed, or the model is not built.

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
                "explain needs a distribution, and none is active. Pass one, or call "
                "keras_dist.set_distribution(...) first."
            )
    if not isinstance(distribution, Distribution):
        given = what_instead_of_a_distribution(distribution)
        raise TypeError(f"explain takes a distribution of keras_dist, but got {given}")
    if isinstance(model_or_builder, keras.Layer):
        with built(model_or_builder) as model:
            return _coverage(model, distribution)
    with _without_layouts(distribution).scope(), built(model_or_builder) as model:
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        return _coverage(model, distribution)


def _without_layouts(distribution: Distribution) -> Distribution:
    """Returns a copy of a distribution that has no layouts, so that rules that do not fit raise no errors."""
    copied, kind = copy.copy(distribution), type(distribution)
    no_layout: Any = lambda self, *args: None  # noqa: E731
    methods = {f"get_{what}_layout": no_layout for what in ("variable", "compute", "update", "tensor")}
    copied.__class__ = type(kind.__name__, (kind,), methods | {"layout_rules": no_layout})
    return copied


class _Decision(NamedTuple):
    layout: Any  # None if it cannot have one
    rule: str | None
    why: str


def _coverage(model: keras.Layer, distribution: Distribution) -> Coverage:
    layout_map: Any = LayoutMap(None) if distribution._layout_map is None else distribution._layout_map
    variables = list(variable_layouts.all_variables(model))
    decisions = _decisions(model, variables, distribution)
    weights = {id(variable) for variable in model.weights}
    optimizer = getattr(model, "optimizer", None)
    optimizer_state = {id(variable) for variable in getattr(optimizer, "variables", ())}
    bytes_on, rows = Counter(), []
    for variable in variables:
        key, shape, dtype = id(variable), tuple(variable.shape), internals.stored_dtype(variable)
        layout, rule, why = decisions[key]
        itemsize = jax.numpy.dtype(dtype).itemsize
        axes, shard_shape, devices = _place(layout, shape, distribution.device_mesh)
        row = CoveredVariable(
            path=variable.path,
            part="weights" if key in weights else "optimizer" if key in optimizer_state else "other",
            shape=shape,
            dtype=dtype,
            trainable=variable.trainable,
            whole_bytes=math.prod(shape) * itemsize,
            rule=rule,
            axes=axes,
            shard_shape=shard_shape,
            bytes=math.prod(shard_shape) * itemsize,
            is_on_host=is_in_host_memory(layout),
            why=why,
            fits=layout is not None,
            base=base.path if (base := base_weight_of(variable)) else None,
        )
        bytes_on[devices] += 0 if row.is_on_host else row.bytes
        rows.append(row)
    layers_by_path = model_structure.layers_by_path(model)
    sequence_axes = distribution._placer.sequence_axes
    reasons = {path: _why_gathered(layer) for path, layer in layers_by_path.items() if sequence_axes}
    on_all_devices = bytes_on.pop(None, 0)
    mesh_devices = distribution.device_mesh.backend_mesh.devices.flat
    device_bytes = Counter({device_name(device): on_all_devices for device in mesh_devices})
    for devices, size in bytes_on.items():
        device_bytes.update({device_name(device): size for device in devices or ()})
    coverage = Coverage(
        model=model.name,
        mesh=distribution.device_mesh,
        distribution=repr(distribution),
        variables=tuple(rows),
        layers=tuple(layers_by_path),
        rules=tuple(Rule(*item) for item in layout_map.items()),
        first_match_wins=layout_map._first_match_wins,
        unused=_unused_rules(layout_map, rows, layers_by_path),
        device_bytes=device_bytes,
        idle_axes=_idle_axes(distribution, layout_map, rows),
        batch_axes=distribution._placer.batch_axes,
        sequence_axes=sequence_axes,
        expert_axes=axis_tuple(distribution.expert_dim_name),
        gathered_sequences={path: reason for path, reason in reasons.items() if reason is not None},
        notes=_notes(model, optimizer),
    )
    return dataclasses.replace(coverage, findings=find_mistakes(coverage))


def _notes(model: keras.Layer, optimizer: Any) -> tuple[str, ...]:
    if optimizer is not None and optimizer.built:
        return ()
    if optimizer is not None:
        return (
            f"Optimizer state is not counted: the optimizer of {model.name!r} is not built yet. Call "
            "model.optimizer.build(model.trainable_variables), or pass a function that returns the compiled model.",
        )
    return (f"Optimizer state is not counted: {model.name!r} is not compiled.",)


def _decisions(
    model: keras.Layer, variables: Iterable[keras.Variable], distribution: Distribution
) -> dict[int, _Decision]:
    """Returns the layout of each variable, by `id`. Optimizer state has the layout of its weight's update."""
    owners = variable_layouts.optimizer_state_owners(getattr(model, "optimizer", None), variables)
    decisions = {id(v): _decision(v, distribution) for v in variables if id(v) not in owners}
    weights = {id(owner): owner for owner in owners.values()}
    updates = {key: _update_decision(weight, decisions[key], distribution) for key, weight in weights.items()}
    return decisions | {state: updates[id(owner)] for state, owner in owners.items()}


def _update_decision(weight: keras.Variable, decision: _Decision, distribution: Distribution) -> _Decision:
    if decision.layout is None:
        return decision
    layout = variable_layouts.optimizer_state_layout(weight, decision.layout, distribution)
    if layout != decision.layout:
        kind = type(distribution).__name__
        return _Decision(layout, decision.rule, f"same as {weight.path!r}, further sharded by {kind}")
    if isinstance(distribution, DataParallel) and distribution._shard_optimizer_state:
        return decision._replace(why=_why_not_sharded(weight, layout, distribution))
    return decision


def _decision(variable: keras.Variable, distribution: Distribution) -> _Decision:
    rule, base, several, kind = None, None, False, type(distribution).__name__
    try:
        rule, base = distribution._rule_and_base(variable)
    except ValueError:
        several = True
    pattern = None if rule is None else rule.pattern
    author = distribution_of(variable)
    try:
        layout = variable_layouts.layout_under(variable, distribution)
        current = distribution.get_variable_layout(VariableSpec.of(variable)) if author is distribution else layout
    except ValueError as error:
        sizes = distribution.device_mesh.axis_sizes
        problem = None if rule is None or base is not None else layout_error(rule.layout.axes, variable.shape, sizes)
        why = f"rule {pattern!r} does not fit: {problem.partition('. ')[0]}" if problem else str(error)
        return _Decision(None, pattern, SEVERAL_RULES if several else why)
    if author is None and layout is internals.variable_layout(variable):
        return _Decision(layout, None, "created with its own layout")
    if layout != current:
        return _Decision(layout, pattern, "layout from before the rules changed; call redistribute(model)")
    if rule is not None and base is not None:
        why = f"rule {pattern!r}" if base.path == variable.path else f"same as {base.path!r}"
        wanted = derived_axes(rule.layout.axes, base.dims, variable.shape, defaultdict(lambda: 1))
        missing = [repr(name) for name in axis_names(wanted) if name not in axis_names(layout.axes)]
        return _Decision(layout, pattern, f"{why}; not divisible by {' and '.join(missing)}" if missing else why)
    if rule is not None:
        return _Decision(layout, pattern, f"rule {pattern!r}" + (f" and {kind}" if layout != rule.layout else ""))
    if any(layout.axes):
        return _Decision(layout, None, f"sharded by {kind}")
    if isinstance(distribution, FullyShardedDataParallel):
        return _Decision(layout, None, _why_not_sharded(variable, layout, distribution))
    has_rules = bool(getattr(distribution, "_layout_map", None))
    return _Decision(layout, None, "no rule matches" if has_rules else f"replicated by {kind}")


def _why_not_sharded(variable: keras.Variable, layout: Any, distribution: Distribution) -> str:
    """Returns why FSDP, or ZeRO-1 for the state of a variable, shards no dim beyond those of a layout."""
    if isinstance(distribution, FullyShardedDataParallel):
        axes, threshold, threshold_name = distribution._shard_axes, distribution._min_shard_bytes, "min_shard_bytes"
    else:
        axes, threshold, threshold_name = distribution._placer.batch_axes, MIN_SHARD_BYTES, "ZeRO-1 threshold"
    sizes = distribution.device_mesh.axis_sizes
    shards, parts = (math.prod(sizes[name] for name in names) for names in (axis_names(layout.axes), axes))
    if parts == 1:
        return f"replicated: there is one device along {', '.join(map(repr, axes))}"
    if used := set(axes).intersection(axis_names(layout.axes)):
        return f"a rule shards it over {', '.join(map(repr, sorted(used)))}"
    if internals.stored_bytes(variable) // shards <= threshold:
        return f"replicated: at most {bytes_text(threshold)} ({threshold_name})"
    return f"replicated: no dim is divisible by {parts}"


def _place(layout: Any, shape: tuple[int, ...], mesh: DeviceMesh) -> tuple[Axes, tuple[int, ...], frozenset | None]:
    """Returns the axes, the shard shape and the devices of a tensor: None for all devices of `mesh`.

    A tensor without a layout counts as replicated, a layout without a mesh is on `mesh`.
    """
    if not isinstance(layout, keras.distribution.TensorLayout):
        if not isinstance(layout, jax.sharding.NamedSharding) or not isinstance(layout.mesh, jax.sharding.Mesh):
            return (None,) * len(shape), shape, None if layout is None else frozenset(layout.device_set)
        layout = TensorLayout(tuple(layout.spec), layout.mesh)
    devices = None
    if layout.device_mesh not in (mesh, None):
        mesh = as_device_mesh(layout.device_mesh)
        devices = frozenset(mesh.backend_mesh.devices.flat)
    axes = (*layout.axes, *[None] * (len(shape) - len(layout.axes)))
    return axes, _shard_shape(axes, shape, tuple(mesh.axis_sizes.items())), devices


@lru_cache  # most variables of a large model are of a few shapes
def _shard_shape(axes: Axes, shape: tuple[int, ...], axis_sizes: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    sizes = dict(axis_sizes)
    counts = [math.prod(sizes[name] for name in axis_tuple(entry)) for entry in axes]
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))


def _why_gathered(layer: keras.Layer) -> str | None:
    """Returns why a layer of Keras gathers sequences that are sharded; None for all others."""
    if isinstance(layer, layers.RNN):
        return "recurrent: computes one position after another"
    if isinstance(layer, _CONVOLUTIONS) and {*layer.kernel_size, *np.atleast_1d(layer.strides)} != {1}:
        return f"convolution: reads neighboring positions (kernel {layer.kernel_size}, strides {layer.strides})"
    if isinstance(layer, _MAX_POOLING):
        return f"max pooling: reads neighboring positions (window {layer.pool_size}, strides {layer.strides})"
    if isinstance(layer, _ADAPTIVE_MAX_POOLING):
        return f"max pooling: reads neighboring positions (output {layer.output_size})"
    return None


def _unused_rules(
    layout_map: LayoutMap, variables: Iterable[CoveredVariable], layer_paths: Iterable[str]
) -> dict[str, dict[str, int]]:
    """Returns the rules that determine no layout; for each, the rules that take the paths that it matches."""
    used = {v.rule for v in variables}
    regexes = {key: re.compile(key) for key in layout_map if key not in used}
    if not regexes:
        return {}
    takers = {key: Counter() for key in regexes}
    activations = [f"{path}/{end}" for path in layer_paths for end in ("output", "input")]
    for path in [*(v.path for v in variables if v.part != "optimizer"), *activations]:
        for key in matching_patterns(regexes, path):
            try:
                rule = layout_map.rule(path)
            except ValueError:  # several rules match, which is a finding of its own
                used.add(key)
                continue
            if rule is not None and rule.pattern == key:
                used.add(key)
            elif rule is not None:  # None: an ordered rule that matches an output, but does not apply to outputs
                takers[key][rule.pattern] += 1
    # A rule for scales, zero points or LoRA factors has its effect once the layers are quantized, or given the factors.
    later = {path for v in variables if v.part == "weights" for path in paths_derived_later(v.path)}
    used.update(key for path in later for key in matching_patterns(regexes, path) if not takers[key])
    return {key: dict(takers[key]) for key in regexes if key not in used}


def _idle_axes(
    distribution: Distribution, layout_map: LayoutMap, variables: Iterable[CoveredVariable]
) -> tuple[str, ...]:
    """Returns the mesh axes that shard nothing; none for a distribution whose layouts cannot be known in advance."""
    if not type(distribution).__module__.startswith("keras_dist"):
        return ()
    used = {*distribution._placer.batch_axes, *distribution._placer.sequence_axes}
    all_axes = {v.axes for v in variables} | {layout.axes for layout in layout_map.values()}
    used.update(name for axes in all_axes for name in axis_names(axes))
    return tuple(name for name, size in distribution.device_mesh.axis_sizes.items() if size > 1 and name not in used)

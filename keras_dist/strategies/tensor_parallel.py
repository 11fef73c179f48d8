"""`tensor_parallel_layout_map`: rules that shard weights over one axis, found from what a model computes."""

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import keras
from jax.ad_checkpoint import checkpoint_name

from keras_dist._keras import internals
from keras_dist._report.units import bytes_text
from keras_dist.layout.layout_map import LayoutMap
from keras_dist.layout.rule_matching import strip_model_names
from keras_dist.layout.tensor_layout import Axes
from keras_dist.mesh.device_mesh import DeviceMesh, as_mesh_of_layers
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.dim_graph import Dims, Flow
from keras_dist.strategies.jaxpr_dims import flow_of
from keras_dist.strategies.shard_dim import SMALL, free_dim
from keras_dist.variables.model_or_builder import built

_LENGTH = 128  # about the size of a dim that a model leaves open
_MOST_MOVED = 1 / 16  # of what is summed, that may be gathered besides: a router's choice among experts


def tensor_parallel_layout_map(
    model_or_builder: Any,
    device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh,
    axis: str = "model",
    sequence_parallel: bool = False,
) -> LayoutMap:
    """Returns rules that shard the weights of a model over one axis (tensor parallelism), for any model.

    The model is traced, and the dims of its weights are followed through all that it computes, to where they are
    summed: the columns of one kernel and the rows of the next, the heads of an attention, the experts of a mixture, the
    vocabulary of an embedding. Dims that flow into each other are sharded together, those first that cost the fewest
    all-reduced bytes. Names play no part. What no such dim divides, as few heads of keys and values, stays whole, and a
    warning names it if it is large.

    Args:
        model_or_builder: a built model, deferred or real, that knows its inputs (functional or sequential), or a
            function without arguments that returns one.
        device_mesh: the mesh. Batches are taken to be sharded over its other axes.
        axis: the axis to shard weights over.
        sequence_parallel: whether activations between the sharded layers are sharded over dim 1, the sequence, too:
            what is all-reduced then is gathered and scattered, and norms and dropouts hold and compute their part.

    Returns:
        A map that can be printed, edited and merged: `print(layout_map.to_source())`.

    Raises:
        ValueError: an axis that the mesh does not have, a model that is not built, or one that does not know its
            inputs.
        TypeError: no model and no function.

    Example:

    >>> from keras_dist import create_device_mesh
    >>> model = keras.Sequential(
    ...     [keras.Input((64,)), keras.layers.Dense(256, name="up"), keras.layers.Dense(64, name="down")]
    ... )
    >>> layout_map = tensor_parallel_layout_map(model, create_device_mesh("data:2,model:4"))
    >>> for pattern, layout in layout_map.items():
    ...     print(pattern, layout.axes)
    up/kernel (None, 'model')
    up/bias ('model',)
    down/kernel ('model', None)

    Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022 (sequence parallelism).
    """
    mesh = as_mesh_of_layers(device_mesh)
    if axis not in mesh.axis_sizes:
        raise ValueError(
            f"Weights are sharded over an axis of the mesh. Received: axis={axis!r}, but the mesh has the axes "
            f"{list(mesh.axis_sizes)}. Name one of them."
        )
    with built(model_or_builder) as model:
        choice = _choice(model, mesh, axis)
    wanted: dict[str, Axes] = {weight.path: choice.axes_of(weight.dims) for weight in choice.weights}
    wanted |= choice.of_addends(sequence_parallel)
    wanted |= choice.of_activations(sequence_parallel)
    _warn_of_whole(choice, wanted)
    layout_map = LayoutMap(mesh)
    for pattern, axes in _as_patterns(wanted):
        layout_map[pattern] = axes
    return layout_map


class _Weight(NamedTuple):
    path: str
    shape: tuple[int, ...]
    bytes: int
    dims: Dims
    is_factor: bool  # of a matrix product or a convolution
    is_head: bool  # an embedding that may be called as a head elsewhere


class _Choice(NamedTuple):
    """What is sharded.

    Attributes:
        flow: the dims of the model's program.
        weights: the model's variables.
        sharded: the nodes that are sharded.
        axis: the axis that they are sharded over.
        batch_axes: the axes that batches are sharded over.
        batch: the node of dim 0 of the model's inputs.
    """

    flow: Flow
    weights: list[_Weight]
    sharded: set[int]
    axis: str
    batch_axes: tuple[str, ...]
    batch: int | None

    def axes_of(self, dims: Dims) -> Axes:
        return tuple(self.axis if node in self.sharded else None for node in self.flow.nodes(dims))

    def of_addends(self, sequence_parallel: bool) -> dict[str, Axes]:
        """The axes of large weights that are looked up or added, as embeddings are, by their paths.

        They are sharded along the sequence if activations are, else along their last dim if they can be: to gather what
        they give is cheapest.
        """
        lengths = {node for each in self.flow.tagged for node in self.flow.nodes(each.dims[1:2]) if len(each.dims) == 3}
        found: dict[str, Axes] = {}
        for weight in self.weights:
            if weight.is_factor or weight.bytes <= SMALL or any(self.axes_of(weight.dims)):
                continue
            dims = [
                dim for dim, node in enumerate(self.flow.nodes(weight.dims)) if node is not None and node in lengths
            ]
            dims = dims if sequence_parallel else []
            dims += [dim for dim in [len(weight.shape) - 1] if weight.shape[dim] % self.flow.parts == 0]
            dim = free_dim(weight.shape, [False] * len(weight.shape), self.flow.parts) if not dims else dims[0]
            if dim is not None:
                found[weight.path] = tuple(self.axis if at == dim else None for at in range(len(weight.shape)))
        return found

    def of_activations(self, sequence_parallel: bool) -> dict[str, Axes]:
        """The axes of what layers take and return, by the path of the layer with `/input` or `/output` behind it."""
        found: defaultdict[str, set[Axes]] = defaultdict(set)
        sharded = {weight.path.rpartition("/")[0] for weight in self.weights if any(self.axes_of(weight.dims))}
        addends = {path.rpartition("/")[0] for path in self.of_addends(sequence_parallel)}
        # What an embedding returns when it is called as a head is another thing.
        heads = {weight.path.rpartition("/")[0] for weight in self.weights if weight.is_head}
        # What goes on to another such layer stays in its parts until all are added up.
        goes_on = {each.source for each in self.flow.tagged if each.name.removesuffix("/input") in addends}
        # Of what windows slide over XLA makes other numbers where the batch is not sharded, too (0.10 to 0.12).
        slid_over = {(node, rank) for dim, rank in self.flow.slid_over for node in self.flow.nodes((dim,))}
        for name, dims, shape, source in self.flow.tagged:
            layer, _, end = name.rpartition("/")
            if layer in addends and end == "output" and source in goes_on:
                continue
            if layer in heads or self.flow.nodes(dims)[:1] != (self.batch,) or len(shape) < 2:
                continue
            axes = list(self.axes_of(dims))
            is_between = not any(axes)  # neither columns nor rows
            axes[0] = self.batch_axes if len(self.batch_axes) != 1 else self.batch_axes[0]
            if not sequence_parallel:
                if layer in addends and end == "output" and is_between:
                    found[name].add(tuple(axes))
                continue
            if len(shape) < 3 or (end == "input" and layer not in sharded):
                continue
            length = self.flow.nodes(dims)[1]
            if is_between and end == "output" and length is not None and (length, len(shape)) not in slid_over:
                axes[1] = self.axis
            found[name].add(tuple(axes))
        return {name: next(iter(axes)) for name, axes in found.items() if len(axes) == 1}


def _choice(model: keras.Model, mesh: DeviceMesh, axis: str) -> _Choice:
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    jaxpr, heads = _traced(model, mesh, axis), internals.embeddings_for_heads(model)
    flow = flow_of(jaxpr, mesh.axis_sizes[axis], len(model.trainable_variables))
    weights = [
        _Weight(v.path, tuple(v.shape), _bytes(v), dims, variable in flow.factors or id(v) in heads, id(v) in heads)
        for v, dims, variable in zip(variables, flow.inputs, jaxpr.jaxpr.invars, strict=False)
    ]
    inputs = [dims for dims in flow.inputs[len(variables) :] if dims]
    batch = flow.nodes(inputs[0])[0] if inputs else None
    others = tuple(name for name in mesh.axis_names if name != axis)
    return _Choice(flow, weights, _sharded(flow, weights), axis, others, batch)


def _sharded(flow: Flow, weights: Sequence[_Weight]) -> set[int]:
    """The nodes to shard: each weight asks for its cheapest one, and those that most bytes ask for come first.

    What is gathered on its way to where it is summed is not sharded, small things aside.
    """
    sums, moves, neighbours = flow.sums(), flow.moves(), flow.neighbours()
    asked: defaultdict[int, int] = defaultdict(int)
    for weight in weights:
        nodes = [node for node in flow.nodes(weight.dims) if node is not None and weight.is_factor]
        nodes = [node for node in nodes if moves.get(node, 0) <= _MOST_MOVED * sums.get(node, 0)]
        if nodes:
            asked[min(nodes, key=lambda node: sums.get(node, 0))] += weight.bytes
    chosen: set[int] = set()
    for node in sorted(asked, key=lambda node: (-asked[node], node)):
        if not neighbours.get(node, set()) & chosen:
            chosen.add(node)
    return chosen


class _Tagging(Distribution):
    """Names what layers take and return in the program that is traced."""

    def get_tensor_layout(self, path: str) -> Any:
        return path

    def distribute_outputs(self, outputs: Any, layout: Any) -> Any:
        return jax.tree.map(
            lambda leaf: checkpoint_name(leaf, layout) if isinstance(leaf, jax.Array) else leaf, outputs
        )

    def distribute_inputs(self, path: str, inputs: Any) -> Any:
        return self.distribute_outputs(inputs, path)

    def distribute_weight(self, variable: keras.Variable, value: Any) -> Any:
        return value


def _traced(model: keras.Model, mesh: DeviceMesh, axis: str) -> Any:
    """The jaxpr of the model's call, from its variables and its inputs."""
    symbolic, parts = internals.symbolic_inputs(model), mesh.axis_sizes[axis]
    if symbolic is None:
        raise ValueError(
            "Only of a functional or a sequential model the inputs are known. Received: "
            f"{model.name!r} ({type(model).__name__}). Pass keras.Model(inputs, model(inputs)), with a keras.Input for "
            "each input."
        )

    def traced_with(length):
        def spec(tensor):
            sizes = [size or (length if dim else parts) for dim, size in enumerate(tensor.shape)]
            return jax.ShapeDtypeStruct(sizes, jax.dtypes.canonicalize_dtype(tensor.dtype))

        weights, others = (
            [jax.ShapeDtypeStruct(v.shape, internals.stored_dtype(v)) for v in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
        with _Tagging(mesh).scope():
            return jax.make_jaxpr(model.stateless_call)(weights, others, jax.tree.map(spec, symbolic))

    error: Exception | None = None
    for length in (2**power * parts for power in reversed(range(max(1, (_LENGTH // parts).bit_length())))):
        try:
            return traced_with(length)
        except (TypeError, ValueError) as raised:  # more than the model takes, perhaps
            error = error or raised
    raise ValueError(
        f"The model must be called on its inputs to be traced. Received: {model.name!r}, with which sizes of "
        f"{parts} to {_LENGTH} for the dims that its inputs leave open raise {type(error).__name__}: "
        f"{' '.join(str(error).split())[:400]}. Give its inputs their whole shapes."
    ) from error


def _bytes(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * jax.numpy.dtype(internals.stored_dtype(variable)).itemsize


def _warn_of_whole(choice: _Choice, wanted: Mapping[str, Axes]) -> None:
    whole = [weight for weight in choice.weights if weight.bytes > SMALL and not any(wanted[weight.path])]
    if whole:
        held, largest = sum(weight.bytes for weight in whole), sorted(whole, key=lambda weight: -weight.bytes)[:5]
        warnings.warn(
            f"{len(whole)} weights ({bytes_text(held)}) stay whole on each device of axis {choice.axis!r} (size "
            f"{choice.flow.parts}), which divides no dim of theirs that flows into the layers around them: "
            f"{', '.join(f'{weight.path} {weight.shape}' for weight in largest)}{', ...' * (len(whole) > 5)}. "
            "Add rules of your own for them, or shard them over another axis with FullyShardedDataParallel.",
            stacklevel=3,
        )


def _as_patterns(wanted: Mapping[str, Axes]) -> Iterator[tuple[str, Axes]]:
    """Rules for paths as few regexes: those that differ by numbers only are one where they are sharded alike."""
    groups: defaultdict[str, dict[str, Axes]] = defaultdict(dict)
    for path, axes in wanted.items():
        exact = re.escape(strip_model_names(path)).replace(r"\-", "-")
        groups[re.sub(r"\d+", "[0-9]+", exact)][exact] = axes
    for pattern, members in groups.items():
        alike = len(members) > 1 and len(set(members.values())) == 1
        for exact, axes in [(pattern, next(iter(members.values())))] if alike else members.items():
            if any(axes) or len(axes) > 1:  # of kernels also which stay whole
                yield exact, axes

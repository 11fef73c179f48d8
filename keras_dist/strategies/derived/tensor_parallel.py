"""`tensor_parallel_layout_map`: rules that shard weights over one axis, derived from what a model computes."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import keras
from jax.extend.core import Literal

from keras_dist._keras import internals, model_structure
from keras_dist._keras.quantized_weights import record_variables
from keras_dist._report.units import bytes_text, counted
from keras_dist._report.user_warnings import warn
from keras_dist.layout.derived_weights import BaseWeight, axes_for_rule, base_weight_of, derived_axes
from keras_dist.layout.layout_map import LayoutMap
from keras_dist.layout.rule_matching import strip_model_names
from keras_dist.layout.tensor_layout import Axes, axis_tuple
from keras_dist.mesh.device_mesh import DeviceMesh, as_auto_mesh
from keras_dist.sharding.shard_dim import MIN_SHARD_BYTES, best_dim
from keras_dist.strategies.derived import expert_weights
from keras_dist.strategies.derived.merged_rules import Rules, merged_layout_map
from keras_dist.strategies.derived.model_trace import model_to_trace, trace_model
from keras_dist.tracing.dim_graph import DimGraph, Dims, NamedTensor
from keras_dist.tracing.jaxpr_dims import read_dims

_MAX_GATHERED = 1 / 16  # of the all-reduced bytes; allows small gathers, as of a router's choice among experts


def tensor_parallel_layout_map(
    model_or_builder: keras.Layer | Callable[[], keras.Layer],
    device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh,
    axis: str = "model",
    sequence_parallel: bool = False,
    batch: Any = None,
    sequence_dim_name: str | Sequence[str] | None = None,
) -> LayoutMap:
    """Returns rules that shard the weights of any model over one mesh axis (tensor parallelism).

    The model is traced, and the dims of its weights are followed through the program to the sums that contract them:
    the columns of one kernel and the rows of the next, the heads of an attention, the experts of a mixture, the
    vocabulary of an embedding. Dims that flow into each other are sharded together. If several choices exclude each
    other, the one that all-reduces the fewest bytes is taken. Names of layers do not matter. Some weights have no dim
    that can be sharded this way, such as a kernel with fewer key and value heads than the axis has devices. They stay
    replicated, and a warning names the large ones.

    Of a mixture of experts, the width of all experts is sharded if each device gets at least 128 of it, since all
    devices then compute the same number of rows, whatever the router chooses. Otherwise, and if gate and up projections
    are fused, each device has some of the experts. Routers stay replicated.

    Args:
        model_or_builder: A built model, deferred or not, or a function without arguments that returns one, built or
            not. A model that is neither functional nor sequential needs `batch`.
        device_mesh: The mesh. Batches are assumed to be sharded over the axes that the other arguments do not name.
        axis: The axis to shard weights over.
        sequence_parallel: Whether to shard activations between the sharded layers over dim 1, the sequence. Each
            all-reduce becomes an all-gather and a reduce-scatter, and norms and dropouts compute and hold one shard.
        batch: The batch to trace the model with, as `keras_dist.plan` takes it: x, (x, y) or (x, y, sample_weight), of
            arrays, `jax.ShapeDtypeStruct`s or shapes in the structure of the model's inputs, or in a dict by their
            names; for a model whose `call` has several arguments, in a dict by theirs. Targets and values are not used,
            and the number of rows does not matter. By default, sizes are tried in turn for dims that the inputs leave
            unknown; a model whose inputs depend on each other may take none of them.
        sequence_dim_name: The mesh axis, or axes, that the distribution shards sequences over (context parallelism), as
            it is passed to `ModelParallel`. No rule shards a weight over it, and rules for activations shard dim 1 over
            it, with sequence parallelism over both.

    Returns:
        A map that can be printed, edited and merged: `print(layout_map.to_source())`.

    Raises:
        ValueError: The mesh has no such axis, or one axis is named twice, or the model is not built, does not know its
            inputs, or cannot be traced, or the batch does not fit its inputs.
        TypeError: Neither a model nor a function that returns one.

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

    A model whose inputs must have certain sizes, here half as many pairs as tokens:

    >>> tokens = keras.Input((None, 64), name="tokens")
    >>> pairs = keras.Input((None, 64), name="pairs")
    >>> hidden = keras.layers.Dense(256, name="wide")(tokens[:, ::2] + pairs)
    >>> model = keras.Model([tokens, pairs], keras.layers.Dense(64, name="narrow")(hidden))
    >>> shapes = {"tokens": (8, 32, 64), "pairs": (8, 16, 64)}
    >>> layout_map = tensor_parallel_layout_map(model, create_device_mesh("data:2,model:4"), batch=shapes)
    >>> layout_map["narrow/kernel"].axes
    ('model', None)

    With context parallelism:

    >>> mesh = create_device_mesh("data:2,context:2,model:2")
    >>> inputs = keras.Input((32, 64))
    >>> hidden = keras.layers.Dense(256, name="wide")(keras.layers.LayerNormalization(name="norm")(inputs))
    >>> model = keras.Model(inputs, keras.layers.Dense(64, name="narrow")(hidden))
    >>> layout_map = tensor_parallel_layout_map(model, mesh, sequence_parallel=True, sequence_dim_name="context")
    >>> layout_map["wide/kernel"].axes, layout_map["wide/output"].axes
    ((None, 'model'), ('data', 'context', 'model'))
    >>> layout_map["norm/output"].axes
    ('data', ('context', 'model'), None)
    >>> distribution = ModelParallel(layout_map=layout_map, batch_dim_name="data", sequence_dim_name="context")

    Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022 (sequence parallelism).
    """
    mesh = as_auto_mesh(device_mesh)
    if axis not in mesh.axis_sizes:
        raise ValueError(
            f"Cannot shard weights over axis {axis!r}: the mesh has the axes {list(mesh.axis_sizes)}. Pass one of them."
        )
    sequence_axes = axis_tuple(sequence_dim_name)
    for name in sequence_axes:
        if name not in mesh.axis_sizes or (*sequence_axes, axis).count(name) > 1:
            raise ValueError(
                f"Cannot shard sequences over sequence_dim_name={sequence_dim_name!r} and weights over axis {axis!r}: "
                f"they must be different axes of the mesh, which has {list(mesh.axis_sizes)}."
            )
    with model_to_trace(model_or_builder, mesh, mesh.axis_sizes[axis], batch) as model:
        solution = solve(model, mesh, axis, batch)
    rules = solution.rules(mesh, sequence_parallel, sequence_axes)
    _warn_of_large_replicas(solution, rules)
    return merged_layout_map(rules, mesh, solution.model_name)


class _Weight(NamedTuple):
    """A variable of the model.

    `is_head`: an embedding that may be called as the output head, too. `is_beside_experts`: a router, or a bias of
    experts, which is replicated where it is not sharded with their weights. `share`: the fraction of it that a token is
    multiplied with.
    """

    path: str
    shape: tuple[int, ...]
    bytes: int
    dims: Dims
    is_matmul_operand: bool
    is_head: bool
    base: BaseWeight | None
    is_beside_experts: bool
    share: float


class Solution(NamedTuple):
    """Which nodes are sharded over an axis. It holds for every mesh on which the axis has the same size."""

    graph: DimGraph
    weights: list[_Weight]
    sharded: set[int]
    axis: str
    batch: int | None  # the node of dim 0 of the model's inputs
    lengths: set[tuple[int | None, int]]  # those of dim 1; see `_length`
    rows: int  # the number that was traced
    layers: Set[str]  # paths of the model's layers, without those that a call creates
    experts: frozenset[int]  # those of the dims of experts
    model_name: str | None  # without number, if Keras has chosen it
    batch_axes: tuple[str, ...] = ()
    sequence_axes: tuple[str, ...] = ()

    def rules(self, mesh: DeviceMesh, sequence_parallel: bool, sequence_axes: tuple[str, ...] = ()) -> Rules:
        """Returns the axes of each weight, and of what layers take and return, by path; None where there is no rule."""
        batch_axes = tuple(name for name in mesh.axis_names if name != self.axis and name not in sequence_axes)
        solution = self._replace(batch_axes=batch_axes, sequence_axes=sequence_axes)
        tables = solution.table_rules(sequence_parallel)
        axes = {weight.path: solution.axes_of(weight.dims) for weight in self.weights} | tables
        derived = [(weight.path, weight.shape, weight.base) for weight in self.weights if weight.base is not None]
        axes |= {path: axes_for_rule(axes[path], base.dims) for path, _, base in derived if base.path == path}

        def follows(path: str, shape: tuple[int, ...], base: BaseWeight) -> bool:
            is_other = base.path != path and base.path in axes
            return is_other and axes[path] == derived_axes(axes[base.path], base.dims, shape, mesh.axis_sizes)

        # A weight that is derived from another has its layout, also if the model is quantized, or given LoRA factors,
        # only after these rules are in use.
        without_rule = {each[0]: None for each in derived if follows(*each)}
        return axes | without_rule | solution.activation_rules(tables, sequence_parallel)

    @property
    def all_reduced_bytes(self) -> float:
        """Bytes that are all-reduced over the axis for each row of a batch, forward and backward."""
        sizes = self.graph.all_reduce_bytes()
        return sum(sizes.get(node, 0.0) for node in self.sharded) / self.rows

    @property
    def sharded_fraction(self) -> float:
        """Fraction of the matrix multiplications that are sharded, by the bytes of what a token is multiplied with."""
        operands = [weight for weight in self.weights if weight.is_matmul_operand]
        sizes = [(weight.share * weight.bytes, any(self.axes_of(weight.dims))) for weight in operands]
        return sum(size for size, is_sharded in sizes if is_sharded) / max(1, sum(size for size, _ in sizes))

    def axes_of(self, dims: Dims) -> Axes:
        """Returns the axes of a tensor.

        Where two dims have one node, only the last is sharded: the recurrent kernel of a `SimpleRNN` maps a state onto
        the next one, so its rows and columns are sharded together, but an axis can shard only one of them.
        """
        sharded = [dim for dim, node in enumerate(self.graph.find(dims)) if node in self.sharded]
        return self._only(sharded[-1:], len(dims))

    def _only(self, sharded_dims: Sequence[int], rank: int) -> Axes:
        return tuple(self.axis if dim in sharded_dims else None for dim in range(rank))

    def table_rules(self, sequence_parallel: bool) -> dict[str, Axes]:
        """Returns axes for large weights that are looked up or added, such as embeddings, by path.

        With sequence parallelism they are sharded along the sequence if they have it, but not if each device has a part
        of it only. Otherwise the last dim is best: the lookup is local, and gathering its result is the cheapest
        collective.
        """
        sequence_parallel = sequence_parallel and not self.sequence_axes
        lengths = {self.graph.find(t.dims)[1] for t in self.graph.named_tensors if len(t.dims) == 3}
        rules: dict[str, Axes] = {}
        for weight in self.weights:
            is_product = weight.is_matmul_operand or weight.is_beside_experts
            if is_product or weight.bytes <= MIN_SHARD_BYTES or any(self.axes_of(weight.dims)):
                continue
            rank, nodes = len(weight.shape), self.graph.find(weight.dims)
            dims = [dim for dim, node in enumerate(nodes) if sequence_parallel and node in lengths - {None}]
            dims += [rank - 1] if weight.shape[-1] % self.graph.axis_size == 0 else []
            dim = dims[0] if dims else best_dim(weight.shape, [False] * rank, self.graph.axis_size)
            if dim is not None:
                rules[weight.path] = self._only([dim], rank)
        return rules

    def activation_rules(self, table_rules: Mapping[str, Axes], sequence_parallel: bool) -> dict[str, Axes | None]:
        """Returns axes for what layers take and return, by the layer's path with `/input` or `/output` appended.

        None is for paths without a rule. All tensors of a path with a rule have the same axes. Paths leave out names
        that Keras gave to nested models, so layers of several models may share a path. What such a model itself returns
        has no rule.
        """
        sharded = {_layer(weight.path) for weight in self.weights if any(self.axes_of(weight.dims))}
        tables = {_layer(path) for path in table_rules}
        # An embedding that is also called as the head returns two different things under one path.
        heads = {_layer(weight.path) for weight in self.weights if weight.is_head}
        # The output of one table that is the input of another stays sharded until all of them are added up.
        passed_on = {t.origin for t in self.graph.named_tensors if t.name.removesuffix("/input") in tables}
        # XLA computes wrong numbers for convolutions over a sharded dim, if the batch is not sharded, too (JAX 0.10
        # to 0.12).
        window_dims = {(node, rank) for dim, rank in self.graph.window_dims for node in self.graph.find((dim,))}

        def axes_of_tensor(tensor: NamedTensor) -> Axes | None:
            name, dims, shape, origin = tensor
            layer, is_output = _layer(name), name.endswith("/output")
            is_passed_on = layer in tables and is_output and origin in passed_on
            if is_passed_on or layer not in self.layers or layer in heads or len(shape) < 2:
                return None
            (batch, length), axes = self.graph.find(dims[:2]), list(self.axes_of(dims))
            if batch != self.batch or not self.experts.isdisjoint(self.graph.find(dims)):
                return None
            is_replicated = not any(axes)
            axes[0] = _entry(self.batch_axes)
            has_window = (length, len(shape)) in window_dims
            is_sequence = len(shape) > 2 and _length(self.graph, dims, shape) in self.lengths and not has_window
            axes[1] = _entry(self.sequence_axes) if is_sequence and axes[1] is None else axes[1]
            if not sequence_parallel:
                return tuple(axes) if layer in tables and is_output and is_replicated else None
            if len(shape) < 3 or (not is_output and layer not in sharded):
                return None
            if is_replicated and is_output and length is not None and not has_window:
                axes[1] = _entry((*self.sequence_axes, self.axis) if is_sequence else (self.axis,))
            return tuple(axes)

        found: defaultdict[str, set[Axes | None]] = defaultdict(set)
        for tensor in self.graph.named_tensors:
            found[strip_model_names(tensor.name)].add(axes_of_tensor(tensor))
        return {path: next(iter(axes)) if len(axes) == 1 and "/" in path else None for path, axes in found.items()}


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes if len(axes) > 1 else next(iter(axes), None)


def _length(graph: DimGraph, dims: Dims, shape: Sequence[int]) -> tuple[int | None, int]:
    """Identifies dim 1 of a tensor: by its node, or by its size where it has none, as the axis does not divide it."""
    node = graph.find(dims)[1]
    return node, shape[1] if node is None else 0


def _layer(path: str) -> str:
    return path.rpartition("/")[0]


def solve(model: keras.Model, mesh: DeviceMesh, axis: str, batch: Any) -> Solution:
    """Traces a built model, and chooses which dims of its weights to shard over an axis of a mesh."""
    axis_size = mesh.axis_sizes[axis]
    jaxpr, mixtures = expert_weights.with_mixtures(trace_model(model, mesh, axis_size, batch))
    shares, routers = expert_weights.shares_of_tokens(jaxpr, mixtures), expert_weights.routers(jaxpr, mixtures)
    later, heads = expert_weights.summed_later(mixtures), model_structure.reversible_embeddings(model)
    graph = read_dims(jaxpr, axis_size, len(model.trainable_variables), later)
    record_variables(model)
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    weights, without_rule = [], _without_rule(variables, jaxpr)
    for v, dims, invar in zip(variables, graph.inputs, jaxpr.jaxpr.invars, strict=False):
        if id(v) in without_rule:
            continue
        is_head = id(v) in heads
        is_operand = is_head or invar in graph.matmul_operands
        dims = (None,) * len(dims) if invar in routers else dims
        is_beside = invar in routers or (invar in shares and not is_operand)
        kinds = is_operand, is_head, base_weight_of(v), is_beside
        weights.append(_Weight(v.path, tuple(v.shape), internals.stored_bytes(v), dims, *kinds, shares.get(invar, 1.0)))
    shapes = [invar.aval.shape for invar in jaxpr.jaxpr.invars[len(variables) :]]
    inputs = [pair for pair in zip(graph.inputs[len(variables) :], shapes, strict=True) if pair[1]]
    rows = graph.find(inputs[0][0])[0] if inputs else None
    lengths = {_length(graph, dims, shape) for dims, shape in inputs if len(shape) > 1}
    num_rows = max((shape[0] for _, shape in inputs), default=axis_size)
    layers = model_structure.layers_by_path(model).keys()
    sharded = _nodes_to_shard(graph, weights, expert_weights.preferred_nodes(mixtures, graph))
    experts = frozenset(sharded & expert_weights.expert_nodes(mixtures, graph))
    name = model_structure.name_without_number(model)
    return Solution(graph, weights, sharded, axis, rows, lengths, num_rows, layers, experts, name)


def _without_rule(variables: Sequence[keras.Variable], jaxpr: Any) -> set[int]:
    """Returns the ids of variables that need no rule of their own, of the first inputs of a traced call.

    These are the state of optimizers that a model tracks, which follows its weights, and weights that the call does not
    use and whose paths are those of others that it does: a clone of a network has its paths, an average of its weights
    for example.
    """
    used = {invar for eqn in jaxpr.jaxpr.eqns for invar in eqn.invars if not isinstance(invar, Literal)}
    inputs = list(zip(variables, jaxpr.jaxpr.invars, strict=False))
    used_paths = {v.path for v, invar in inputs if invar in used}
    optimizers = {v.path.rpartition("/")[0] for v in variables if v.name == "iteration" and not v.trainable}
    return {
        id(v)
        for v, invar in inputs
        if (invar not in used and v.path in used_paths) or v.path.rpartition("/")[0] in optimizers
    }


def _nodes_to_shard(graph: DimGraph, weights: Sequence[_Weight], preferred: Set[int]) -> set[int]:
    """Returns the nodes to shard: every weight votes for a node with its bytes, and most votes win.

    That is its preferred node, if it has one, otherwise its cheapest. A node that is gathered on its way to a sum is no
    candidate, unless little is gathered. A node that shares a tensor with a chosen one is passed over.
    """
    all_reduced, gathered, conflicts = graph.all_reduce_bytes(), graph.gather_bytes(), graph.conflicts()
    votes: defaultdict[int, int] = defaultdict(int)
    for weight in weights:
        nodes = [node for node in graph.find(weight.dims) if node is not None and weight.is_matmul_operand]
        cheap = [node for node in nodes if gathered.get(node, 0) <= _MAX_GATHERED * all_reduced.get(node, 0)]
        if nodes := [node for node in nodes if node in preferred] or cheap:
            votes[min(nodes, key=lambda node: all_reduced.get(node, 0))] += weight.bytes
    chosen: set[int] = set()
    for node in sorted(votes, key=lambda node: (-votes[node], node)):
        if not conflicts.get(node, set()) & chosen:
            chosen.add(node)
    return chosen


def _warn_of_large_replicas(solution: Solution, rules: Rules) -> None:
    weights = [w for w in solution.weights if w.base is None or w.base.path == w.path]
    replicas = [
        w for w in weights if not w.is_beside_experts and w.bytes > MIN_SHARD_BYTES and not any(rules[w.path] or ())
    ]
    if replicas:
        largest = sorted(replicas, key=lambda weight: -weight.bytes)[:5]
        count = counted(len(replicas), "weight")
        warn(
            f"{count} ({bytes_text(sum(weight.bytes for weight in replicas))}) will be replicated over axis "
            f"{solution.axis!r} (size {solution.graph.axis_size}): no dim can be sharded together with the layers "
            f"around it. Largest: {', '.join(f'{weight.path} {weight.shape}' for weight in largest)}. Add your own "
            "rules for them, or shard them over another axis with FullyShardedDataParallel.",
        )

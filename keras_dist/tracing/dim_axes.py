"""Over which mesh axes a dim of a traced value is sharded, and whether its elements are repeated along a dim.

Nothing in JAX tells how XLA will shard a value inside a jitted function. But its dims come from somewhere: dim 2 of a
query (batch, sequence, heads, features) is dim 1 of the kernel that computed it, and that has a layout.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist.layout.tensor_layout import Axes, axis_tuple
from keras_dist.tracing.dim_graph import DimGraph
from keras_dist.tracing.jaxpr_dims import read_equation
from keras_dist.tracing.jaxpr_evaluation import inner_jaxprs
from keras_dist.tracing.kept_dims import regrouped
from keras_dist.tracing.primitives import UNCHANGED
from keras_dist.tracing.traced_values import Node, node_of


def axes_of_dim(value: Any, dim: int, axes_of_weight: Callable[[Any], Axes | None]) -> tuple[str, ...] | None:
    """Returns the mesh axes over which a dim of a traced value is sharded, or None if that cannot be known.

    The dim is followed backwards, through whatever keeps it, to a sharding constraint or a value whose layout is
    known. Of several operands that have the dim, the first that leads to an answer is taken. `axes_of_weight` returns
    the axes of each dim of a value if it is a weight, otherwise None. For example, dim 1 of `x @ kernel` has the axes
    of dim 1 of `kernel`.
    """
    pending, seen = [(node_of(value), dim)], set()
    while pending:
        node, dim = pending.pop()
        if (node, dim) in seen:
            continue
        seen.add((node, dim))
        if (axes := _constrained_axes(node, dim)) is not None:
            return axes
        if node.root is not None and (layout := axes_of_weight(node.root)) is not None:
            return axis_tuple(layout[dim])
        pending += reversed(_sources(node, dim))
    return None


def without_repeats(value: Any, dim: int) -> tuple[Any, int]:
    """Returns a value without the repeats of its elements along a dim, and how often each is there.

    KerasHub repeats keys and values for each group of queries, which a kernel need not be given. Of a traced
    `jnp.repeat(key, 4, axis=2)`, dim 2 gives `key` and 4; a value that was not made so is returned as it is, with 1.
    """
    repeats = _repeats(node_of(value), dim)
    if repeats == 1:
        return value, 1
    # Not the value before `repeat` itself: its tracer would have no gradient while the value is differentiated. XLA
    # computes neither the repeats nor this slice of them, and fuses the gradients of both.
    shape = (*value.shape[:dim], value.shape[dim] // repeats, repeats, *value.shape[dim + 1 :])
    return jax.lax.index_in_dim(jnp.reshape(value, shape), 0, dim + 1, keepdims=False), repeats


def _constrained_axes(node: Node, dim: int) -> tuple[str, ...] | None:
    """Returns the axes that a sharding constraint or `shard_map` asks for; None if the dim is left to the compiler."""
    spec = None
    if node.primitive == "shard_map":
        spec = node.params["out_specs"][node.output]
    elif node.primitive == "sharding_constraint" and isinstance(node.params["sharding"], NamedSharding):
        spec = node.params["sharding"].spec
    if spec is None or dim in node.params.get("unconstrained_dims", ()):
        return None
    entry = spec[dim] if dim < len(spec) else None
    return None if entry is PartitionSpec.UNCONSTRAINED else axis_tuple(entry)


def _sources(node: Node, dim: int) -> list[tuple[Node, int]]:
    """Returns the operands that a dim may come from, and its place there."""
    if node.equation is None or inner_jaxprs(node.params):  # a leaf; a loop, for example
        return []
    graph = DimGraph(axis_size=1)
    inputs = [graph.new_dims(operand.shape) for operand in node.inputs]
    outputs = read_equation(graph, node.equation, inputs)
    source = graph.find(outputs[node.output])[dim]
    if node.primitive == "gather":  # rows of a table by indices, for example
        inputs[0] = ()
    return [
        (operand, place)
        for operand, dims in zip(node.inputs, inputs, strict=True)
        for place, other in enumerate(graph.find(dims))
        if other is not None and other == source
    ]


def _repeats(node: Node, dim: int) -> int:
    """Returns how often each element of a value follows itself along a dim, as far as the operations show it."""
    while True:
        if node.primitive == "reshape":
            groups = regrouped(node.inputs[0].shape, node.shape)
            places = next((before for before, after in groups if after == [dim]), [])
            node, dim = node.inputs[0], places[-1] if places else -1
            if not places or (len(places) > 1 and not _is_broadcast(node, dim)):
                return 1
        elif _is_broadcast(node, dim):
            return node.shape[dim]
        elif node.primitive in (*UNCHANGED, "convert_element_type", "transpose") and node.shape[dim] > 1:
            ((node, dim),) = _sources(node, dim)
        else:
            return 1


def _is_broadcast(node: Node, dim: int) -> bool:
    """Whether all elements along a dim are the same because the dim was added or enlarged."""
    return node.primitive == "broadcast_in_dim" and not _sources(node, dim)

"""Tensors where layers compute with them, in traced functions: weights as they are read, outputs on their way back."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist.layout.tensor_layout import TensorLayout, axis_tuple
from keras_dist.mesh.device_mesh import as_device_mesh


def in_compute_layout(
    value: Any, stored: TensorLayout, used: TensorLayout, update: TensorLayout, batch_axes: Sequence[str]
) -> Any:
    """Brings a weight that a traced function reads from the layout it lies in to the one it is computed with.

    The value is pinned to the layout it lies in first, in the dtype that it is computed in: what travels is then the
    part of a device, in as few bytes as the layer asks for. Its gradient is summed and scattered to the layout of the
    update.

    Args:
        value: what a layer reads.
        stored: the layout it lies in.
        used: the layout to compute with.
        update: the layout of its gradient.
        batch_axes: the axes that the gradient is summed over.

    Returns:
        The value to compute with.
    """
    if stored.axes == used.axes == update.axes:
        return value
    return _laid_out(value, used, lambda gradient: _scattered(gradient, used, update, batch_axes), stored)


def out_of_compute_layout(value: Any, layout: TensorLayout, computed: TensorLayout) -> Any:
    """Brings what a layer returns to a layout, and its gradient back to the one that the layer computes with.

    A partitioner that is told of the first one only gathers the gradient once for each product that it is used in.

    Args:
        value: what a layer returns.
        layout: the layout to bring it to.
        computed: the layout to bring its gradient to.
    """
    return _laid_out(
        value,
        layout,
        lambda gradient: with_sharding_constraint(
            with_sharding_constraint(gradient, layout.backend_layout), computed.backend_layout
        ),
    )


def _laid_out(
    value: Any, layout: TensorLayout, of_gradient: Callable[[Any], Any], stored: TensorLayout | None = None
) -> Any:
    @jax.custom_jvp
    def laid_out(value):
        if stored is not None:  # of the value only: a gradient that was scattered stays so
            value = with_sharding_constraint(value, stored.backend_layout)
        return with_sharding_constraint(value, layout.backend_layout)

    @laid_out.defjvp
    def with_tangent(primals, tangents):
        (value,), (tangent,) = primals, tangents
        if tangent.dtype != jax.dtypes.float0:  # that of integers
            # What is done to a tangent is transposed for the gradient, and both may be asked for.
            (tangent,) = jax.linear_transpose(of_gradient, value)(tangent)
        return laid_out(value), tangent

    return laid_out(value)


def _scattered(gradient: Any, used: TensorLayout, update: TensorLayout, batch_axes: Sequence[str]) -> Any:
    """Pins the sum of a gradient to the layout of its update, in a way that compilers make a reduce-scatter of.

    Asked for parts of a sum at once, a partitioner may make a chain of permutes of the matrix multiplication before it
    (XLA:TPU), or move activations. So the sum is asked for first, and then its parts. But among replicas and shards
    XLA:GPU makes a reduce-scatter and an all-reduce only of what is asked for at once.
    """
    mesh = as_device_mesh(used.device_mesh)
    if mesh.backend_mesh.devices.flat[0].platform == "tpu":
        gradient = _scattered_on_tpu(gradient, used, update, [name for name in mesh.axis_names if name in batch_axes])
    elif {name for entry in update.axes for name in axis_tuple(entry)}.issuperset(batch_axes):
        gradient = with_sharding_constraint(gradient, used.backend_layout)
    return with_sharding_constraint(gradient, update.backend_layout)


def _scattered_on_tpu(gradient: Any, used: TensorLayout, update: TensorLayout, summed: Sequence[str]) -> Any:
    """Scatters a sum along a dim of its own, as many parts as devices take part in it, in their order.

    XLA:TPU reduces and scatters along a dim that it does not lay out in tiles, and among all devices of a sum; else it
    all-reduces. Replicas then gather their part from each other: all of it is as much as a reduce-scatter among shards
    and an all-reduce among replicas send.
    """
    mesh, rank = as_device_mesh(used.device_mesh), gradient.ndim
    before, after = ([*layout.axes, *[None] * (rank - len(layout.axes))] for layout in (used, update))
    changed = [dim for dim in range(rank) if before[dim] != after[dim]]
    if len(changed) != 1 or before[dim := changed[0]] is not None:
        return gradient
    shards = axis_tuple(after[dim])
    names = [*shards, *(name for name in summed if name not in shards)]  # of the parts of the dim, outermost first
    sizes = [mesh.axis_sizes[name] for name in names]
    parts = math.prod(sizes)
    if set(names) != set(summed) or gradient.shape[dim] % parts:
        return gradient

    def pinned(value, entries):
        spec = PartitionSpec(*before[:dim], *entries, *before[dim:])  # behind the entries lies the rest of the dim
        return with_sharding_constraint(value, NamedSharding(mesh.backend_mesh, spec))

    def ordered(value, order):
        return value.transpose(*range(dim), *(dim + place for place in order), *range(dim + len(names), value.ndim))

    lead, rest = gradient.shape[:dim], (gradient.shape[dim] // parts, *gradient.shape[dim + 1 :])
    value = ordered(gradient.reshape(*lead, *sizes, *rest), [names.index(name) for name in summed])
    value = pinned(pinned(value.reshape(*lead, parts, *rest), [None]), [tuple(summed)])
    if len(names) > len(shards):
        value = value.reshape(*lead, *(mesh.axis_sizes[name] for name in summed), *rest)
        value = pinned(ordered(value, [summed.index(name) for name in names]), names)
        value = pinned(value, [name if name in shards else None for name in names])
    return value.reshape(gradient.shape)

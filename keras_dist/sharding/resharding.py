"""The layouts of weights and their gradients, and how these and activations are resharded inside traced functions."""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax.lax import with_sharding_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from keras_dist.layout.tensor_layout import TensorLayout, axis_names, axis_tuple
from keras_dist.mesh.device_mesh import as_device_mesh
from keras_dist.sharding.per_device import on_devices
from keras_dist.tracing.kept_dims import function_with_gradient
from keras_dist.variables.variable_layouts import VariableSpec, layout_under


class WeightLayouts(NamedTuple):
    """The layout in which a weight is stored, that in which layers compute with it, and that of its gradient."""

    stored: TensorLayout
    compute: TensorLayout
    update: TensorLayout


def weight_layouts(variable: keras.Variable, distribution: Any) -> WeightLayouts:
    """Returns the layouts of a weight under a distribution. One that was created with a layout has that throughout."""
    spec, stored = VariableSpec.of(variable), layout_under(variable, distribution)
    if stored != distribution.get_variable_layout(spec):  # the user passed its layout, or a sharding of JAX
        if not isinstance(stored, TensorLayout):
            axes = getattr(stored, "axes", getattr(stored, "spec", ()))
            is_on_mesh = set(axis_names(axes)) <= set(distribution.device_mesh.axis_names)
            stored = TensorLayout(axes if is_on_mesh else (), distribution.device_mesh)
        return WeightLayouts(stored, stored, stored)
    return WeightLayouts(stored, distribution.get_compute_layout(spec), distribution.get_update_layout(spec))


def to_compute_layout(
    weight: Any, stored: TensorLayout, compute: TensorLayout, update: TensorLayout | None, batch_axes: Sequence[str]
) -> Any:
    """Reshards a traced weight from its stored layout to that of compute, and its gradient to that of the update.

    The value, already cast to the dtype of compute, is constrained to the stored layout first. So each device sends
    only its shard, in as few bytes as the layer needs. The gradient, a sum over `batch_axes`, is reduce-scattered;
    without `update` it stays as it is.
    """
    if stored.axes == compute.axes and update in (None, stored):
        return weight

    def reshard_gradient(gradient: Any) -> Any:
        return gradient if update is None else _reduce_scatter(gradient, compute, update, batch_axes)

    return _with_gradient(weight, lambda weight: _constrained(weight, stored, compute), reshard_gradient)


def with_gradient_layout(value: Any, layout: TensorLayout, gradient_layout: TensorLayout) -> Any:
    """Reshards a traced output of a layer, and its gradient to the layout that the layer computes with.

    With a constraint on the output alone, a partitioner gathers the gradient once for each product that uses it.
    """

    def reshard_gradient(gradient: Any) -> Any:
        return _constrained(gradient, layout, gradient_layout)

    return _with_gradient(value, lambda value: _constrained(value, layout), reshard_gradient)


def _constrained(value: Any, *layouts: TensorLayout) -> Any:
    for layout in layouts:
        value = with_sharding_constraint(value, layout.backend_layout)
    return value


def _with_gradient(value: Any, change: Callable[[Any], Any], change_gradient: Callable[[Any], Any]) -> Any:
    """Returns `change(value)`, and applies a linear function to the gradient."""
    changed = jax.custom_jvp(change)

    @changed.defjvp
    def with_tangent(primals, tangents):
        (value,), (tangent,) = primals, tangents
        if tangent.dtype != jax.dtypes.float0:  # the tangent of integers
            # JAX transposes what is done to the tangent into what is done to the gradient.
            (tangent,) = jax.linear_transpose(change_gradient, value)(tangent)
        return changed(value), tangent

    return changed(value)


def changed_shardings(equation: Any) -> list[Any]:
    """Returns the shardings that `to_compute_layout` or `with_gradient_layout` gives a value in a traced program.

    They are given one after the other. There are none in other equations: a function that a user writes, and that does
    the same to a value, may compute another gradient.
    """
    _, file = function_with_gradient(equation)
    if not file.startswith(__file__):
        return []
    return [each.params["sharding"] for each in equation.params["call_jaxpr"].eqns]


def unsharded_along(dims: Collection[int], rank: int, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns a sharding that leaves those dims of an array unsharded, and the others to the compiler."""
    spec = PartitionSpec(*(None if dim in dims else PartitionSpec.UNCONSTRAINED for dim in range(rank)))
    return NamedSharding(mesh, spec)


def sharding_of_summands(compute: TensorLayout, axes: Sequence[str]) -> NamedSharding:
    """Returns the sharding of an array of summands of a gradient: dim 0 over `axes`, the others as each summand has."""
    sharding = without_axes(compute, axes).backend_layout
    return NamedSharding(sharding.mesh, PartitionSpec(tuple(axes), *sharding.spec))


def without_axes(layout: TensorLayout, axes: Collection[str]) -> TensorLayout:
    """Returns a layout that shards no dim over those axes. That of a summand has none over which there are summands."""
    others = [tuple(name for name in axis_tuple(entry) if name not in axes) or None for entry in layout.axes]
    return TensorLayout(others, layout.device_mesh)


def reduce_summands(summands: Any, axes: Sequence[str], compute: TensorLayout, update: TensorLayout) -> Any:
    """Returns the sum of a gradient's summands in the layout of its update, in one reduce-scatter where possible.

    They are sharded as `sharding_of_summands` says.
    """
    compute = without_axes(compute, axes)
    device_mesh = as_device_mesh(compute.device_mesh)
    dim, shard_axes = _scattered_dim(compute, update, axes)
    num_parts = math.prod(device_mesh.axis_sizes[name] for name in shard_axes)
    others = tuple(name for name in axes if name not in shard_axes)

    def on_device(summand: Any) -> Any:
        summand = summand[0]
        if dim is not None:
            # XLA:TPU makes a reduce-scatter only along a dim that it does not tile.
            shape = (*summand.shape[:dim], num_parts, -1, *summand.shape[dim + 1 :])
            summand = jax.lax.psum_scatter(jnp.moveaxis(summand.reshape(shape), dim, 0), shard_axes)
        return jax.lax.psum(summand, others) if others else summand

    # With specs of all axes: XLA:CPU aborts on sums in bfloat16 over some of the axes if it is to shard the others.
    summed = compute if dim is None else update
    specs = sharding_of_summands(compute, axes).spec, summed.backend_layout.spec
    reduced = on_devices(on_device, device_mesh.backend_mesh, *specs)(summands) if axes else summands[0]
    return with_sharding_constraint(reduced, update.backend_layout)


def as_summands(value: Any, axes: Sequence[str], compute: TensorLayout, update: TensorLayout) -> Any:
    """Returns summands, as `reduce_summands` takes them, whose sum is `value`.

    Each device's summand has the shard that the device holds in the layout of the update, and zeros elsewhere. So
    nothing is sent. Among devices that hold the same shard, the first has it.
    """
    compute = without_axes(compute, axes)
    device_mesh = as_device_mesh(compute.device_mesh)
    dim, shard_axes = _scattered_dim(compute, update, axes)
    others = [name for name in axes if name not in shard_axes]

    def on_device(shard: Any) -> Any:
        summand = shard
        if dim is not None:
            num_parts = math.prod(device_mesh.axis_sizes[name] for name in shard_axes)
            shape = [size * num_parts if each == dim else size for each, size in enumerate(shard.shape)]
            start = jax.lax.axis_index(shard_axes) * shard.shape[dim]
            summand = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, shard.dtype), shard, start, dim)
        is_first = jnp.all(jnp.array([jax.lax.axis_index(name) == 0 for name in others]))
        return jnp.where(is_first, summand, 0)[None]

    held = compute if dim is None else update
    specs = held.backend_layout.spec, sharding_of_summands(compute, axes).spec
    return on_devices(on_device, device_mesh.backend_mesh, *specs)(value)


def _scattered_dim(
    compute: TensorLayout, update: TensorLayout, axes: Sequence[str]
) -> tuple[int | None, tuple[str, ...]]:
    """Returns the dim along which a sum over `axes` is reduce-scattered, and over which of them; None: all-reduced.

    It is the only dim that `update` shards and `compute` does not.
    """
    pairs = enumerate(itertools.zip_longest(compute.axes, update.axes))
    changed = [(dim, before, axis_tuple(after)) for dim, (before, after) in pairs if before != after]
    if len(changed) != 1 or changed[0][1] is not None or not set(changed[0][2]) <= set(axes):
        return None, ()
    return changed[0][0], changed[0][2]


def _reduce_scatter(gradient: Any, compute: TensorLayout, update: TensorLayout, batch_axes: Sequence[str]) -> Any:
    """Constrains a gradient to the layout of its update, in the way that each compiler turns into a reduce-scatter.

    If the shards of a sum are requested at once, a partitioner may split the matrix product before it into a chain of
    permutes (XLA:TPU), or move activations. So the sum is requested first, and then its shards. But with replicas
    (HSDP), XLA:GPU makes a reduce-scatter and an all-reduce only if both are requested at once.
    """
    mesh = as_device_mesh(compute.device_mesh)
    if mesh.backend_mesh.devices.flat[0].platform == "tpu":
        summed_axes = [name for name in mesh.axis_names if name in batch_axes]
        gradient = _reduce_scatter_on_tpu(gradient, compute, update, summed_axes)
    elif set(batch_axes) <= set(axis_names(update.axes)):
        gradient = with_sharding_constraint(gradient, compute.backend_layout)
    return with_sharding_constraint(gradient, update.backend_layout)


def _reduce_scatter_on_tpu(
    gradient: Any, compute: TensorLayout, update: TensorLayout, summed_axes: Sequence[str]
) -> Any:
    """Reduce-scatters a gradient along a new dim with one element for each device of the sum.

    XLA:TPU makes a reduce-scatter only along a dim that it does not tile, and among all devices of a sum; otherwise it
    all-reduces. With replicas, each then gathers its shard from the others, which sends as many bytes as a
    reduce-scatter among shards and an all-reduce among replicas.

    Example: axes replica:2, fsdp:4, a gradient (64, 128) whose update is sharded ("fsdp", None). Dim 0 is split into
    the parts of "fsdp" and then of "replica", (4, 2, 8, 128); these are put into mesh order and merged,
    (8, 8, 128); dim 0 is reduce-scattered over all eight devices; the merged dim is split and put back into the order
    of parts, (4, 2, 8, 128); and the dim of "replica" is gathered.
    """
    mesh = as_device_mesh(compute.device_mesh)
    dim, shard_axes = _scattered_dim(compute, update, summed_axes)
    if dim is None:
        return gradient
    before = [*compute.axes, *[None] * (gradient.ndim - len(compute.axes))]
    part_axes = [*shard_axes, *(name for name in summed_axes if name not in shard_axes)]  # outermost first
    sizes = [mesh.axis_sizes[name] for name in part_axes]
    num_parts = math.prod(sizes)
    if gradient.shape[dim] % num_parts:
        return gradient

    def constrained(value, entries):
        spec = PartitionSpec(*before[:dim], *entries, *before[dim:])  # the rest of the split dim follows the entries
        return with_sharding_constraint(value, NamedSharding(mesh.backend_mesh, spec))

    def permuted(value, order):
        return value.transpose(*range(dim), *(dim + at for at in order), *range(dim + len(part_axes), value.ndim))

    lead, rest = gradient.shape[:dim], (gradient.shape[dim] // num_parts, *gradient.shape[dim + 1 :])
    value = permuted(gradient.reshape(*lead, *sizes, *rest), [part_axes.index(name) for name in summed_axes])
    value = constrained(constrained(value.reshape(*lead, num_parts, *rest), [None]), [tuple(summed_axes)])
    if len(part_axes) > len(shard_axes):
        value = value.reshape(*lead, *(mesh.axis_sizes[name] for name in summed_axes), *rest)
        value = constrained(permuted(value, [summed_axes.index(name) for name in part_axes]), part_axes)
        value = constrained(value, [name if name in shard_axes else None for name in part_axes])
    return value.reshape(gradient.shape)

"""Runs a function of shards on each device, with its gradient."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from keras_dist.layout.tensor_layout import axis_names, axis_tuple


def free_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """Returns the axes of a mesh; of the mesh that JAX has in a `jax.shard_map` over some of them, the others."""
    return {*mesh.axis_names} - {*mesh.manual_axes}


def in_shard_map() -> bool:
    """Whether what is traced is part of a `jax.shard_map`, so that arrays are shards already."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def on_devices(
    function: Callable, mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any, axes: Collection[str] | None = None
) -> Callable:
    """Returns a function of global arrays that calls another one with the shards of each device.

    They are shards over some axes, by default over all that are free; XLA partitions the function over the others.
    """
    names = free_axes(mesh) if axes is None else {*axes}
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)


def call_per_device(
    function: Callable,
    mesh: Mesh,
    arguments: Sequence[Any],
    specs: Sequence[Any],
    out_spec: Any,
    summed_axes: Sequence[tuple[str, ...]],
) -> Any:
    """Calls a function with every device's shards of the arguments.

    The backward pass runs on each device, too. `jax.shard_map` alone would sum gradients over all axes that an argument
    is replicated over, although devices that repeat each other's work have equal gradients. Here only the axes that
    `summed_axes` names for an argument are summed over: those whose devices compute with other shards. It has an entry
    for each of the leading arguments, those with gradients.

    Inside of a user's own `jax.shard_map` the arguments are shards already, and the function is called as it is.

    A dim may have shards of unequal sizes: it is padded with zeros (masks with True) to equal ones. Each index along it
    must be computed alone. As in `jax.shard_map`, `out_spec` is one for all outputs, or a structure that begins as
    that of the outputs does.
    """
    if mesh.size == 1 or in_shard_map():
        return function(*arguments)
    arguments, sizes = _padded(arguments, specs, mesh)
    differentiable = len(summed_axes)
    # Devices with the same shards repeat each other's work, and have the same residuals.
    specified = jax.tree.leaves((specs, out_spec), is_leaf=lambda each: isinstance(each, PartitionSpec))
    used_axes = {name for spec in specified for name in axis_names(spec)}
    residual_spec = PartitionSpec(tuple(name for name in mesh.axis_names if name in used_axes))

    @jax.custom_vjp
    def call(*arguments):
        return on_devices(function, mesh, tuple(specs), out_spec)(*arguments)

    kept: list[Any] = []  # of the gradient's residuals: their structure, and which of them are arguments

    def forward(*arguments):
        def on_device(*shards):
            first, rest = shards[:differentiable], shards[differentiable:]
            output, gradient = jax.vjp(lambda *first: function(*first, *rest), *first)
            residuals, structure = jax.tree.flatten(gradient)
            given = jax.tree.leaves(first)
            places = [next((i for i, each in enumerate(given) if each is residual), None) for residual in residuals]
            kept[:] = structure, places
            # What the backward pass needs stays on its device: one more dim, sharded over all axes in use. Arguments
            # are not kept twice, and `jax.checkpoint` may compute them again.
            return output, [each[None] for each, place in zip(residuals, places, strict=True) if place is None]

        outputs, residuals = on_devices(on_device, mesh, tuple(specs), (out_spec, residual_spec))(*arguments)
        return outputs, (arguments[:differentiable], residuals)

    def backward(saved, cotangent):
        def on_device(first, residuals, cotangent):
            structure, places = kept
            given, others = jax.tree.leaves(first), iter(residuals)
            residuals = [next(others)[0] if place is None else given[place] for place in places]
            gradients = jax.tree.unflatten(structure, residuals)(cotangent)
            stack = functools.partial(jax.tree.map, lambda each: each[None])  # of an argument that may be None
            return tuple(stack(each) if axes else each for each, axes in zip(gradients, summed_axes, strict=True))

        # A sum outside, over one more dim, can be postponed (`steps/unreduced_gradients.py`).
        summand_specs = [
            PartitionSpec(axes, *(spec or ())) if axes else spec for spec, axes in zip(specs, summed_axes, strict=False)
        ]
        in_specs = tuple(specs[:differentiable]), residual_spec, out_spec
        gradients = on_devices(on_device, mesh, in_specs, tuple(summand_specs))(*saved, cotangent)
        add_up = functools.partial(jax.tree.map, lambda each: jax.lax.reduce_sum(each, (0,)))
        sums = [add_up(each) if axes else each for each, axes in zip(gradients, summed_axes, strict=True)]
        return (*sums, *[None] * (len(specs) - differentiable))

    call.defvjp(forward, backward)
    outputs = call(*arguments)
    return _without_padding(outputs, out_spec, sizes) if sizes else outputs


def _padded(arguments: Sequence[Any], specs: Sequence[Any], mesh: Mesh) -> tuple[Sequence[Any], dict[Any, int]]:
    """Returns arguments with equal shards, and the sizes that dims had before, by the axes that shard them."""
    sizes = {}

    def pad(spec: PartitionSpec | None, argument: Any) -> Any:
        for dim, axes in enumerate(spec or ()):
            size, count = argument.shape[dim], math.prod(mesh.shape[name] for name in axis_tuple(axes))
            if size % count:
                sizes[axis_tuple(axes)] = size
                argument = pad_to_multiple(argument, dim, count, argument.dtype == bool)
        return argument

    return jax.tree.map(pad, tuple(specs), tuple(arguments), is_leaf=_is_spec), sizes


def _without_padding(outputs: Any, specs: Any, sizes: dict[Any, int]) -> Any:
    def select(spec: PartitionSpec, output: jax.Array) -> jax.Array:
        for dim, axes in enumerate(spec):
            output = jax.lax.slice_in_dim(output, 0, sizes.get(axis_tuple(axes), output.shape[dim]), axis=dim)
        return output

    return jax.tree.map(
        lambda spec, part: jax.tree.map(functools.partial(select, spec), part), specs, outputs, is_leaf=_is_spec
    )


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec)


def pad_dim(array: jax.Array, dim: int, size: int, value: Any = 0) -> jax.Array:
    """Pads a dim at its end, up to a size."""
    missing = size - array.shape[dim]
    if not missing:
        return array
    widths = [(0, missing if number == dim % array.ndim else 0) for number in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=value)


def pad_with_first(array: jax.Array, dim: int, size: int) -> jax.Array:
    """Pads a dim at its end, up to a size, with copies of its first index.

    Zeros might be divided by, and infinite derivatives times the gradient of padding, 0, are not 0.
    """
    padded = pad_dim(array, dim, size)
    if padded is array:
        return array
    is_own = jax.lax.broadcasted_iota("int32", padded.shape, dim) < array.shape[dim]
    return jnp.where(is_own, padded, jax.lax.slice_in_dim(array, 0, 1, axis=dim))


def pad_to_multiple(array: jax.Array, dim: int, multiple: int, value: Any = 0) -> jax.Array:
    size = array.shape[dim]
    return pad_dim(array, dim, size + -size % multiple, value)

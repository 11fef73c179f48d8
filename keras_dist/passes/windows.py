"""Convolutions, and gradients of maxima over windows: with the dims of windows unsharded.

XLA's partitioner computes them with wrong numbers where windows reach into other shards, as those of a convolution
before `Flatten` do if the kernel of the next layer is sharded. Where an axis of the mesh repeats rows, it gathers the
rows of a convolution in groups of channels, and sums the gradient of its kernel over all devices.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec

from keras_dist.passes.step_program import StepProgram
from keras_dist.sharding.per_device import call_per_device, free_axes, on_devices
from keras_dist.sharding.resharding import unsharded_along


def windows(equation: Any, program: StepProgram) -> Callable | None:
    """Gathers the dims of windows of convolutions, and of gradients of maxima."""
    dims = _window_dims(equation)
    mesh = program.partitioned_mesh(equation) if any(dims) else None
    if mesh is None:
        return None

    def unshard(array: Any, dims: Collection[int]) -> Any:
        return with_sharding_constraint(array, unsharded_along(dims, array.ndim, mesh))

    def unsharded(operation: Callable, *operands: Any) -> Any:
        *operand_dims, result_dims = dims
        result = unshard(operation(*map(unshard, operands, operand_dims)), result_dims)
        return program.sequences_sharded(equation, result)

    return unsharded


def _window_dims(equation: Any) -> list[Collection[int]]:
    """Returns the dims with windows of each operand, and of the result, where XLA may get wrong numbers."""
    if equation.primitive.name == "select_and_scatter_add":
        return [[dim for dim, size in enumerate(equation.params["window_dimensions"]) if size > 1]] * 3
    if equation.primitive.name != "conv_general_dilated":
        return []
    dims = [spec[2:] for spec in equation.params["dimension_numbers"]]  # after those of rows and channels
    inputs, kernel = (
        [each.aval.shape[dim] for dim in own] for each, own in zip(equation.invars, dims[:2], strict=True)
    )
    numbers = {*equation.params["window_strides"], *equation.params["lhs_dilation"], *equation.params["rhs_dilation"]}
    is_plain = numbers <= {1} and not any(map(any, equation.params["padding"]))
    # A kernel of one position, and its gradient, a sum over all of them: products of matrices.
    return [] if is_plain and (kernel == inputs or {*kernel} <= {1}) else dims


def grouped_convolutions(equation: Any, program: StepProgram) -> Callable | None:
    """Convolves in groups of channels on each device, for its rows, and for its groups if channels are sharded."""
    mesh = program.partitioned_mesh(equation) if equation.primitive.name == "conv_general_dilated" else None
    if mesh is None:
        return None
    numbers, free = equation.params["dimension_numbers"], free_axes(mesh)
    if equation.params["feature_group_count"] > 1:
        count_name, summed = "feature_group_count", False
        row_dims, group_dims = (numbers.lhs_spec[0], None, numbers.out_spec[0]), (numbers.lhs_spec[1],)
    elif equation.params["batch_group_count"] > 1:  # the gradient of a kernel, a sum over rows
        count_name, summed = "batch_group_count", True
        row_dims, group_dims = (numbers.lhs_spec[1], numbers.rhs_spec[1], None), (numbers.lhs_spec[0],)
    else:
        return None
    group_dims = (*group_dims, numbers.rhs_spec[0], numbers.out_spec[1])
    inputs, kernel = map(program.axes_of, equation.invars)
    rows = tuple(name for name in inputs[row_dims[0]] if name in free)
    other_axes = free.difference(rows)
    if math.prod(mesh.shape[name] for name in other_axes) == 1:
        return None  # no device repeats rows of another
    channels = tuple(name for name in kernel[group_dims[1]] if name in other_axes)
    shards = math.prod(mesh.shape[name] for name in channels)
    if equation.params[count_name] % shards:
        channels, shards = (), 1
    params = {**equation.params, count_name: equation.params[count_name] // shards}

    def on_device(*operands: Any) -> Any:
        result = equation.primitive.bind(*operands, **params)
        return jax.lax.psum(result, rows) if summed and rows else result

    rank = equation.outvars[0].aval.ndim
    *specs, out_spec = (
        PartitionSpec(*(rows if dim == row_dim else channels if dim == group_dim else None for dim in range(rank)))
        for row_dim, group_dim in zip(row_dims, group_dims, strict=True)
    )
    sums = (), () if summed else rows

    def per_device(_: Callable, *operands: Any) -> Any:
        if mesh is not program.mesh:  # in a `jax.shard_map` over rows, where nothing is differentiated
            return on_devices(on_device, mesh, tuple(specs), out_spec)(*operands)
        result = call_per_device(on_device, program.mesh, operands, specs, out_spec, summed_axes=sums)
        return program.sequences_sharded(equation, result)

    return per_device

"""Convolutions: where XLA would partition one with wrong numbers, each device computes all positions of its rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from keras_dist.layout.tensor_layout import Axes, axis_tuple
from keras_dist.sharding.per_device import call_per_device
from keras_dist.variables.variable_layouts import is_on_mesh


def convolution(
    convolve: Callable,
    inputs: Any,
    kernel: Any,
    *,
    strides: int | Sequence[int],
    groups: int,
    channels_dim: int,
    filters_dim: int,
    mesh: Mesh,
    row_axes: Sequence[str],
    sequence_axes: Sequence[str],
    kernel_axes: Axes | None,
) -> Any:
    """Returns `convolve(inputs, kernel)`.

    XLA's partitioner computes three kinds with wrong numbers: convolutions along a sharded sequence, strided ones whose
    kernel is sharded along its window, and the gradient of the kernel of a grouped one where an axis of the mesh
    repeats rows, since it is summed over all devices. Each device computes these for its rows, and for its filters if
    they are sharded.

    Args:
        convolve: takes the number of groups from the shapes of its arguments.
        inputs: array (rows, ...).
        kernel: array.
        strides: of all dims, or of each.
        groups: number of groups of channels.
        channels_dim: dim of the channels of inputs and output.
        filters_dim: dim of the kernel for the channels of the output. With several groups it has these, too.
        mesh: the mesh.
        row_axes: its axes that shard rows.
        sequence_axes: its axes that shard sequences.
        kernel_axes: the axes of each dim of the kernel, if they are known.
    """
    are_rows_repeated = math.prod(mesh.shape[name] for name in row_axes) < mesh.size
    is_window_sharded = any(kernel_axes[:-2]) if kernel_axes else False
    is_strided = set(np.atleast_1d(strides)) != {1}
    is_right = not sequence_axes and not (is_strided and is_window_sharded) and not (groups > 1 and are_rows_repeated)
    if is_right or not all(isinstance(array, Tracer) or is_on_mesh(array, mesh) for array in (inputs, kernel)):
        return convolve(inputs, kernel)  # arrays that are elsewhere are eager
    rows = tuple(row_axes)
    filters = tuple(name for name in axis_tuple(kernel_axes[filters_dim] if kernel_axes else None) if name not in rows)
    count = math.prod(mesh.shape[name] for name in filters)
    if kernel.shape[filters_dim] % count or (groups > 1 and groups % count):
        filters = ()
    by_channel, of_kernel = _spec(inputs.ndim, {0: rows, channels_dim: filters}), {filters_dim: filters}
    return call_per_device(
        convolve,
        mesh,
        (inputs, kernel),
        specs=(by_channel if groups > 1 else PartitionSpec(rows), _spec(kernel.ndim, of_kernel)),
        out_spec=by_channel,
        differentiable=2,
        summed_axes=(() if groups > 1 else filters, rows),
    )


def _spec(rank: int, entries: dict[int, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(entries.get(dim) for dim in range(rank)))

"""Which dim of a tensor to shard over an axis, where any would do."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from keras_dist.layout.tensor_layout import TensorLayout, axis_tuple
from keras_dist.mesh.device_mesh import DeviceMesh

SMALL = 2**16  # bytes of a tensor up to which cutting it saves less memory than its messages cost
_LANES, _SUBLANES = 128, 8  # a TPU keeps the two innermost dims of a tensor in tiles of 8 x 128 numbers


def sharded_further(
    layout: TensorLayout, variable: Any, axes: Sequence[str], device_mesh: DeviceMesh, small: int = SMALL
) -> TensorLayout:
    """Returns a layout that shards one more dim of a tensor, over axes that it does not use yet.

    Args:
        layout: the layout that it has.
        variable: the tensor: anything with a shape and a dtype.
        axes: the mesh axes to shard it over.
        device_mesh: the mesh.
        small: bytes of a device's part under the given layout, up to which that is returned.

    Returns:
        The given layout where the tensor is small, uses one of the axes already, or has no dim that they divide.
    """
    sizes, shape = device_mesh.axis_sizes, tuple(variable.shape)
    entries = [*layout.axes, *[None] * (len(shape) - len(layout.axes))]
    used = [name for entry in entries for name in axis_tuple(entry)]
    parts = math.prod(sizes[name] for name in axes)
    held = math.prod(shape) * jnp.dtype(variable.dtype).itemsize // math.prod(sizes[name] for name in used)
    if parts == 1 or held <= small or set(used) & set(axes):
        return layout
    dim = free_dim(shape, [entry is not None for entry in entries], parts)
    if dim is None:
        return layout
    entries[dim] = tuple(axes)
    return TensorLayout(entries, device_mesh)


def free_dim(shape: Sequence[int], taken: Sequence[bool], parts: int) -> int | None:
    """Returns the dim that a tensor is best cut along into equal parts.

    A matrix is cut along its rows, where each part then has whole tiles of them; else along its columns, where each
    part has whole tiles of those. A tensor of more dims is cut along the smallest that divides: compilers lay the two
    largest out in tiles, and along the others a part is one piece of memory, which a reduce-scatter needs (measured
    on XLA:TPU, where the wrong dim turns it into an all-reduce and a slice; XLA:GPU takes any).

    Args:
        shape: the tensor's shape.
        taken: for each dim whether it is sharded over another axis already.
        parts: the number of parts.

    Returns:
        The dim, or None where none divides.

    Example:

    >>> free = [False] * 3
    >>> free_dim((4096, 1024), free, 8), free_dim((50257, 1024), free, 8), free_dim((1024, 16, 64), free, 8)
    (0, 1, 1)
    """
    dims = [dim for dim, size in enumerate(shape) if not taken[dim] and size and size % parts == 0]
    if len(shape) > 2:
        return min(dims, key=lambda dim: shape[dim], default=None)
    tiles = (_SUBLANES, _LANES) if len(shape) == 2 else (_LANES,)
    whole = [dim for dim in dims if shape[dim] // parts % tiles[dim] == 0]
    return next(iter(whole + dims), None)

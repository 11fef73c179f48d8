"""Which dim of a tensor to shard over an axis, if any dim would do."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from keras_dist._keras import internals
from keras_dist.layout.tensor_layout import TensorLayout, axis_names
from keras_dist.mesh.device_mesh import DeviceMesh

MIN_SHARD_BYTES = 2**16  # sharding a smaller tensor saves less memory than its messages cost
_LANES, _SUBLANES = 128, 8  # a TPU stores the two innermost dims of a tensor in tiles of 8 x 128 elements


def shard_one_more_dim(
    layout: TensorLayout,
    variable: Any,
    axes: Sequence[str],
    device_mesh: DeviceMesh,
    min_shard_bytes: int = MIN_SHARD_BYTES,
    prefers_columns: bool = False,
    dims: Collection[int] | None = None,
) -> TensorLayout:
    """Returns a layout that shards one more dim of a variable over `axes`, which the given layout does not use yet.

    That is dim 1 if `prefers_columns`, and if each part of a matrix has whole tiles of columns. With `dims`, it is one
    of them.

    Returns the given layout if a device holds at most `min_shard_bytes` under it, or if the variable is the state of a
    random generator, is already sharded over one of the axes, or has no dim that they divide.
    """
    sizes, shape = device_mesh.axis_sizes, tuple(variable.shape)
    entries = [*layout.axes, *[None] * (len(shape) - len(layout.axes))]
    used = axis_names(entries)
    parts = math.prod(sizes[name] for name in axes)
    held = internals.stored_bytes(variable) // math.prod(sizes[name] for name in used)
    if parts == 1 or held <= min_shard_bytes or set(used) & set(axes) or internals.is_random_state(variable.path):
        return layout
    is_sharded = [entry is not None or (dims is not None and dim not in dims) for dim, entry in enumerate(entries)]
    has_tiles = len(shape) == 2 and not is_sharded[1] and shape[1] % (parts * _LANES) == 0
    dim = 1 if prefers_columns and has_tiles else best_dim(shape, is_sharded, parts)
    if dim is None:
        return layout
    entries[dim] = tuple(axes)
    return TensorLayout(entries, device_mesh)


def best_dim(shape: Sequence[int], is_sharded: Sequence[bool], parts: int) -> int | None:
    """Returns the best unsharded dim to split a tensor along into equal parts, None if `parts` divides none.

    A matrix is split along its rows if each part has whole tiles of rows, else along its columns if each part has
    whole tiles of columns, else along any dim that `parts` divides. A tensor of higher rank is split along the
    smallest dim that `parts` divides: compilers tile the two largest dims, and along the others a part is contiguous,
    which a reduce-scatter needs. (Measured: on XLA:TPU a wrong dim turns the reduce-scatter into an all-reduce and a
    slice. XLA:GPU takes any dim.)

    Example:

    >>> free = [False] * 3
    >>> best_dim((4096, 1024), free, 8), best_dim((50257, 1024), free, 8), best_dim((1024, 16, 64), free, 8)
    (0, 1, 1)
    """
    dims = [dim for dim, size in enumerate(shape) if not is_sharded[dim] and size and size % parts == 0]
    if len(shape) > 2:
        return min(dims, key=lambda dim: shape[dim], default=None)
    tiles = (_SUBLANES, _LANES) if len(shape) == 2 else (_LANES,)
    tiled = [dim for dim in dims if shape[dim] // parts % tiles[dim] == 0]
    return next(iter(tiled + dims), None)

"""Patches of lookups and sums by index, which XLA computes wrongly where shards have unequal sizes."""

from typing import Any

import keras
import numpy as np

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED

_LOOKUP = "where shards have unequal sizes, XLA adds their padding to the gradient of the array that is indexed"
_SUM = "where shards have unequal sizes, XLA adds their padding to the result"


@INSTALLED.patch(internals.keras_numpy, "take", reason=_LOOKUP)
def _take(original, distribution, x, indices, axis=None):
    array: Any = keras.ops.convert_to_tensor(x)
    outputs = original(array, indices, axis)
    # The dims of the indices are in the place of the dim that is indexed: (4, 9, 5), axis 1, indices (2, 3) makes
    # (4, 2, 3, 5), with those of the indices from 1 to 2.
    first, other_dims = (0, 0) if axis is None else (axis % array.ndim, array.ndim - 1)
    dims = range(first, first + len(outputs.shape) - other_dims)
    return distribution.gather_gradient(outputs, dims, is_flat=len(dims) == 1)


@INSTALLED.patch(internals.keras_numpy, "take_along_axis", reason=_LOOKUP)
def _take_along_axis(original, distribution, x, indices, axis=None):
    outputs = original(x, indices, axis)
    dims = [0 if axis is None else axis % len(outputs.shape)]
    return distribution.gather_gradient(outputs, dims, is_flat=len(outputs.shape) == 1)


def _patch_sum_by_segment(name: str) -> None:
    @INSTALLED.patch(internals.keras_math, name, reason=_SUM)
    def by_segment(original, distribution, data, segment_ids, num_segments=None, sorted=False):
        data, segment_ids = (distribution.gather_unequal(each, [0], is_flat=True) for each in (data, segment_ids))
        return original(data, segment_ids, num_segments, sorted)


for _name in ("segment_sum", "segment_max", "segment_min", "segment_prod"):
    _patch_sum_by_segment(_name)


@INSTALLED.patch(internals.jax_core, "scatter", reason=_SUM)
def _scatter(original, distribution, indices, values, shape):
    indices, values = _gather_updates(distribution, indices, values)
    return original(indices, values, shape)


@INSTALLED.patch(internals.jax_core, "scatter_update", reason=_SUM)
def _scatter_update(original, distribution, inputs, indices, updates, reduction=None):
    indices, updates = _gather_updates(distribution, indices, updates)
    return original(inputs, indices, updates, reduction)


def _gather_updates(distribution: Any, indices: Any, updates: Any) -> tuple[Any, Any]:
    """Gathers along all dims of indices but their last, which are the first dims of updates."""
    dims = range(min(np.ndim(indices) - 1, np.ndim(updates)))
    return tuple(distribution.gather_unequal(each, dims, is_flat=len(dims) == 1) for each in (indices, updates))

"""Patches of lookups by index: where shards would be unequal, their gradients are added up from gathered arrays."""

from typing import Any

import keras

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED

_REASON = "where shards have unequal sizes, XLA adds their padding to the gradient of the array that is indexed"


@INSTALLED.patch(internals.keras_numpy, "take", reason=_REASON)
def _take(original, distribution, x, indices, axis=None):
    array: Any = keras.ops.convert_to_tensor(x)
    outputs = original(array, indices, axis)
    # The dims of the indices are in the place of the dim that is indexed: (4, 9, 5), axis 1, indices (2, 3) makes
    # (4, 2, 3, 5), with those of the indices from 1 to 2.
    first, other_dims = (0, 0) if axis is None else (axis % array.ndim, array.ndim - 1)
    return distribution.gather_gradient(outputs, range(first, first + len(outputs.shape) - other_dims))


@INSTALLED.patch(internals.keras_numpy, "take_along_axis", reason=_REASON)
def _take_along_axis(original, distribution, x, indices, axis=None):
    outputs = original(x, indices, axis)
    return distribution.gather_gradient(outputs, [0 if axis is None else axis % len(outputs.shape)])

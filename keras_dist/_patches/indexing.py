"""Patches of lookups by index: their gradients are added up from whole sequences where shards would be unequal."""

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED

_REASON = "where shards have unequal sizes, XLA adds their padding to the gradient of the array that is indexed"


@INSTALLED.patch(internals.keras_numpy, "take", reason=_REASON)
def _take(original, distribution, x, indices, axis=None):
    outputs = original(x, indices, axis)
    rank = len(outputs.shape)
    first = 0 if axis is None else axis % len(x.shape)
    of_array = 0 if axis is None else len(x.shape) - 1
    return distribution.with_whole_gradient(outputs, range(first, first + rank - of_array))


@INSTALLED.patch(internals.keras_numpy, "take_along_axis", reason=_REASON)
def _take_along_axis(original, distribution, x, indices, axis=None):
    outputs = original(x, indices, axis)
    return distribution.with_whole_gradient(outputs, [0 if axis is None else axis % len(outputs.shape)])

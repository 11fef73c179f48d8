"""Patches that read variables whose shards are on several processes."""

import keras
import numpy as np

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED, VARIABLES
from keras_dist._report.units import counted
from keras_dist.variables import global_reads

_REASON = "a variable whose shards are on several processes cannot be read"


@VARIABLES.patch(internals.KerasVariable, "__array__", reason=_REASON)
def _array(original, self, dtype=None, *, copy=None):
    if not internals.in_stateless_scope() and global_reads.is_held_by_others(internals.variable_value(self)):
        return np.asarray(global_reads.read(self), dtype=dtype)
    # NumPy does not copy by itself where `__array__` accepts `copy`.
    return np.array(original(self, dtype), copy=copy)


@VARIABLES.patch(keras.Layer, "get_weights", reason=_REASON)
def _get_weights(original, self):
    weights = self.weights
    if not any(global_reads.is_held_by_others(internals.variable_value(variable)) for variable in weights):
        return original(self)
    if global_reads.own_shards_only.value:
        return [global_reads.HeldShards(variable.value) for variable in weights]
    with global_reads.agreed(f"get_weights() of {self.name!r}, {counted(len(weights), 'variable')}"):
        return original(self)


@INSTALLED.patch(
    keras.callbacks.EarlyStopping,
    "on_epoch_end",
    reason="every process keeps a full copy of the best weights, instead of its shards",
)
def _keep_best_weights(original, distribution, self, epoch, logs=None):
    with global_reads.own_shards_only.set_to(True):
        return original(self, epoch, logs)

"""What of Keras is replaced so that variables are read where several processes hold them."""

import functools
from typing import Any

import keras
import numpy as np

from keras_dist._keras import internals
from keras_dist._keras.patch_registry import keras_own, ours_here, replaces
from keras_dist.variables import global_reads


@replaces(
    internals.KerasVariable,
    "__array__",
    ("self", "dtype"),
    "variables of several processes that cannot be read",
    outlives=True,
)
def _array(self, dtype=None, copy=None):
    if not internals.in_stateless_scope() and global_reads.is_held_by_others(internals.variable_value(self)):
        return np.asarray(global_reads.read(self), dtype=dtype)
    # Asked for a copy, NumPy makes none where this takes the argument.
    return np.array(keras_own(internals.KerasVariable, "__array__")(self, dtype), copy=copy)


@replaces(
    internals.KerasVariable,
    "__repr__",
    ("self",),
    "variables that are read by all processes, which a message of one must not do",
    outlives=True,
)
def _describe(self):
    value: Any = internals.variable_value(self)
    if not global_reads.is_held_by_others(value):
        return keras_own(internals.KerasVariable, "__repr__")(self)
    spec = getattr(value.sharding, "spec", value.sharding)
    return f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}, on several processes as {spec}>"


@replaces(
    keras.Layer,
    "get_weights",
    ("self",),
    "variables of several processes that cannot be read",
    outlives=True,
)
def _get_weights(self):
    original, weights = functools.partial(keras_own(keras.Layer, "get_weights"), self), self.weights
    if not any(global_reads.is_held_by_others(internals.variable_value(variable)) for variable in weights):
        return original()
    if global_reads.wants_own_shards():
        return [global_reads.HeldShards(variable.value) for variable in weights]
    with global_reads.agreed(f"get_weights() of {self.name!r}, {len(weights)} variables"):
        return original()


@replaces(
    keras.callbacks.EarlyStopping,
    "on_epoch_end",
    ("self", "epoch", "logs"),
    "best weights that every process keeps whole",
)
def _keep_best_weights(self, epoch, logs=None):
    original = keras_own(keras.callbacks.EarlyStopping, "on_epoch_end")
    if ours_here() is None:
        return original(self, epoch, logs)
    with global_reads.own_shards_only():
        return original(self, epoch, logs)

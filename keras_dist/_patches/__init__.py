"""Patches: functions of Keras that this package replaces, by topic. docs/patches.md lists all of them.

* `distribution_lookup.py`: which distribution Keras finds, and layouts of new variables.
* `training.py`: steps, and optimizer state.
* `layer_call.py`: calls of models and layers, and the variables that they read.
* `deferred_creation.py`: variables without values.
* `epoch_iterator.py`: the batches of `fit`, `evaluate` and `predict`.
* `resumable_iterator.py`: data iterators that begin in the middle of an epoch.
* `weight_loading.py`: values are loaded directly into shards.
* `variable_access.py`: variables whose shards are on several processes are read.
* `file_saving.py`: files are written once, by process 0, and atomically.
* `orbax_loading.py`: Orbax checkpoints are restored completely.

Importing this package declares all patches; `_keras/patch_registry.py` says what a patch is, and
`_keras/active_distribution.py` when which ones are installed. Only `keras_dist/__init__.py` imports this package.
"""

from keras_dist._keras.active_distribution import ALWAYS
from keras_dist._patches import (
    deferred_creation,
    distribution_lookup,
    epoch_iterator,
    file_saving,
    layer_call,
    orbax_loading,
    resumable_iterator,
    training,
    variable_access,
    weight_loading,
)

__all__ = [
    "deferred_creation",
    "distribution_lookup",
    "epoch_iterator",
    "file_saving",
    "layer_call",
    "orbax_loading",
    "register",
    "resumable_iterator",
    "training",
    "variable_access",
    "weight_loading",
]


def register() -> None:
    """Installs the one patch that is always active. The others are installed with a distribution."""
    ALWAYS.install()

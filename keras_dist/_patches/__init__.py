"""What replaces functions of Keras while a distribution of this package is installed, by topic.

* `training.py`: steps, calls of models and layers, and optimizer state.
* `epoch_iterator.py`: the batches of `fit`, `evaluate` and `predict`.
* `resumable_iterator.py`: data iterators that begin in the middle of an epoch.
* `weight_loading.py`: values go straight into shards.
* `variable_access.py`: variables whose shards are on several processes are read.
* `file_saving.py`: files are written once, by process 0, whole or not at all.
* `orbax_loading.py`: Orbax checkpoints are restored in whole.
"""

from keras_dist._patches import (
    epoch_iterator,
    file_saving,
    orbax_loading,
    resumable_iterator,
    training,
    variable_access,
    weight_loading,
)

__all__ = [
    "epoch_iterator",
    "file_saving",
    "orbax_loading",
    "resumable_iterator",
    "training",
    "variable_access",
    "weight_loading",
]

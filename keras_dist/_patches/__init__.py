"""Patches: functions of Keras that this package replaces, by topic. docs/patches.md lists all of them.

* `distribution_lookup.py`: which distribution Keras finds, and layouts of new variables.
* `training.py`: steps, and optimizer state.
* `layer_call.py`: calls of models and layers, and the variables that they read.
* `recurrent.py`: recurrent layers, over sequences that are sharded, and computed by cuDNN.
* `deferred_creation.py`: variables without values.
* `epoch_iterator.py`: the batches of `fit`, `evaluate` and `predict`.
* `resumable_iterator.py`: data iterators that begin in the middle of an epoch.
* `variable_values.py`: values are loaded directly into shards, and read from shards on several processes.
* `attention.py`: attention is computed by the kernels of the devices, on their shards.
* `file_saving.py`: files are written once, by process 0, and atomically.
* `orbax_loading.py`: Orbax checkpoints are restored completely.

`_keras/patch_registry.py` says what a patch is, `_keras/active_distribution.py` when patches are installed. Only
`keras_dist/__init__.py` imports this package.
"""

import importlib
import pkgutil

from keras_dist._keras.active_distribution import ALWAYS
from keras_dist._keras.internals import missing_names_are_errors


def register() -> None:
    """Declares all patches, and installs those that are always active; a distribution installs the others."""
    topics = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "__main__"]
    with missing_names_are_errors():
        for topic in topics:
            importlib.import_module(f"{__name__}.{topic}")
    ALWAYS.install()

"""Keras's data adapters, which read every source of data that `fit` accepts, and where releases of Keras differ."""

import copy
import inspect
from typing import Any

from keras_dist._keras.internals import missing_names_are_errors

with missing_names_are_errors():
    from keras.src.trainers import data_adapters as data_adapters
    from keras.src.trainers.data_adapters import array_slicing as array_slicing
    from keras.src.trainers.data_adapters import data_adapter_utils as data_adapter_utils
    from keras.src.trainers.data_adapters import py_dataset_adapter as py_dataset_adapter

    # Since 3.16, adapters count the epochs that they have finished, and shuffle by that number; older ones shuffle by
    # the global random generators of Python and NumPy.
    COUNT_EPOCHS = "epoch" in inspect.signature(py_dataset_adapter.PyDatasetEnqueuer.start).parameters
    # Later in 3.16 they can stack the batches of one execution, for a compiled loop over them (keras#23527). A list of
    # that class has batches that are not stacked.
    PartialBatchList = getattr(data_adapter_utils, "PartialBatchList", list)
    STACK_BATCHES = "super_batch" in inspect.signature(data_adapters.ArrayDataAdapter.get_jax_iterator).parameters


def makes_arrays(adapter) -> bool:
    """Returns whether a data adapter makes the arrays of each batch, so that nobody writes to them later.

    Others pass on what a source returns, which may fill the same arrays again, and slices of arrays of the user.
    """
    if isinstance(adapter, data_adapters.ArrayDataAdapter):
        return bool(adapter._shuffle)  # rows are chosen by their indices
    return isinstance(adapter, data_adapters.TFDatasetAdapter)


def finished_epochs(adapter) -> int:
    """Returns how many epochs a data adapter has finished; 0 where adapters do not count them."""
    return getattr(adapter, "_epoch", 0)


def set_finished_epochs(adapter, epochs: int) -> None:
    """Makes a data adapter shuffle as after so many epochs, where adapters count them."""
    if hasattr(adapter, "_epoch"):
        adapter._epoch = epochs


def adapter_after(adapter, epochs: int) -> Any:
    """Returns a data adapter of the same data and workers that shuffles as after so many epochs."""
    if finished_epochs(adapter) != epochs:
        adapter = copy.copy(adapter)
        set_finished_epochs(adapter, epochs)
    return adapter

"""Patches that load values directly into the shards of variables, from memory and from files."""

import sys
import weakref
import zipfile

import jax
import numpy as np

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED, VARIABLES, active_distribution
from keras_dist._keras.deferred_variables import is_deferring
from keras_dist._keras.internals import as_sharding, legacy_h5_format, saving_lib
from keras_dist._keras.thread_value import ThreadValue
from keras_dist.variables import global_reads, host_to_device, lazy_hdf5
from keras_dist.variables.variable_layouts import is_on_attached_devices

_is_read_in_place = ThreadValue(False)  # whether a model is loaded whose archive need not be read into memory


# ------------------------------------------------------------------------------------------------- values of variables


@INSTALLED.patch(
    internals.JaxVariable,
    "_convert_to_tensor",
    reason="a value is placed on one device before it is sharded",
    issue="keras#21634",
    every_thread=True,
)
def _convert_to_tensor(original, self, value, dtype=None):
    if isinstance(value, global_reads.HeldShards):
        return value.restored()
    if (
        isinstance(value, jax.Array)
        or active_distribution() is None
        or not host_to_device.is_host_tensor(value)
        or internals.in_stateless_scope()
        or internals.is_in_jax_tracing_scope()
    ):
        return original(self, value, dtype)
    if self._shape is None and not is_deferring():  # the variable is being created, and gets its layout later
        return host_to_device.to_numpy(value, dtype and internals.standardize_dtype(dtype))
    sharding = as_sharding(self._layout)
    if not isinstance(sharding, jax.sharding.Sharding) or not is_on_attached_devices(self):
        return original(self, value, dtype)
    if value.shape != tuple(self.shape):
        return value  # Keras raises an error, for which it needs only the shape
    return host_to_device.place(value, sharding, dtype)


@INSTALLED.patch(
    internals.backend_lib,
    "distribute_tensor",
    reason="all processes compare a value before each takes its shards",
)
def _distribute_tensor(original, distribution, tensor, layout):
    sharding = as_sharding(layout)
    if (
        not isinstance(sharding, jax.sharding.Sharding)
        or not (host_to_device.is_host_tensor(tensor) or isinstance(tensor, jax.Array))
        or internals.is_in_jax_tracing_scope(tensor)
    ):
        return original(tensor, layout)
    if isinstance(tensor, jax.Array) and tensor.committed and tensor.sharding == sharding:
        return tensor  # `fit` assigns all variables what they have after a step, at the end of each epoch
    return original(host_to_device.reshard(tensor, sharding), layout)


# --------------------------------------------------------------------------------------------------------- from files

_ENTIRE_TENSORS = "every process reads entire tensors, although it needs only its shards"


@INSTALLED.patch(saving_lib.H5IOStore, "__getitem__", reason=_ENTIRE_TENSORS)
def _get_tensor(original, distribution, self, key):
    if self.mode == "r" and _is_asked_for_by_keras():
        tensor = lazy_hdf5.lazy_tensor(saving_lib.safe_get_h5_dataset(self._h5_entry_group, key))
        if tensor is not None:
            vars(self).setdefault("live_tensors", weakref.WeakSet()).add(tensor)
            return tensor
    return original(self, key)


def _is_asked_for_by_keras() -> bool:
    """Returns whether Keras or KerasHub reads a tensor, in order to assign it. Other code may need a real array."""
    frame, module = sys._getframe(1), __name__
    while frame is not None and (module == saving_lib.__name__ or module.startswith("keras_dist.")):
        frame = frame.f_back
        module = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("keras", "keras_hub")


def _patch_close(store: type) -> None:
    @VARIABLES.patch(store, "close", reason="closes a file of which tensors are still to be read, by shard")
    def close(original, self):
        for tensor in list(vars(self).pop("live_tensors", ())):
            tensor.load()
        return original(self)


_patch_close(saving_lib.H5IOStore)
_patch_close(saving_lib.ShardedH5IOStore)


@INSTALLED.patch(legacy_h5_format, "load_subset_weights_from_hdf5_group", reason=_ENTIRE_TENSORS)
def _load_subset(original, distribution, group):
    names = legacy_h5_format.load_attributes_from_hdf5_group(group, "weight_names")
    datasets = [saving_lib.safe_get_h5_dataset(group, name) for name in names]
    return [lazy_hdf5.lazy_tensor(dataset) or np.asarray(dataset) for dataset in datasets]


# ---------------------------------------------------------------------------------------------- from `.keras` archives

_ENTIRE_ARCHIVES = "an archive is read into memory, or extracted, completely"


@INSTALLED.patch(saving_lib, "_load_model_from_fileobj", reason=_ENTIRE_ARCHIVES)
def _load_model_from_fileobj(original, distribution, fileobj, custom_objects, compile, safe_mode):
    with zipfile.ZipFile(fileobj, "r") as archive:
        is_seekable = lazy_hdf5.is_seekable(archive, saving_lib._VARS_FNAME_H5)
    with _is_read_in_place.set_to(is_seekable):
        return original(fileobj, custom_objects, compile, safe_mode)


class _ReadInPlace(Exception):
    """Keeps Keras from reading an archive into memory, or extracting it: it reads from the archive where both fail."""


@INSTALLED.patch(saving_lib, "is_memory_sufficient", reason=_ENTIRE_ARCHIVES)
def _is_memory_sufficient(original, distribution, model):
    if _is_read_in_place.value:
        raise _ReadInPlace
    return original(model)


@INSTALLED.patch(
    saving_lib.H5IOStore, "_get_h5_file", reason="an archive is decompressed from its beginning for every tensor"
)
def _get_h5_file(original, distribution, self, path_or_io, mode=None):
    name = str(path_or_io)
    is_read = (mode or self.mode) == "r" and self.archive
    if not is_read or not lazy_hdf5.is_seekable(self.archive, name):
        return original(self, path_or_io, mode)
    self.io_file = lazy_hdf5.OpenMember(self.archive, name)
    return saving_lib.h5py.File(self.io_file, mode="r")

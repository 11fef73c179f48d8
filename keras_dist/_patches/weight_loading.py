"""What of Keras is replaced so that values go straight into the shards of variables, from memory and from files."""

import sys
import threading
import zipfile

import jax
import numpy as np

from keras_dist._keras import internals
from keras_dist._keras.deferred_variables import is_deferring, lies_on_attached_devices
from keras_dist._keras.internals import legacy_h5_format, saving_lib
from keras_dist._keras.patch_registry import keras_own, ours_here, replaces
from keras_dist.variables import global_reads, host_to_device, lazy_hdf5
from keras_dist.variables.variable_layouts import as_sharding

_this_thread = threading.local()  # in_place: whether a model is loaded whose archive need not be read into memory


# ------------------------------------------------------------------------------------------------- values of variables


@replaces(
    internals.JaxVariable,
    "_convert_to_tensor",
    ("self", "value", "dtype"),
    "values that are whole on one device before they are sharded (keras#21634)",
)
def _convert_to_tensor(self, value, dtype=None):
    if isinstance(value, global_reads.HeldShards):
        return value.restored()
    if (
        isinstance(value, jax.Array)
        or ours_here() is None
        or not host_to_device.is_host_tensor(value)
        or internals.in_stateless_scope()
        or internals.is_in_jax_tracing_scope()
    ):
        return keras_own(internals.JaxVariable, "_convert_to_tensor")(self, value, dtype)
    if self._shape is None and not is_deferring():  # of a variable to be made, whose layout is asked for afterwards
        return host_to_device.on_host(value, dtype and internals.standardize_dtype(dtype))
    sharding = as_sharding(self._layout)
    if not isinstance(sharding, jax.sharding.Sharding) or not lies_on_attached_devices(self):
        return keras_own(internals.JaxVariable, "_convert_to_tensor")(self, value, dtype)
    if value.shape != tuple(self.shape):
        return value  # Keras says so, and needs no more than the shape
    return host_to_device.place(value, sharding, dtype)


@replaces(
    internals.backend_lib,
    "distribute_tensor",
    ("tensor", "layout"),
    "values that all processes compare before each takes its part",
)
def _distribute_tensor(tensor, layout):
    original, sharding = keras_own(internals.backend_lib, "distribute_tensor"), as_sharding(layout)
    if (
        ours_here() is None
        or not isinstance(sharding, jax.sharding.Sharding)
        or not (host_to_device.is_host_tensor(tensor) or isinstance(tensor, jax.Array))
        or internals.is_in_jax_tracing_scope(tensor)
    ):
        return original(tensor, layout)
    return original(host_to_device.move(tensor, sharding), layout)


# --------------------------------------------------------------------------------------------------------- from files


@replaces(
    saving_lib.H5IOStore,
    "__getitem__",
    ("self", "key"),
    "tensors that are read whole where a part is needed",
)
def _get_tensor(self, key):
    if self.mode == "r" and ours_here() is not None and _is_for_keras(sys._getframe(1)):
        tensor = lazy_hdf5.stored_tensor(saving_lib.safe_get_h5_dataset(self._h5_entry_group, key))
        if tensor is not None:
            vars(self).setdefault("handed", lazy_hdf5.Handed()).add(tensor)
            return tensor
    return keras_own(saving_lib.H5IOStore, "__getitem__")(self, key)


def _is_for_keras(frame) -> bool:
    """Whether Keras or KerasHub asks for a tensor: they assign it. Anybody else may do what takes a real array."""
    while frame.f_globals.get("__name__") == saving_lib.__name__:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("keras", "keras_hub")


def _close(store: type) -> None:
    @replaces(store, "close", ("self",), "tensors that are read after their file is closed", outlives=True)
    def close(self):
        if "handed" in vars(self):
            self.handed.settle()
        return keras_own(store, "close")(self)


_close(saving_lib.H5IOStore)
_close(saving_lib.ShardedH5IOStore)


@replaces(
    legacy_h5_format,
    "load_subset_weights_from_hdf5_group",
    ("group",),
    "tensors that are read whole where a part is needed",
)
def _load_subset(group):
    if ours_here() is None:
        return keras_own(legacy_h5_format, "load_subset_weights_from_hdf5_group")(group)
    names = legacy_h5_format.load_attributes_from_hdf5_group(group, "weight_names")
    datasets = [saving_lib.safe_get_h5_dataset(group, name) for name in names]
    return [np.asarray(d) if (tensor := lazy_hdf5.stored_tensor(d)) is None else tensor for d in datasets]


# ---------------------------------------------------------------------------------------------- from `.keras` archives


@replaces(
    saving_lib,
    "_load_model_from_fileobj",
    ("fileobj", "custom_objects", "compile", "safe_mode"),
    "archives that are read whole into memory",
)
def _load_model_from_fileobj(fileobj, custom_objects, compile, safe_mode):
    original = keras_own(saving_lib, "_load_model_from_fileobj")
    before = getattr(_this_thread, "in_place", False)
    try:
        if ours_here() is not None:
            with zipfile.ZipFile(fileobj, "r") as archive:
                _this_thread.in_place = lazy_hdf5.lies_plain(archive, saving_lib._VARS_FNAME_H5)
        return original(fileobj, custom_objects, compile, safe_mode)
    finally:
        _this_thread.in_place = before


class _ReadInPlace(Exception):
    """Keeps Keras from reading an archive into memory, or extracting it: it reads from the archive where both fail."""


@replaces(
    saving_lib,
    "is_memory_sufficient",
    ("model",),
    "archives that are read whole into memory",
)
def _is_memory_sufficient(model):
    if getattr(_this_thread, "in_place", False):
        raise _ReadInPlace
    return keras_own(saving_lib, "is_memory_sufficient")(model)


@replaces(
    saving_lib.H5IOStore,
    "_get_h5_file",
    ("self", "path_or_io", "mode"),
    "archives that are read from their beginning for every tensor",
)
def _get_h5_file(self, path_or_io, mode=None):
    name = str(path_or_io)
    is_read = ours_here() is not None and (mode or self.mode) == "r" and self.archive
    if not is_read or not lazy_hdf5.lies_plain(self.archive, name):
        return keras_own(saving_lib.H5IOStore, "_get_h5_file")(self, path_or_io, mode)
    self.io_file = lazy_hdf5.open_member(self.archive, name)
    return saving_lib.h5py.File(self.io_file, mode="r")

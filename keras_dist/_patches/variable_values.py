"""Patches that load values directly into the shards of variables, and read shards that other processes hold."""

import contextlib
import io
import os
import weakref
import zipfile
from typing import Any

import jax
import keras
import numpy as np

try:
    import safetensors
except ImportError:
    safetensors = None

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED, VARIABLES, active_distribution
from keras_dist._keras.deferred_variables import is_deferring
from keras_dist._keras.internals import as_sharding, legacy_h5_format, saving_lib
from keras_dist._report.units import counted
from keras_dist.multihost import messaging
from keras_dist.variables import global_reads, host_to_device, lazy_hdf5, safetensors_files
from keras_dist.variables.variable_layouts import is_on_attached_devices

# ------------------------------------------------------------------------------------------------------ from memory


@INSTALLED.patch(internals.JaxVariable, "_convert_to_tensor", issue="keras#21634", every_thread=True)
def _convert_to_tensor(original, self, value, dtype=None):
    """Without it, a value is placed on one device before it is sharded."""
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


@INSTALLED.patch(internals.backend_lib, "distribute_tensor")
def _distribute_tensor(original, distribution, tensor, layout):
    """Without it, all processes compare a value before each takes its shards."""
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


@INSTALLED.patch(saving_lib, "H5IOStore", reason=_ENTIRE_TENSORS)
class H5IOStore(saving_lib.H5IOStore):
    """Keras's store of tensors in a file. They are read when they are used, and at the latest when it is closed."""

    def __getitem__(self, key: str) -> Any:
        if self.mode == "r" and active_distribution() is not None:
            tensor = lazy_hdf5.lazy_tensor(saving_lib.safe_get_h5_dataset(self._h5_entry_group, key))
            if tensor is not None:
                vars(self).setdefault("read_later", []).append(weakref.ref(tensor))
                return tensor
        return super().__getitem__(key)

    def _get_h5_file(self, path_or_io, mode=None):
        """Opens a file. One in an archive would be decompressed from its beginning for every tensor."""
        if self._is_written_by_all(mode or self.mode) and messaging.process_index():
            return super()._get_h5_file(io.BytesIO(), mode)  # pyright: ignore[reportArgumentType]
        name, archive = str(path_or_io), self.archive if (mode or self.mode) == "r" else None
        if archive is None or active_distribution() is None or not lazy_hdf5.is_seekable(archive, name):
            return super()._get_h5_file(path_or_io, mode)
        self.io_file = lazy_hdf5.OpenMember(archive, name)
        return saving_lib.h5py.File(self.io_file, mode="r")

    def _is_written_by_all(self, mode: str) -> bool:
        """Whether all processes write the same file, as for `save_lora_weights` of KerasHub. Then process 0 does."""
        is_path = isinstance(getattr(self, "path_or_io", None), (str, os.PathLike)) and self.archive is None
        return mode == "w" and is_path and messaging.is_multi_process() and not global_reads.is_running_for_all()

    def close(self):
        _read_now(self)
        super().close()
        if self._is_written_by_all(self.mode):
            path = str(self.path_or_io)
            global_reads.require_same_call("writing of a file", path, "All processes must write the same file.")


@INSTALLED.patch(saving_lib, "ShardedH5IOStore", reason=_ENTIRE_TENSORS)
class ShardedH5IOStore(saving_lib.ShardedH5IOStore, H5IOStore):
    def close(self):
        _read_now(self)
        super().close()


def _read_now(store: Any) -> None:
    for reference in vars(store).pop("read_later", ()):
        if (tensor := reference()) is not None:
            tensor.load()


@INSTALLED.patch(legacy_h5_format, "load_subset_weights_from_hdf5_group", reason=_ENTIRE_TENSORS)
def _load_subset(original, distribution, group):
    names = legacy_h5_format.load_attributes_from_hdf5_group(group, "weight_names")
    datasets = [saving_lib.safe_get_h5_dataset(group, name) for name in names]
    return [lazy_hdf5.lazy_tensor(dataset) or np.asarray(dataset) for dataset in datasets]


@INSTALLED.patch(saving_lib, "_load_model_from_fileobj")
def _load_model_from_fileobj(original, distribution, fileobj, custom_objects, compile, safe_mode):
    """Without it, an archive is read into memory, or extracted, completely."""
    with zipfile.ZipFile(fileobj, "r") as archive:
        if not lazy_hdf5.is_seekable(archive, saving_lib._VARS_FNAME_H5):
            return original(fileobj, custom_objects, compile, safe_mode)
        config = saving_lib._safe_zip_read(archive, saving_lib._CONFIG_FILENAME)
        model = saving_lib._model_from_config(config, custom_objects, compile, safe_mode)
        failed, messages = set(), {}
        state = {"visited_saveables": set(), "failed_saveables": failed, "error_msgs": messages}
        with contextlib.ExitStack() as stores:
            weights = saving_lib.H5IOStore(saving_lib._VARS_FNAME_H5, archive, mode="r")
            stores.callback(weights.close)
            assets = None
            if any(name.startswith(f"{saving_lib._ASSETS_DIRNAME}/") for name in archive.namelist()):
                assets = saving_lib.DiskIOStore(saving_lib._ASSETS_DIRNAME, archive=archive, mode="r")
                stores.callback(assets.close)
            saving_lib._load_state(model, weights_store=weights, assets_store=assets, inner_path="", **state)
    if failed:
        saving_lib._raise_loading_failure(messages)
    return model


if safetensors is not None:

    @INSTALLED.patch(safetensors, "safe_open", reason=_ENTIRE_TENSORS)
    def _safe_open(original, distribution, *args, **kwargs):
        named = dict(zip(("filename", "framework"), args, strict=False)) | kwargs
        try:
            opened = original(*args, **kwargs)
        except safetensors.SafetensorError:  # pyright: ignore[reportOptionalMemberAccess]
            safetensors_files.read_header(named["filename"])  # raises an error that names a damaged file
            raise
        is_of_numpy = named["framework"] in ("np", "numpy")
        return safetensors_files.SafetensorsFile(named["filename"], opened) if is_of_numpy else opened


# ---------------------------------------------------------------------------------------------------------- reading

_HELD_BY_OTHERS = "a variable whose shards are on several processes cannot be read"


@VARIABLES.patch(internals.KerasVariable, "__array__", reason=_HELD_BY_OTHERS)
def _array(original, self, dtype=None, *, copy=None):
    if not internals.in_stateless_scope() and global_reads.is_held_by_others(internals.variable_value(self)):
        return np.asarray(global_reads.read(self), dtype=dtype)
    # NumPy does not copy by itself where `__array__` accepts `copy`.
    return np.array(original(self, dtype), copy=copy)


@VARIABLES.patch(keras.Layer, "get_weights", reason=_HELD_BY_OTHERS)
def _get_weights(original, self):
    weights = self.weights
    if not any(global_reads.is_held_by_others(internals.variable_value(variable)) for variable in weights):
        return original(self)
    if global_reads.own_shards_only.value:
        return [global_reads.HeldShards(variable.value) for variable in weights]
    with global_reads.agreed(f"get_weights() of {self.name!r}, {counted(len(weights), 'variable')}"):
        return original(self)


@INSTALLED.patch(keras.callbacks.EarlyStopping, "on_epoch_end")
def _keep_best_weights(original, distribution, self, epoch, logs=None):
    """Without it, every process keeps a full copy of the best weights, instead of its shards."""
    with global_reads.own_shards_only.set_to(True):
        return original(self, epoch, logs)

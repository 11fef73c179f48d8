"""What of Keras is replaced so that files are written once, by process 0, and whole or not at all."""

import copy
import functools
import os
import shutil
from collections.abc import Callable

import keras

from keras_dist._keras.internals import file_utils, legacy_h5_format, saving_lib
from keras_dist._keras.patch_registry import keras_own, ours_here, replaces
from keras_dist.checkpoint.atomic_write import write_whole
from keras_dist.multihost import messaging
from keras_dist.variables.process_zero import agree, lead

_ONCE = "files that every process writes, over those of the others"


def _save(model, path, write: Callable) -> None:
    """Writes a model to a path, by a function of Keras."""
    if ours_here() is None:
        return write(path)
    is_local = isinstance(path, (str, os.PathLike)) and not file_utils.is_remote_path(os.fspath(path))
    work = functools.partial(write_whole, path, write) if is_local else functools.partial(write, path)
    where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else type(path).__name__
    return lead(model, f"save {where!r}", work)


@replaces(saving_lib, "save_model", ("model", "filepath", "weights_format", "zipped"), _ONCE)
def _save_model(model, filepath, weights_format="h5", zipped=True):
    original = keras_own(saving_lib, "save_model")
    return _save(model, filepath, lambda path: original(model, path, weights_format=weights_format, zipped=zipped))


@replaces(saving_lib, "save_weights_only", ("model", "filepath", "max_shard_size", "objects_to_skip"), _ONCE)
def _save_weights_only(model, filepath, max_shard_size=None, objects_to_skip=None):
    original = keras_own(saving_lib, "save_weights_only")
    return _save(model, filepath, lambda path: original(model, path, max_shard_size, objects_to_skip))


@replaces(legacy_h5_format, "save_model_to_hdf5", ("model", "filepath", "overwrite", "include_optimizer"), _ONCE)
def _save_model_to_hdf5(model, filepath, overwrite=True, include_optimizer=True):
    original = keras_own(legacy_h5_format, "save_model_to_hdf5")
    return _save(model, filepath, lambda path: original(model, path, overwrite, include_optimizer))


# ----------------------------------------------------------------------------------------------------------- callbacks


def _are_several() -> bool:
    return ours_here() is not None and messaging.are_several()


def _on_process_0(callback: type, name: str, parameters: tuple[str, ...]) -> None:
    """Lets a method of a callback do nothing but on process 0."""

    @replaces(callback, name, ("self", *parameters), _ONCE)
    def method(self, *args, **kwargs):
        if _are_several() and messaging.index() != 0:
            return None
        return keras_own(callback, name)(self, *args, **kwargs)


def _led_by_process_0(callback: type, name: str, parameters: tuple[str, ...], what: str) -> None:
    """Lets a method of a callback run on process 0, while the others wait and lend what it reads."""

    @replaces(callback, name, ("self", *parameters), _ONCE)
    def method(self, *args, **kwargs):
        work = functools.partial(keras_own(callback, name), self, *args, **kwargs)
        return lead(self.model, what, work) if _are_several() else work()


_BATCH, _EPOCH, _LOGS = ("batch", "logs"), ("epoch", "logs"), ("logs",)

for _name, _parameters in {"on_train_begin": _LOGS, "on_epoch_end": _EPOCH, "on_train_end": _LOGS}.items():
    _on_process_0(keras.callbacks.CSVLogger, _name, _parameters)

_led_by_process_0(keras.callbacks.BackupAndRestore, "on_train_end", _LOGS, "delete a backup")


@replaces(
    keras.callbacks.BackupAndRestore,
    "_save_model",
    ("self",),
    "backups whose files a process that is killed leaves half written",
)
def _save_backup(self):
    original = keras_own(keras.callbacks.BackupAndRestore, "_save_model")
    if ours_here() is None:
        return original(self)
    if file_utils.is_remote_path(self.backup_dir):
        work = functools.partial(original, self)
    else:
        work = functools.partial(write_whole, self.backup_dir, functools.partial(_backup_in, self, original))
    return lead(self.model, "write a backup", work)


def _backup_in(callback, write: Callable, folder: str) -> None:
    """Writes a backup into another folder, and with `double_checkpoint` the one before, which Keras would copy."""
    other = copy.copy(callback)
    other.backup_dir = folder
    os.makedirs(folder, exist_ok=True)
    for name in ("_weights_path", "_training_metadata_path"):
        before = getattr(callback, name)
        setattr(other, name, os.path.join(folder, os.path.basename(before)))
        if callback.double_checkpoint and os.path.exists(before):
            shutil.copy(before, f"{getattr(other, name)}.bkp")
    write(other)


@replaces(
    keras.callbacks.BackupAndRestore,
    "on_train_begin",
    ("self", "logs"),
    "backups that some processes find and others do not",
)
def _restore(self, logs=None):
    if _are_several():
        found = [file_utils.exists(path) for path in (self._weights_path, self._training_metadata_path)]
        agree(
            "reading of a backup",
            f"{'a' if any(found) else 'no'} backup",
            f"All processes go on from the same backup, in a folder that all see. Asked for: {self.backup_dir!r}.",
        )
    return keras_own(keras.callbacks.BackupAndRestore, "on_train_begin")(self, logs)


for _name, _parameters in {
    "on_train_begin": _LOGS,
    "on_train_end": _LOGS,
    "on_test_begin": _LOGS,
    "on_test_end": _LOGS,
    "on_train_batch_begin": _BATCH,
    "on_train_batch_end": _BATCH,
    "on_test_batch_begin": _BATCH,
    "on_test_batch_end": _BATCH,
    "on_epoch_begin": _EPOCH,
}.items():
    _on_process_0(keras.callbacks.TensorBoard, _name, _parameters)
_led_by_process_0(keras.callbacks.TensorBoard, "on_epoch_end", _EPOCH, "write what TensorBoard shows")


@replaces(keras.callbacks.TensorBoard, "set_model", ("self", "model"), _ONCE)
def _set_model(self, model):
    if _are_several() and messaging.index() != 0:
        self._model = model
    else:
        keras_own(keras.callbacks.TensorBoard, "set_model")(self, model)


@replaces(
    file_utils,
    "makedirs",
    ("path",),
    "folders that several processes make at once",
)
def _make_folders(path):
    if _are_several() and not file_utils.is_remote_path(path):
        os.makedirs(path, exist_ok=True)
    else:
        keras_own(file_utils, "makedirs")(path)

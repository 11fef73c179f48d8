"""Patches that write files once, by process 0, and atomically."""

import copy
import functools
import os
import shutil
from collections.abc import Callable

import keras

from keras_dist._keras.active_distribution import INSTALLED
from keras_dist._keras.internals import file_utils, legacy_h5_format, saving_lib
from keras_dist.checkpoint.atomic_write import write_atomically
from keras_dist.multihost import messaging
from keras_dist.variables.global_reads import require_same_call, run_on_process_zero

_REASON = "every process writes the same file"


@INSTALLED.patch(saving_lib, "save_model", reason=_REASON)
@INSTALLED.patch(saving_lib, "save_weights_only", reason=_REASON)
@INSTALLED.patch(legacy_h5_format, "save_model_to_hdf5", reason=_REASON)
def _save(original, distribution, model, filepath, *args, **kwargs):
    def write(path):
        return original(model, path, *args, **kwargs)

    is_path = isinstance(filepath, (str, os.PathLike))
    is_local = is_path and not file_utils.is_remote_path(os.fspath(filepath))
    work = functools.partial(write_atomically, filepath, write) if is_local else functools.partial(write, filepath)
    where = os.fspath(filepath) if is_path else type(filepath).__name__
    return run_on_process_zero(model, f"save {where!r}", work)


# ----------------------------------------------------------------------------------------------------------- callbacks


@INSTALLED.patch(keras.callbacks.CSVLogger, "on_train_begin", reason=_REASON)
def _open_log(original, distribution, self, logs=None):
    if messaging.process_index() == 0:
        return original(self, logs)
    self.csv_file, self.writer, self.keys = open(os.devnull, "w"), None, None  # noqa: SIM115
    return None


class _Silent:
    """Stands for TensorBoard's summaries and their writers where nothing is written."""

    def __call__(self, *args, **kwargs):
        return self

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass


@INSTALLED.patch(keras.callbacks.TensorBoard, "set_model", reason=_REASON)
def _set_model(original, distribution, self, model):
    if messaging.process_index() != 0:
        self._summary_module = _Silent()
        self.write_graph, self.embeddings_freq, self._should_trace = False, 0, False
    original(self, model)


@INSTALLED.patch(keras.callbacks.TensorBoard, "on_epoch_end", reason=_REASON)
def _write_summaries(original, distribution, self, *args, **kwargs):
    work = functools.partial(original, self, *args, **kwargs)
    return run_on_process_zero(self.model, "write what TensorBoard shows", work)


@INSTALLED.patch(keras.callbacks.BackupAndRestore, "on_train_end", reason=_REASON)
def _delete_backup(original, distribution, self, logs=None):
    return run_on_process_zero(self.model, "delete a backup", functools.partial(original, self, logs))


@INSTALLED.patch(keras.callbacks.BackupAndRestore, "_save_model")
def _save_backup(original, distribution, self):
    """Without it, a process that is killed while it writes leaves a backup that cannot be read."""
    work = functools.partial(original, self)
    if not file_utils.is_remote_path(self.backup_dir):
        work = functools.partial(write_atomically, self.backup_dir, functools.partial(_backup_in, self, original))
    return run_on_process_zero(self.model, "write a backup", work)


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


@INSTALLED.patch(keras.callbacks.BackupAndRestore, "on_train_begin")
def _restore(original, distribution, self, logs=None):
    """Without it, only some processes find a backup, and the rest begins anew."""
    if messaging.is_multi_process():
        found = [file_utils.exists(path) for path in (self._weights_path, self._training_metadata_path)]
        require_same_call(
            "reading of a backup",
            f"{'a' if any(found) else 'no'} backup",
            f"All processes must find the same backup, in a folder that all can read: {self.backup_dir!r}.",
        )
    return original(self, logs)


@INSTALLED.patch(file_utils, "makedirs", reason="several processes create the same folder at once")
def _make_folders(original, distribution, path):
    if messaging.is_multi_process() and not file_utils.is_remote_path(path):
        os.makedirs(path, exist_ok=True)
    else:
        original(path)

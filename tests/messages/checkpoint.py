"""Texts of `keras_dist/checkpoint`."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import sys
from concurrent import futures
from unittest import mock

import keras
import numpy as np

import keras_dist as kd
from keras_dist.checkpoint import checksums, restore
from keras_dist.checkpoint.checkpoint_files import CheckpointFiles
from keras_dist.checkpoint.preemption import Preemption
from keras_dist.multihost import messaging

X, Y = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")


def new_model(*widths):
    layers = [keras.layers.Dense(width, name=f"layer_{number}") for number, width in enumerate(widths)]
    model = keras.Sequential([keras.Input((4,)), *layers], name="gpt")
    model.compile("sgd", "mse")
    return model


def new_directory():
    shutil.rmtree("checkpoints", ignore_errors=True)
    return os.path.abspath("checkpoints")


def fit(model, directory="checkpoints"):
    model.fit(X, Y, verbose=0, callbacks=[kd.TrainingCheckpoint(os.path.abspath(directory))])


def fit_several_steps_per_execution():
    with kd.DataParallel().scope():
        model = new_model(8, 1)
        model.compile("sgd", "mse", steps_per_execution=4)
        model.fit(X, Y, verbose=0, callbacks=[kd.TrainingCheckpoint(new_directory(), save_freq=6)])


def fit_with_two():
    checkpoints = [kd.TrainingCheckpoint(directory) for directory in (os.path.basename(new_directory()), "others")]
    with kd.DataParallel().scope():
        new_model(8, 1).fit(X, Y, verbose=0, callbacks=checkpoints)


def restart(*widths):
    """Trains a model of two layers, and then another one with the same directory."""
    with kd.DataParallel().scope():
        fit(new_model(8, 1), new_directory())
        fit(new_model(*widths))


def load(model, **arguments):
    with kd.DataParallel().scope():
        fit(new_model(8, 1), new_directory())
        model().load_weights(os.path.abspath("checkpoints"), **arguments)


def load_model_of_weights():
    with kd.DataParallel().scope():
        callback = keras.callbacks.OrbaxCheckpoint(os.path.abspath(new_directory()), save_weights_only=True)
        new_model(8, 1).fit(X, Y, verbose=0, callbacks=[callback])
        keras.saving.load_model(os.path.abspath("checkpoints"))


def damaged(use, *steps, name="pytree/_METADATA"):
    """Uses a directory with two checkpoints, of which a file is missing in some."""
    with kd.DataParallel().scope():
        directory = new_directory()
        checkpoint = kd.TrainingCheckpoint(directory, max_to_keep=None)
        new_model(8, 1).fit(X, Y, epochs=2, verbose=0, callbacks=[checkpoint])
        for step in steps:
            os.remove(os.path.join(directory, step, name))
        use(directory)


def load_step(directory):
    new_model(8, 1).load_weights(os.path.join(directory, "2"))


def unreadable(directory):
    denied = PermissionError(errno.EACCES, "Permission denied")
    with mock.patch.object(checksums, "_size_and_sum", side_effect=denied):
        load_step(directory)


def not_renamed(directory):
    denied = PermissionError(errno.EACCES, "Permission denied")
    with mock.patch("os.rename", side_effect=denied), mock.patch("os.replace", side_effect=denied):
        fit(new_model(8, 1))


def without_orbax():
    with mock.patch.dict(sys.modules, {"orbax.checkpoint": None}):
        kd.TrainingCheckpoint("checkpoints")


def different_directories():
    def exchange(topic, message, is_abandoned=None):
        return [message, 40] if topic == "TrainingCheckpoint" else [message]

    with mock.patch.object(messaging, "exchange", exchange), kd.DataParallel().scope():
        fit(new_model(8, 1), new_directory())


def another_number_of_processes():
    directory = new_directory()
    folder = os.path.join(directory, "7", "progress")
    os.makedirs(folder)
    with open(os.path.join(folder, "process_0-of-4.json"), "w") as file:
        file.write('{"data": {"source": "grain"}}')
    with kd.DataParallel().scope(), contextlib.closing(CheckpointFiles(directory, optimizer_built(), 1, True)) as files:
        files._progress(os.path.join(directory, "7"))


def optimizer_built():
    model = new_model(8, 1)
    model.optimizer.build(model.trainable_variables)
    return model


def in_another_thread():
    with futures.ThreadPoolExecutor(thread_name_prefix="worker") as executor:
        executor.submit(lambda: Preemption((signal.SIGTERM, signal.SIGUSR1))).result()


def fit_where(directory, owner, name, **replacement):
    """Trains where a function of the system returns or raises something."""
    with mock.patch.object(owner, name, **replacement), kd.DataParallel().scope():
        fit(new_model(8, 1), directory)


def not_writable():
    with kd.DataParallel().scope():
        fit(new_model(8, 1), os.path.join(os.devnull, "checkpoints"))


def too_small():
    usage = mock.Mock(free=100)
    fit_where(new_directory(), shutil, "disk_usage", return_value=usage)


def used_by_another_job():
    directory = new_directory()
    os.makedirs(directory)
    with open(os.path.join(directory, ".in_use"), "w") as file:
        file.write("process 4711 on host-3\n")
    fit_where(directory, fcntl, "lockf", side_effect=BlockingIOError)


def removed_during_training():
    class Remove(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            shutil.rmtree("checkpoints")

    directory = new_directory()
    with kd.DataParallel().scope():
        new_model(8, 1).fit(X, Y, verbose=0, callbacks=[kd.TrainingCheckpoint(directory), Remove()])


def not_locked():
    directory = new_directory()
    os.makedirs(os.path.join(directory, ".in_use"))
    with kd.DataParallel().scope():
        fit(new_model(8, 1))


def other_batches():
    checkpoint = kd.TrainingCheckpoint("checkpoints")
    checkpoint.set_params({"steps": 50})
    checkpoint._require_same_epochs({"batches": 40, "batches_of_epoch": 100})


def disk_is_full():
    with kd.DataParallel().scope():
        files = CheckpointFiles(new_directory(), optimizer_built(), 1, False)
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch.object(restore.orbax(), "save_checkpointables_async", side_effect=full):
            files.save(1, optimizer_built(), {})


CASES = {
    "signals has one that no program can handle": lambda: kd.TrainingCheckpoint("c", signals=(signal.SIGKILL,)),
    "signals has a number that is no signal": lambda: kd.TrainingCheckpoint("c", signals=(1000,)),
    "exit_status is out of range": lambda: kd.TrainingCheckpoint("checkpoints", exit_status=256),
    "fit runs in another thread": in_another_thread,
    "fit has two TrainingCheckpoints": fit_with_two,
    "save_freq is no multiple of steps_per_execution": fit_several_steps_per_execution,
    "the directory is not writable": not_writable,
    "the directory is too small": too_small,
    "the directory is used by another job": used_by_another_job,
    "the directory is removed during training": removed_during_training,
    "the file that locks the directory cannot be opened": not_locked,
    "an epoch has another number of batches": other_batches,
    "the disk is full": disk_is_full,
    "directory is None": lambda: kd.TrainingCheckpoint(None),
    "directory is a model": lambda: kd.TrainingCheckpoint(new_model(8, 1), "checkpoints"),
    "fit is called again": lambda: restart(8, 1),
    "save_freq is out of range": lambda: kd.TrainingCheckpoint("checkpoints", save_freq=0),
    "max_to_keep is out of range": lambda: kd.TrainingCheckpoint("checkpoints", max_to_keep=0),
    "Orbax is not installed": without_orbax,
    "fit without a distribution": lambda: fit(new_model(8, 1)),
    "processes see different directories": different_directories,
    "a grain dataset resumes with another number of processes": another_number_of_processes,
    "the checkpoint is of a model with other shapes": lambda: restart(6, 1),
    "the checkpoint is of a model with other layers": lambda: restart(8, 8, 8, 8, 1),
    "weights are loaded into a model that is not built": lambda: load(lambda: keras.Sequential(name="gpt")),
    "weights are loaded with an option for another format": lambda: load(lambda: new_model(8, 1), by_name=True),
    "a model is loaded from a checkpoint of weights": load_model_of_weights,
    "the newest checkpoint is damaged, and training resumes": lambda: damaged(lambda _: fit(new_model(8, 1)), "2"),
    "the newest checkpoint is damaged, and weights are loaded": lambda: damaged(new_model(8, 1).load_weights, "2"),
    "all checkpoints are damaged": lambda: damaged(new_model(8, 1).load_weights, "2", "1"),
    "the checkpoint of a step is damaged": lambda: damaged(load_step, "2", name="pytree/manifest.ocdbt"),
    "a checkpoint cannot be read": lambda: damaged(unreadable),
    "a damaged checkpoint cannot be renamed": lambda: damaged(not_renamed, "2"),
    "weights are loaded with skip_mismatch": lambda: load(lambda: new_model(8, 8, 1), skip_mismatch=True),
}

"""Directories in which nothing can be saved are named before the first step, and never cost a complete checkpoint."""

import errno
import resource
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist.checkpoint import restore
from keras_dist.checkpoint.directory import DirectoryLock, why_not_writable

X = np.ones((64, 4), "float32")


def train(directory, *callbacks, epochs=2, **arguments):
    with kd.DataParallel().scope():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1000), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        checkpoint = kd.TrainingCheckpoint(str(directory), save_freq=2, save_on_background=False)
        arguments = {"batch_size": 8, "verbose": 0, **arguments}
        return model.fit(X, X[:, :1], epochs=epochs, callbacks=[checkpoint, *callbacks], **arguments).epoch


class Steps(keras.callbacks.Callback):
    """Counts steps, and calls a function after some."""

    def __init__(self, after=0, function=lambda: None):
        super().__init__()
        self.after, self.function, self.count = after, function, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.count += 1
        if self.count == self.after:
            self.function()


def test_a_directory_that_cannot_be_written_is_named_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    steps = Steps()
    with pytest.raises(ValueError, match=f"{tmp_path}/file/checkpoints is not writable"):
        train(tmp_path / "file" / "checkpoints", steps)
    assert steps.count == 0


def test_a_directory_that_is_too_small_is_named_before_the_first_step(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=70_000))
    assert why_not_writable(str(tmp_path), 70_000) is None
    with pytest.raises(ValueError, match=r"68.4 KiB of free space, but a checkpoint of this model takes 70.3 KiB"):
        train(tmp_path)  # three values for each of 6,001 weights


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_directory_of_a_running_job_is_named_and_free_when_it_has_ended(tmp_path):
    code = f"""
from keras_dist.checkpoint.directory import DirectoryLock
lock = DirectoryLock({str(tmp_path)!r})
print(lock.problem, flush=True)
input()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    with pytest.raises(
        ValueError, match=f"{tmp_path} is used by another job that is running: process {process.pid} on"
    ):
        train(tmp_path)
    process.kill()
    process.wait()
    assert train(tmp_path) == [0, 1]
    lock = DirectoryLock(str(tmp_path))  # released by fit
    assert lock.problem is None
    lock.release()


def test_a_directory_that_is_removed_during_training_is_locked_and_written_again(tmp_path):
    directory = tmp_path / "checkpoints"

    def remove():
        shutil.rmtree(directory)

    with pytest.warns(UserWarning, match=f"{directory}, or .in_use in it, was removed while this job uses it"):
        assert train(directory, Steps(6, remove)) == [0, 1]
    assert {path.name for path in directory.iterdir()} == {".in_use", "16"}
    assert train(directory) == [1]  # the end of its last batch


@pytest.mark.multiprocess
def test_a_directory_that_is_removed_and_taken_by_another_job_is_named(tmp_path):
    directory, others = tmp_path / "checkpoints", []

    def take():
        shutil.rmtree(directory)
        directory.mkdir()
        code = f"import fcntl; file = open({str(directory / '.in_use')!r}, 'a'); fcntl.lockf(file, fcntl.LOCK_EX)"
        command = [sys.executable, "-uc", f"{code}; input(print())"]
        others.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        others[0].stdout.readline()

    try:
        with pytest.raises(ValueError, match=f"{directory} is used by another job that is running: unknown.*delete"):
            train(directory, Steps(6, take))
        assert {path.name for path in directory.iterdir()} == {".in_use"}
    finally:
        others[0].kill()
        others[0].communicate()
    assert train(directory) == [0, 1]


def test_an_old_checkpoint_that_cannot_be_deleted_is_named(tmp_path, monkeypatch):
    def fail(self, missing_ok=False):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(type(restore.etils_path("/")), "rmtree", fail)
    with pytest.warns(UserWarning, match=rf"{tmp_path}/8 is no longer needed and .* deleted \(Permission denied\)"):
        assert train(tmp_path) == [0, 1]


def test_a_file_of_nobody_does_not_keep_a_directory_busy(tmp_path):
    lock = tmp_path / ".in_use"
    lock.write_bytes(b"\xff stale")  # of a job that was killed
    assert train(tmp_path) == [0, 1]
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ValueError, match=rf"{lock} cannot be opened \(Is a directory\).*Delete that file"):
        train(tmp_path, epochs=3)
    lock.rmdir()
    assert train(tmp_path, epochs=3) == [1, 2]


def test_a_full_disk_costs_no_complete_checkpoint(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill = Steps(6, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1])))  # bytes of a file
    try:
        with pytest.raises(OSError, match=f"could not be written to {tmp_path}: "):
            train(tmp_path, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    shutil.copytree(tmp_path / "4", tmp_path / "again" / "4")  # Orbax's threads may still write to the other one
    steps = Steps()
    assert train(tmp_path / "again", steps) == [0, 1]
    assert steps.count == 16 - 4


def test_a_position_in_epochs_of_other_batches_is_an_error(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    train(tmp_path, Stop())
    with pytest.raises(ValueError, match="after batch 3 of 8 of an epoch, but an epoch of this fit has 4"):
        train(tmp_path, batch_size=16)
    assert train(tmp_path) == [0, 1]


@pytest.mark.slow
def test_a_program_can_end_after_a_checkpoint_that_could_not_be_written(tmp_path):
    """Threads of Orbax wait five minutes for a folder that cannot be created."""
    code = f"""
import os, keras, numpy as np
import keras_dist as kd

def replace(batch, logs=None):
    if batch == 2:
        os.rename({str(tmp_path / "used")!r}, {str(tmp_path / "moved")!r})
        open({str(tmp_path / "used")!r}, "w").close()

kd.simulate_devices(2)
kd.set_distribution(kd.DataParallel())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((80, 4), "float32")
callbacks = [kd.TrainingCheckpoint({str(tmp_path / "used")!r}, save_freq=2)]
callbacks += [keras.callbacks.LambdaCallback(on_train_batch_begin=replace)]
model.fit(x, x[:, :1], batch_size=8, callbacks=callbacks)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert f"OSError: A checkpoint could not be written to {tmp_path / 'used'}: " in done.stderr

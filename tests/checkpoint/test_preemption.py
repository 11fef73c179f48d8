"""Training that a signal ends: saved completely at any moment, and continued with the same losses."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
from support.slow_cases import slow, slow_unless

import keras_dist as kd
from keras_dist.checkpoint.preemption import Preemption

ROWS, BATCH, EPOCHS = 48, 8, 3  # six batches an epoch, and three of validation
X = np.sin(np.arange(ROWS * 4, dtype="float32").reshape(ROWS, 4))
Y = X.sum(1, keepdims=True)
MOMENTS = {
    "before the first step": ("epoch", 0),
    "in an epoch": ("batch", 9),
    "at the last batch of an epoch": ("batch", 6),
    "in validation": ("test", 4),
    "at the end of validation": ("test", 6),
    "between two epochs": ("end", 1),
    "at the end of training": ("end", 3),
}


@pytest.fixture(autouse=True)
def restored_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Events(keras.callbacks.Callback):
    """Records losses, and sends this process signals at the n-th event of a kind."""

    def __init__(self, kind=None, number=None, signals=(signal.SIGTERM,)):
        super().__init__()
        self.at, self.signals, self.counts = (kind, number), signals, {}
        self.losses, self.epochs, self.epoch = {}, {}, 0

    def note(self, kind):
        self.counts[kind] = self.counts.get(kind, -1 if kind == "epoch" else 0) + 1
        if (kind, self.counts[kind]) == self.at:
            for number in self.signals:
                os.kill(os.getpid(), number)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.note("epoch")

    def on_train_batch_end(self, batch, logs=None):
        self.losses[self.epoch, batch] = float(logs["loss"])
        self.note("batch")

    def on_test_batch_end(self, batch, logs=None):
        self.note("test")

    def on_epoch_end(self, epoch, logs=None):
        self.epochs[epoch] = {name: float(value) for name, value in logs.items()}
        self.note("end")


def train(directory, events, first=True, **arguments):
    """Trains a new model; `first` says whether the checkpoint comes first in the list of callbacks."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    checkpoint = [] if directory is None else [kd.TrainingCheckpoint(str(directory), **{"save_freq": 4, **arguments})]
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        callbacks = [*checkpoint, events] if first else [events, *checkpoint]
        data = {"batch_size": BATCH, "epochs": EPOCHS, "validation_data": (X, Y), "validation_batch_size": 16}
        model.fit(X, Y, **data, verbose=0, callbacks=callbacks)
    return events


@pytest.fixture(scope="module")
def undisturbed():
    return train(None, Events())


@pytest.mark.parametrize(
    ("moment", "first"),
    [
        *(slow_unless(moment.startswith("in "), moment, True) for moment in MOMENTS),
        slow("at the last batch of an epoch", False),
        slow("at the end of validation", False),
    ],
)
def test_training_is_saved_at_a_signal_and_continues(moment, first, undisturbed, tmp_path):
    stopped = Events(*MOMENTS[moment], signals=(signal.SIGUSR1, signal.SIGTERM))  # the second one changes nothing
    with pytest.raises(SystemExit) as exit:
        train(tmp_path, stopped, first)
    assert exit.value.code == 0
    done = stopped.losses | (continued := train(tmp_path, Events(), first)).losses
    assert done == undisturbed.losses
    assert stopped.epochs | continued.epochs == undisturbed.epochs
    begun = {batch for batch in continued.losses if batch in stopped.losses}
    assert begun <= {max(stopped.losses)} if stopped.losses else not begun  # no batch is trained again


def test_a_signal_during_a_save_leaves_a_complete_checkpoint(undisturbed, tmp_path, monkeypatch):
    save = kd.TrainingCheckpoint._save

    def save_with_signal(self, epoch, place):
        os.kill(os.getpid(), signal.SIGTERM)
        save(self, epoch, place)
        os.kill(os.getpid(), signal.SIGTERM)

    stopped = Events()
    with monkeypatch.context() as patch:
        patch.setattr(kd.TrainingCheckpoint, "_save", save_with_signal)
        with pytest.raises(SystemExit):
            train(tmp_path, stopped)
    assert len(stopped.losses) in (4, 5)
    assert stopped.losses | train(tmp_path, Events()).losses == undisturbed.losses


def test_signals_and_exit_status_can_be_chosen(tmp_path):
    with pytest.raises(SystemExit) as exit:
        train(tmp_path, Events("batch", 2, (signal.SIGHUP,)), signals=(signal.SIGHUP,), exit_status=75)
    assert exit.value.code == 75


def test_after_fit_signals_reach_their_handlers_again(tmp_path):
    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    checkpoint = train(tmp_path, Events(), signals=[signal.SIGTERM] * 2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]
    assert len(checkpoint.losses) == EPOCHS * 6


@pytest.mark.parametrize("event", ["on_train_begin", "on_train_batch_end", slow("on_test_end"), slow("on_epoch_end")])
def test_a_fit_that_fails_restores_handlers(event, tmp_path):
    class Fails(keras.callbacks.Callback):
        pass

    def fail(self, *_, logs=None):
        raise KeyError

    setattr(Fails, event, fail)
    before = signal.getsignal(signal.SIGTERM)
    checkpoint = kd.TrainingCheckpoint(str(tmp_path))
    with kd.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.raises(KeyError):
            model.fit(X, Y, verbose=0, validation_data=(X, Y), callbacks=[checkpoint, Fails()])
        assert signal.getsignal(signal.SIGTERM) is before
        model.fit(X, Y, verbose=0, callbacks=[checkpoint])  # the same directory is free again
    assert signal.getsignal(signal.SIGTERM) is before


def test_two_in_one_fit_are_an_error(tmp_path):
    """Each would restore its own state, and the second would give handlers of signals back that are the first one's."""
    before = signal.getsignal(signal.SIGTERM)
    two = [kd.TrainingCheckpoint(str(tmp_path / name)) for name in "ab"]
    with kd.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="two TrainingCheckpoints"):
            model.fit(X, Y, verbose=0, callbacks=two)
        assert signal.getsignal(signal.SIGTERM) is before
        for checkpoint in two:
            model.fit(X, Y, verbose=0, callbacks=[checkpoint])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_last_save_that_fails_restores_handlers(tmp_path, monkeypatch):
    def fail(self, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    monkeypatch.setattr("keras_dist.checkpoint.checkpoint_files._ProcessFiles._write", fail)
    with pytest.raises(OSError, match=f"could not be written to {tmp_path}"):
        train(tmp_path, Events("batch", 2))
    assert received == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM] * 2


def test_a_signal_before_fit_fails_reaches_its_handler(tmp_path):
    class Fails(Events):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            raise KeyError

    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    with pytest.raises(KeyError):
        train(tmp_path, Fails("batch", 1))
    assert received == [signal.SIGTERM]


def test_in_another_thread_signals_are_not_handled(recwarn):
    thread = threading.Thread(target=lambda: Preemption((signal.SIGTERM,)).close())
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert "main thread" in str(recwarn.pop(UserWarning).message)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({"signals": (signal.SIGKILL,)}, "SIGKILL"),
        ({"signals": (1000,)}, "1000"),
        ({"signals": signal.SIGTERM}, "is no sequence of signals"),
        ({"exit_status": 256}, "256"),
        ({"exit_status": "0"}, "'0'"),
    ],
)
def test_invalid_arguments(arguments, value, tmp_path):
    with pytest.raises((TypeError, ValueError), match=value):
        kd.TrainingCheckpoint(str(tmp_path), **arguments)


PROGRAM = """
import sys, time
import keras, numpy as np
import keras_dist as kd

kd.set_distribution(kd.DataParallel())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
rows = np.ones((8, 4), "float32")

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("batch", flush=True)
        time.sleep(0.01)

model.fit(rows, rows[:, :1], batch_size=1, epochs=100, verbose=0,
          callbacks=[kd.TrainingCheckpoint(sys.argv[1], save_freq=100, exit_status=75), Slow()])
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_program_ends_with_the_status_that_the_scheduler_expects(tmp_path):
    environment = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    while process.poll() is None:  # like a scheduler that is in a hurry
        process.terminate()
        time.sleep(0.001)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    assert f"saved in {tmp_path}" in errors

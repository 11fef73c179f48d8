"""Training of several processes, of which one is asked to stop."""

import collections
import json
import os
import signal
import sys
import time

if __name__ == "__main__":
    sys.modules["tensorflow"] = None  # which Keras imports to set a random seed, in six seconds

import jax
import keras
import numpy as np

import keras_dist as kd

X = np.sin(np.arange(48 * 4, dtype="float32").reshape(48, 4))
Y = X.sum(1, keepdims=True)
BATCH, EPOCHS = 8, 3  # six batches an epoch, and three of validation


class Events(keras.callbacks.Callback):
    """Records losses, and sends a process a signal after a step or a batch of validation."""

    def __init__(self, process=None, kind=None, number=None):
        super().__init__()
        self.at, self.process, self.counts = (kind, number), process, {}
        self.losses, self.epoch = {}, 0

    def note(self, kind):
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if (kind, self.counts[kind]) == self.at and self.process in (kd.process_id(), "all"):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01 * kd.process_id())  # processes are not at the same place at the same time

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.note("epoch")

    def on_train_batch_end(self, batch, logs=None):
        self.losses[f"{self.epoch} {batch}"] = float(logs["loss"])
        self.note("batch")

    def on_test_batch_end(self, batch, logs=None):
        self.note("test")


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


def data(source):
    if source == "arrays":
        return {"x": X, "y": Y, "batch_size": BATCH}
    if source == "PyDataset":
        return {"x": Rows(workers=2)}
    import grain

    rows = grain.MapDataset.source(list(zip(X, Y, strict=True))).shuffle(seed=3)
    return {"x": rows.batch(BATCH).to_iter_dataset(), "shuffle": False}


DISTRIBUTIONS = {
    "DP": kd.DataParallel,
    "FSDP": lambda: kd.FullyShardedDataParallel(min_shard_bytes=0),
}


def fit(directory, events, source="arrays", strategy="FSDP", **arguments):
    """Trains a new model."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    with DISTRIBUTIONS[strategy]().scope():
        layers = [keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        checkpoint = kd.TrainingCheckpoint(directory, **{"save_freq": 4, **arguments})
        validation = {"validation_data": (X, Y), "validation_batch_size": 16}
        model.fit(**data(source), **validation, epochs=EPOCHS, verbose=0, callbacks=[checkpoint, events])


def train(directory, *moment, **arguments):
    """Trains a new model; returns the losses after each batch, and whether training was stopped."""
    events = Events(*moment)
    try:
        fit(directory, events, **arguments)
    except SystemExit:
        return events.losses, True
    return events.losses, False


def stop_and_continue(directory, moments):
    """Returns the losses of an undisturbed run and, for each moment, those until and after the stop."""
    undisturbed, _ = train(os.path.join(directory, "undisturbed"))
    found = []
    for number, moment in enumerate(moments):
        name = os.path.join(directory, str(number))
        losses, stopped = train(name, *moment)
        assert stopped, moment
        rest, stopped = train(name)
        assert not stopped, moment
        found.append([losses, rest])
    return undisturbed, found


def stop_and_exit(directory, process):
    """Is asked to stop, and ends for it."""
    kd.set_distribution(kd.DataParallel())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    checkpoint = kd.TrainingCheckpoint(directory, save_freq=1000, exit_status=75)
    callbacks = [checkpoint, Events(process, "batch", 3)]
    model.fit(X, Y, batch_size=BATCH, epochs=1000, verbose=0, callbacks=callbacks)


class Disturbed(keras.callbacks.Callback):
    """Appends losses to a file. With three processes one is killed, with two the launcher is asked for three again."""

    def __init__(self, directory):
        super().__init__()
        self.file, self.epoch = os.path.join(directory, "losses.txt"), 0
        self.events = collections.Counter()
        jax.monitoring.register_event_listener(lambda event, **_: self.events.update([event.rpartition("/")[2]]))

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        step, processes, process = 6 * self.epoch + batch, kd.num_processes(), kd.process_id()
        if process == 0:
            compiled = self.events["compile_requests_use_cache"] - self.events["cache_hits"]
            with open(self.file, "a") as file:
                file.write(json.dumps([processes, step, float(logs["loss"]), compiled]) + "\n")
        if (processes, process, step) == (3, 1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        if (processes, process, step) == (2, 0, 9):
            os.kill(os.getppid(), signal.SIGUSR2)


if __name__ == "__main__":
    kd.initialize()
    fit(os.path.join(sys.argv[1], "checkpoints"), Disturbed(sys.argv[1]), save_freq=2)

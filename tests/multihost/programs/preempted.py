"""Training of several processes, of which one is asked to stop."""

import os
import signal
import time

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


def train(directory, source="arrays", strategy="FSDP", events=None, **arguments):
    """Trains a new model; returns the losses after each batch, and whether training was stopped."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    events, stopped = events or Events(), False
    with DISTRIBUTIONS[strategy]().scope():
        layers = [keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        checkpoint = kd.TrainingCheckpoint(directory, **{"save_freq": 4, **arguments})
        validation = {"validation_data": (X, Y), "validation_batch_size": 16}
        try:
            model.fit(**data(source), **validation, epochs=EPOCHS, verbose=0, callbacks=[checkpoint, events])
        except SystemExit:
            stopped = True
    return events.losses, stopped


def stop_and_continue(directory, moments):
    """Returns the losses of an undisturbed run and, for each moment, those until and after the stop."""
    undisturbed, _ = train(os.path.join(directory, "undisturbed"))
    found = []
    for number, moment in enumerate(moments):
        name = os.path.join(directory, str(number))
        losses, stopped = train(name, events=Events(*moment))
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

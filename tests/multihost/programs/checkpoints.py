"""Training that is stopped and continued, and checkpoints that another number of processes reads."""

import json
import os
import signal
import threading
import time

import jax
import keras
import numpy as np
from support import process_matrix

import keras_dist as kd


def train(directory, notes, who=None, kill_after=None, delay=0.0, units=1024):
    """Trains, notes the loss after each batch in a file, and is killed some time after one, if it is told to."""

    class Note(keras.callbacks.Callback):
        epoch = seen = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            with open(notes, "a") as file:
                file.write(json.dumps([self.epoch, batch, float(logs["loss"])]) + "\n")
            self.seen += 1
            if self.seen == kill_after and who in (kd.process_id(), "all"):
                if delay:
                    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)

    keras.utils.set_random_seed(1)
    kd.set_distribution(kd.FullyShardedDataParallel())
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(units),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    x = np.sin(np.arange(96 * 4, dtype="float32").reshape(96, 4))
    checkpoint = kd.TrainingCheckpoint(directory, save_freq=2)
    model.fit(x, x.sum(1), batch_size=8, epochs=3, callbacks=[checkpoint, Note()], verbose=0)
    return [float(np.asarray(weight.value.addressable_data(0)).sum()) for weight in model.weights]


def go_on(directory, cases, stop_after):
    """Trains in each case until a batch, or to the end; returns the mean loss after each batch that was done."""

    import grain

    count, me = kd.num_processes(), kd.process_id()
    rows = list(zip(process_matrix.X, process_matrix.Y, strict=True))

    class Losses(keras.callbacks.Callback):
        epoch, done = 0, 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            losses[f"{self.epoch}, {batch}"] = float(logs["loss"])
            self.done += 1
            self.model.stop_training |= self.done == stop_after

    found = {}
    for distribution, source in cases:
        if source == "PyDataset":
            data = process_matrix.py_dataset(process_matrix.Batches(True)).x
        else:
            data = grain.MapDataset.source(rows).shuffle(seed=3)
            data = data.batch(7) if source == "grain" else data[me::count].batch(4)
            data = data.to_iter_dataset()
        losses = found[f"{distribution}, {source}"] = {}
        strategy = process_matrix.DISTRIBUTIONS[distribution](auto_shard_dataset=source != "grain, own rows")
        with strategy.scope():
            model = process_matrix.new_model()
            checkpoint = kd.TrainingCheckpoint(os.path.join(directory, distribution, source), save_freq=100)
            model.fit(data, epochs=3, shuffle=source == "PyDataset", callbacks=[Losses(), checkpoint], verbose=0)
    return found


def save_and_load(directory, strategy, saves):
    """Saves a model with Keras's own callback, or loads it; returns how many variables are sharded, and all sums."""

    strategies = {
        "data parallel": kd.DataParallel,
        "ZeRO-1": lambda **arguments: kd.DataParallel(shard_optimizer_state=True, **arguments),
        "fully sharded": lambda **arguments: kd.FullyShardedDataParallel(min_shard_bytes=0, **arguments),
    }
    keras.utils.set_random_seed(1)
    distribution = strategies[strategy]()
    kd.set_distribution(distribution)
    if saves:
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4096), keras.layers.Dropout(0.1), keras.layers.Dense(8)]
        )
        model.compile("adam", "mse")
        x = np.ones((32, 8), "float32")
        model.fit(x, x, batch_size=8, epochs=2, verbose=0, callbacks=[keras.callbacks.OrbaxCheckpoint(directory)])
        models = [model]
    else:
        first = keras.saving.load_model(directory)
        second = keras.Sequential.from_config(first.get_config())
        second.compile("adam", "mse")
        second.load_weights(directory)
        models = [first, second]
    whole_on_each = jax.jit(
        lambda value: value, out_shardings=jax.NamedSharding(distribution.device_mesh.backend_mesh, jax.P())
    )
    found = []
    for model in models:
        sharded = 0
        values = []
        for variable in [*model.variables, *model.optimizer.variables]:
            sharded += not variable.value.sharding.is_fully_replicated
            assert variable.value.sharding.device_set == set(distribution.device_mesh.backend_mesh.devices.flat)
            whole = whole_on_each(variable.value).addressable_data(0)
            values.append(np.asarray(whole, "float64").sum().item())
        found.append([sharded, values])
    return found

"""Training that is stopped and continued, and checkpoints that another number of processes reads."""

import json
import os
import signal
import threading
import time
import warnings

import jax
import keras
import numpy as np
from support import process_matrix

import keras_dist as kd
from keras_dist.multihost import messaging


def train(directory, who=None, kill_after=None, delay=0.0):
    """Trains, and appends the loss after each batch to `losses.txt`; kills process `who` some time after a batch."""
    os.makedirs(directory, exist_ok=True)

    class Note(keras.callbacks.Callback):
        epoch = seen = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            with open(os.path.join(directory, "losses.txt"), "a") as file:
                file.write(json.dumps([self.epoch, batch, float(logs["loss"])]) + "\n")
            self.seen += 1
            if self.seen == kill_after and who in (kd.process_id(), "all"):
                if delay:
                    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)

    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    kd.set_distribution(kd.FullyShardedDataParallel())
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1024),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    x = np.sin(np.arange(96 * 4, dtype="float32").reshape(96, 4))
    checkpoint = kd.TrainingCheckpoint(os.path.join(directory, "checkpoints"), save_freq=2)
    model.fit(x, x.sum(1), batch_size=8, epochs=3, callbacks=[checkpoint, Note()], verbose=0)
    return [float(np.asarray(weight.value.addressable_data(0)).sum()) for weight in model.weights]


def train_both(interrupted, uninterrupted):
    """Continues training that was killed, and repeats it from the start without interruption."""
    return train(interrupted), train(uninterrupted)


def train_without_and_with_a_stop(directory, directory_of_stopped, cases, stop_after):
    """Trains in each case to the end, and then again until a batch."""
    return train_cases(directory, cases, None), train_cases(directory_of_stopped, cases, stop_after)


def train_cases(directory, cases, stop_after=None):
    """Trains in each case until a batch, or to the end; returns the mean loss after each batch of this call."""

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
    warnings.filterwarnings("ignore", "Batches of 7 rows")  # which tensor parallelism repeats on the devices of a shard
    for distribution, source in cases:
        if source == "PyDataset":
            data = process_matrix.py_dataset(process_matrix.Batches(True)).x
        else:
            data = grain.MapDataset.source(rows).shuffle(seed=3)
            data = data.batch(7) if source == "grain" else data[me::count].batch(8 // count)
            data = data.to_iter_dataset()
        losses = found[f"{distribution}, {source}"] = {}
        strategy = process_matrix.DISTRIBUTIONS[distribution](auto_shard_dataset=source != "grain, own rows")
        with strategy.scope():
            model = process_matrix.new_model()
            if source == "grain, own rows":  # whose order in a batch depends on the number of processes
                next(layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)).rate = 0.0
            checkpoint = kd.TrainingCheckpoint(os.path.join(directory, distribution, source), save_freq=100)
            model.fit(data, epochs=3, shuffle=source == "PyDataset", callbacks=[Losses(), checkpoint], verbose=0)
    return found


def resume_from_a_damaged_checkpoint(directory):
    """Trains, damages what each process wrote in the newest checkpoint, and resumes; returns what each fit did."""

    def fit(epochs):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
        model.compile("adam", "mse")
        x = np.sin(np.arange(32 * 64, dtype="float32").reshape(32, 64))
        checkpoint = kd.TrainingCheckpoint(directory, max_to_keep=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(x, x[:, :8], batch_size=8, epochs=epochs, callbacks=[checkpoint], verbose=0)
            loaded = keras.models.clone_model(model)
            loaded.load_weights(os.path.join(directory, str(4 * epochs)))
        return [history.epoch, history.history.get("loss"), [str(each.message) for each in caught]]

    results = []
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        results.append(fit(3))
        for process in (0, 1):
            if kd.process_id() == 0:
                folder = os.path.join(directory, "12", "pytree", f"ocdbt.process_{process}", "d")
                for name in os.listdir(folder):
                    os.truncate(os.path.join(folder, name), 1000)
            messaging.exchange("damaged", process)
            results.append(fit(3))
    return results


def save(directory):
    """Saves a model with Keras's own callback; returns the sums of its variables."""
    keras.utils.set_random_seed(1)
    distribution = kd.FullyShardedDataParallel(min_shard_bytes=0)
    with distribution.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4096), keras.layers.Dropout(0.1), keras.layers.Dense(8)]
        )
        model.compile("adam", "mse")
        x = np.ones((32, 8), "float32")
        model.fit(x, x, batch_size=8, epochs=2, verbose=0, callbacks=[keras.callbacks.OrbaxCheckpoint(directory)])
        return _sums(model, distribution)


def load(directory):
    """Loads it as a model and as weights, under two strategies; returns how many variables are sharded, and sums."""
    strategies = kd.DataParallel(shard_optimizer_state=True), kd.FullyShardedDataParallel(min_shard_bytes=0)
    loaded = []
    for distribution in strategies:
        with distribution.scope():
            model = keras.saving.load_model(directory)
            other = keras.Sequential.from_config(model.get_config())
            other.compile("adam", "mse")
            other.load_weights(directory)
            sharded = sum(not v.value.sharding.is_fully_replicated for v in _variables(model))
            loaded.append([sharded, _sums(model, distribution), _sums(other, distribution)])
    return loaded


def save_and_load(saved, loaded):
    """Saves a model to one directory, and loads one from another."""
    return save(saved), load(loaded)


def _variables(model):
    return [*model.variables, *model.optimizer.variables]


def _sums(model, distribution):
    mesh = distribution.device_mesh.backend_mesh
    replicate = jax.jit(lambda value: value, out_shardings=jax.NamedSharding(mesh, jax.P()))
    sums = []
    for variable in _variables(model):
        assert variable.value.sharding.device_set == {*mesh.devices.flat}
        value = replicate(variable.value).addressable_data(0)
        sums.append(np.asarray(value, "float64").sum().item())
    return sums

"""Checkpoints of one and of several processes, and training whose processes are killed at any moment."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from run_processes import in_words, run_processes

SAME_PROGRAM = {"JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def train(directory, notes, who=None, kill_after=None, delay=0.0, units=1024):
    """Trains, notes the loss after each batch in a file, and is killed some time after one, if it is told to."""
    import os
    import signal
    import threading
    import time

    import keras
    import numpy as np

    import keras_dist as kd

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


def losses_in(file):
    found = {}
    for line in file.read_text().splitlines():
        epoch, batch, loss = json.loads(line)
        assert found.setdefault((epoch, batch), loss) == loss, (epoch, batch)
    return found


def test_killed_training_goes_on_as_if_it_had_not_been(tmp_path):
    environment = {**SAME_PROGRAM, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    many = {"processes": 2, "devices": 4, "timeout": 180}

    def run(directory, notes, *arguments, check):
        files = [str(tmp_path / directory), str(tmp_path / notes)]
        return run_processes(train, *files, *arguments, **many, check=check, **environment)

    whole = run("whole", "whole.txt", check=True)
    for who, after, delay in [("all", 4, 0.0), (1, 5, 0.03), (0, 4, 0.1), ("all", 7, 0.3), (1, 6, 0.0)]:
        done = run("cut", "cut.txt", who, after, delay, check=False)
        for process in done:
            is_killed = who in (process.rank, "all")
            assert process.returncode == -9 if is_killed else process.returncode > 0, in_words(done)
            assert is_killed or f"process {who}" in process.stderr.lower(), in_words(done)
        if who == "all" and delay == 0.0:  # right after a save had begun, which is found unfinished
            assert list((tmp_path / "cut").glob("*orbax-checkpoint-tmp*"))
    last = run("cut", "cut.txt", check=True)
    assert [process.result for process in last] == [process.result for process in whole]
    assert losses_in(tmp_path / "cut.txt") == losses_in(tmp_path / "whole.txt")


def save_and_load(directory, strategy, saves):
    """Saves a model with Keras's own callback, or loads it; returns how many variables are sharded, and all sums."""
    import jax
    import keras
    import numpy as np

    import keras_dist as kd

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


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_of_keras_is_read_by_another_number_of_processes(before, after, tmp_path):
    def run(processes, *arguments):
        many = {"processes": processes, "devices": 8 // processes, "initialize": processes > 1, "timeout": 180}
        return [done.result for done in run_processes(save_and_load, str(tmp_path), *arguments, **many)]

    ((_, values),) = run(before, "fully sharded", True)[0]
    for strategy in ("ZeRO-1", "fully sharded"):
        for (sharded, first), (_, second) in run(after, strategy, False):
            assert first == second == values
            assert sharded > 0

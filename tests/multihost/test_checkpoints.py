"""Checkpoints of one and of several processes, and training whose processes are killed at any moment."""

import json
import shutil

import pytest
from support.run_processes import in_words, run_processes


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
    # Of its own, since a process may be killed while it writes there too.
    many = {"processes": 2, "devices": 4, "timeout": 180, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}

    def run(directory, notes, *arguments, check):
        files = [str(tmp_path / directory), str(tmp_path / notes)]
        return run_processes(train, *files, *arguments, **many, check=check)

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


def go_on(directory, cases, stop_after):
    """Trains in each case until a batch, or to the end; returns the mean loss after each batch that was done."""
    import os

    import grain
    import keras
    from support import process_matrix

    import keras_dist as kd

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


def test_sources_of_several_processes_go_on_where_they_stood(tmp_path):
    pytest.importorskip("grain")
    cases = [
        ("model_parallel_across", "PyDataset"),
        ("model_parallel_across", "grain"),
        ("fully_sharded", "grain, own rows"),
    ]
    of_whole_data = [case for case in cases if case[1] != "grain, own rows"]

    def run(directory, processes, cases, stop_after=None):
        arguments = [str(tmp_path / directory), cases, stop_after]
        many = {"processes": processes, "devices": 8 // processes, "initialize": processes > 1}
        return [process.result for process in run_processes(go_on, *arguments, **many)]

    whole = run("whole", 2, cases)
    assert whole[0] == whole[1]
    cut = run("cut", 2, cases, 6)  # of 12 batches, four in an epoch
    shutil.copytree(tmp_path / "cut", tmp_path / "elsewhere")
    rest = run("cut", 2, cases)
    for case, losses in whole[0].items():
        assert len(losses) == 12
        assert cut[0][case] == dict(list(losses.items())[:6]), case
        assert rest[0][case] == rest[1][case] == dict(list(losses.items())[6:]), case
    for case, losses in run("elsewhere", 1, of_whole_data)[0].items():
        assert losses == pytest.approx(rest[0][case], rel=1e-6), case


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

"""One program as several processes: data, methods and files work as in one process, and failures are reported.

Without arguments it runs itself as two processes with four simulated devices each, by `keras-dist launch`, then once
more while one of them is killed. `many_hosts.py train DIRECTORY` is the program; guides/many_hosts.slurm and
guides/many_hosts.yaml run it on the hosts of a Slurm or Kubernetes cluster.

Run: python guides/many_hosts.py
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd

BATCH, EPOCHS = 100, 3  # 1,437 rows: the last batch of an epoch has 37, which no number of devices divides


# --- 1. The program. One line is new: `kd.initialize()`, before anything else uses JAX.
#
# It joins the processes. Under Slurm, Open MPI, Kubernetes and on Cloud TPU it detects how many there are and which one
# this is. Elsewhere pass arguments, or set the environment variables KERAS_DISTRIBUTION_JOB_ADDRESSES, _NUM_PROCESSES
# and _PROCESS_ID. It also gives all processes one random seed. `timeout` is the number of seconds that they wait for
# one another. Choose a timeout longer than the longest time that one of them is busy alone, for example in a callback.
#
# Every process runs the same program to its end, and makes the same Keras calls in the same order. Code for a single
# process (`if kd.process_id() == 0:`) may print, or write its own files. It must not train, evaluate, predict, save, or
# read values of weights, because these need all processes.


def train(directory: str) -> None:
    """Trains on scikit-learn's digits, evaluates, predicts, saves and loads, as one of several processes or alone."""
    kd.initialize(timeout=120)

    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = digits.data.astype("float32") / 16, digits.target
    x, y, rest, rest_labels = images[:1437], labels[:1437], images[1437:], labels[1437:]
    kd.set_distribution(kd.FullyShardedDataParallel())
    model = build()
    say(f"{kd.num_processes()} processes, {kd.get_device_count()} devices, {kd.distribution()}")

    # --- 2. Data. With `auto_shard_dataset=True`, the default, every process passes the same global dataset, of any
    # type that Keras accepts. Each device takes its rows of each batch, and the losses are those of one process. Every
    # process reads all of the data (slicing arrays costs nothing).
    #
    # `TrainingCheckpoint` saves regularly, and resumes from the newest checkpoint when the program is started again.
    checkpoint = kd.TrainingCheckpoint(os.path.join(directory, "checkpoints"), save_freq=5)
    callbacks = [checkpoint, die_once(directory)]
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    say(f"loss {history.history['loss'][-1]:.4f}")

    # --- 3. Every method works, and returns the same on each process. Process 0 writes files, which are complete before
    # any process continues. To load files on all processes, use a folder that all hosts share.
    _, accuracy = model.evaluate(rest, rest_labels, verbose=0)
    predicted = model.predict(rest, verbose=0)
    say(f"accuracy {accuracy:.3f}, by predictions {np.mean(predicted.argmax(1) == rest_labels):.3f}")
    file = os.path.join(directory, "digits.keras")
    model.save(file)
    loaded = keras.saving.load_model(file)
    say(f"saved and loaded: {np.abs(loaded.predict(rest, verbose=0) - predicted).max() < 1e-5}")

    # --- 4. `auto_shard_dataset=False`: each process passes its own rows, and the global batch is their concatenation
    # in the order of the processes. Numbers of rows may differ. When one process has no more data, the epoch ends for
    # all, with a warning that names it. `predict` returns the predictions of the process's own rows. Use this if each
    # host reads its own data.
    cut = np.linspace(0, len(x), kd.num_processes() + 1).astype(int)
    mine = slice(cut[kd.process_id()], cut[kd.process_id() + 1])
    kd.set_distribution(kd.FullyShardedDataParallel(auto_shard_dataset=False))
    model = build()
    model.fit(x[mine], y[mine], batch_size=BATCH // kd.num_processes(), epochs=EPOCHS, verbose=0)
    predicted = model.predict(x[mine], verbose=0)
    say(f"parts: process 0 passes {len(x[mine])} of {len(x)} rows, and is given {len(predicted)} predictions")

    # --- 5. If processes differ, all of them raise an error before devices wait for one another. They compare model,
    # program, seed, method, number of steps, and the rows, shapes and dtypes of batches.
    if kd.num_processes() > 1:
        kd.set_distribution(kd.FullyShardedDataParallel())
        try:
            build().fit(x, y, batch_size=BATCH + kd.process_id(), verbose=0)
        except ValueError as error:
            say(f"ValueError: {error}")
    kd.set_distribution(None)


def build():
    """Returns a compiled model. Nothing in it depends on processes."""
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(256, "gelu"), keras.layers.Dropout(0.2), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(3e-3), loss, metrics=["accuracy"])
    return model


def say(text: str) -> None:
    """Prints on process 0."""
    if kd.process_id() == 0:
        print(text, flush=True)


# --- 6. Failures. If a process dies, raises an error, stops or ends early, the others end as well, at most 10 seconds
# after the timeout, with a message that names it (JAX's message if process 0 is killed). The exit status is not 0, so
# that the cluster can start the processes again:
#
# - Slurm: `sbatch guides/many_hosts.slurm`. `srun --kill-on-bad-exit` ends the others, and the job requeues itself
#   (`scontrol requeue`).
# - Kubernetes: `kubectl apply -f guides/many_hosts.yaml`. An indexed Job starts a pod for each process. If one
#   fails, the others end, and the Job starts pods again until its `backoffLimit`.
#
# Either way the same program is started again, and `TrainingCheckpoint` resumes with the next batch.


def die_once(directory: str):
    """Returns a callback that kills process 1 in the middle of training, once, if a file asks for it."""
    import keras

    order = pathlib.Path(directory, "die")

    def die(batch, logs):
        if batch == 7 and kd.process_id() == 1 and order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    return keras.callbacks.LambdaCallback(on_train_batch_end=die)


def main() -> None:
    """Runs the program as two processes, then kills one of them, then starts them again."""
    launcher = [sys.executable, "-m", "keras_dist", "launch", "-n", "2", "--devices-per-process", "4"]

    def start(directory: str) -> int:
        return subprocess.run([*launcher, __file__, "train", directory], check=False).returncode

    print("--- two processes", flush=True)
    if start(tempfile.mkdtemp()) != 0:
        sys.exit("training failed")
    directory = tempfile.mkdtemp()
    pathlib.Path(directory, "die").touch()
    print("--- one of them is killed", flush=True)
    print(f"exit status {start(directory)}", flush=True)
    print("--- started again", flush=True)
    if start(directory) != 0:
        sys.exit("training failed")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    else:
        main()

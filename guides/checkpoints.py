"""Training that is killed, restarted, and resumes as if it had not been interrupted.

A process is killed with SIGKILL in the middle of an epoch, as if its machine had failed. The same command runs again:
it finds the newest complete checkpoint and continues with the next batch. Its losses equal those of an uninterrupted
run, bit for bit. Then the checkpoint is loaded under other distributions.

With only one device, eight CPU devices are simulated.

Run: python guides/checkpoints.py
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd

EPOCHS, BATCH, KILLED_AFTER = 3, 64, 40  # 23 batches an epoch: the 40th is in the middle of the second


def build():
    """Returns a compiled model with dropout, which draws random numbers at every step."""
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="gelu", name="up"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, name="digits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, metrics=["accuracy"])
    return model


# --- 1. A program needs one callback.
#
# There is no code for the restart. When `fit` starts and finds a complete checkpoint in the directory, it restores the
# model, the optimizer, the metrics and the random generators, and continues with the next batch. The arguments:
#
# - `save_freq`: `"epoch"`, or a number of batches. Saving copies the device's shards to the host, and writes them while
#   training continues.
# - `max_to_keep`: the number of newest checkpoints to keep. A checkpoint counts only when it is complete, and an older
#   one is deleted only after that. Therefore 1 is enough for restarts.
#
# With several hosts, each process writes its own shards into a directory that all of them share. The program is the
# same. guides/many_hosts.py shows how Slurm or Kubernetes restart the processes.


def train(directory: str, losses_file: str, killed_after: int | None) -> None:
    """Trains on scikit-learn's digits, records the loss after each batch, and kills its own process if it must.

    Args:
        directory: where the checkpoints are saved.
        losses_file: where the losses are recorded, as lines of JSON.
        killed_after: number of batches after which the process is killed, None for never.
    """
    import keras
    from sklearn.datasets import load_digits

    class RecordLosses(keras.callbacks.Callback):
        batches, epoch = 0, 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            with open(losses_file, "a") as file:
                file.write(json.dumps([self.epoch, batch, float(logs["loss"])]) + "\n")
            self.batches += 1
            if self.batches == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)

    digits = load_digits()
    images = digits.data[:1437].astype("float32") / 16
    kd.set_distribution(kd.FullyShardedDataParallel())
    checkpoint = kd.TrainingCheckpoint(directory, save_freq=10)
    callbacks = [checkpoint, RecordLosses()]
    build().fit(images, digits.target[:1437], batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0)


def start(directory: pathlib.Path, losses_file: pathlib.Path, killed_after: int | None = None) -> int:
    """Runs `train` in a process of its own and returns its exit status."""
    command = [sys.executable, __file__, "train", str(directory), str(losses_file), json.dumps(killed_after)]
    return subprocess.run(command, check=False).returncode


def read_losses(file: pathlib.Path) -> list[tuple]:
    """Returns epoch, batch and loss of each batch, in the order of training."""
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def main() -> None:
    """Trains without and with an interruption, compares the losses, and loads the checkpoint elsewhere."""
    folder = pathlib.Path(tempfile.mkdtemp())
    start(folder / "uninterrupted", folder / "uninterrupted.txt")
    expected = read_losses(folder / "uninterrupted.txt")
    print(f"--- 1. uninterrupted: {len(expected)} batches, last loss {expected[-1][2]:.6f}")

    # --- 2. Killed and restarted.
    #
    # The process is killed after 40 batches, just when it starts to write a checkpoint. The incomplete checkpoint is in
    # a temporary directory. It is ignored, and removed at the next start. The batches since the last complete
    # checkpoint are repeated, with the same results.
    status = start(folder / "killed", folder / "killed.txt", KILLED_AFTER)
    before = read_losses(folder / "killed.txt")
    print(f"--- 2. killed in epoch {before[-1][0]} after batch {before[-1][1]}, exit status {status}")
    start(folder / "killed", folder / "killed.txt")
    after = read_losses(folder / "killed.txt")[len(before) :]
    print(f"restarted: resumes in epoch {after[0][0]} with batch {after[0][1]}")
    if set(before + after) != set(expected):
        sys.exit("the losses differ from those of the uninterrupted training")
    print(f"all {len(expected)} losses equal those of the uninterrupted training, bit for bit")

    # --- 3. On another mesh, with another strategy or another number of processes.
    #
    # The restarted program may set another distribution: each device reads its own shards. `fit` with the callback does
    # this. For a model that is not trained further, `model.load_weights` does the same. On another mesh the losses
    # differ in the last digits, because sums are computed in another order.
    print("--- 3. other distributions")
    import numpy as np

    weights = []
    for distribution in (kd.DataParallel(), kd.FullyShardedDataParallel(min_shard_bytes=0), tensor_parallel()):
        with distribution.scope():
            model = build()
            model.load_weights(str(folder / "killed"))
            kernel = model.get_layer("up").kernel.value
            shard_shape = kernel.sharding.shard_shape(kernel.shape)
            print(f"{type(distribution).__name__:24} 'up/kernel' {kernel.shape}, shard of a device {shard_shape}")
            weights.append(np.asarray(kernel))
    print("equal values:", all(np.array_equal(weights[0], other) for other in weights))

    # --- 4. A checkpoint of another model.
    #
    # Keras's own callback, `keras.callbacks.OrbaxCheckpoint`, writes the same format: use it to save the best model by
    # a metric, or to load a model with its configuration, with `keras.saving.load_model(directory)`. While a
    # distribution of keras_dist is active, both kinds of checkpoints are matched with the variables of the model by
    # path, also if Keras has numbered the layers differently or the model was rebuilt from its configuration. A
    # mismatch raises an error, and no variable changes:
    print("--- 4. another model")
    import keras

    with kd.DataParallel().scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, name="digits")])
        try:
            model.load_weights(str(folder / "killed"))
        except ValueError as error:
            print(f"ValueError: {str(error).replace(str(folder), '...')}")

    # --- 5. What is not saved.
    #
    # - The state of other callbacks: `EarlyStopping` and `ReduceLROnPlateau` start anew, and `History` starts where
    #   training resumed.
    # - What a `PyDataset` keeps in its own attributes, such as an order that it shuffles in `on_epoch_end`.
    # - The seed of a shuffle in `tf.data` or PyTorch: set the same one in each run. These sources are read from their
    #   beginning, and the finished batches are dropped. Arrays, `PyDataset` and Grain are not read twice.


def tensor_parallel() -> kd.Distribution:
    """Returns tensor parallelism over all devices."""
    layout_map = kd.LayoutMap(kd.DeviceMesh({"data": 1, "model": -1}))
    layout_map["up/kernel"] = (None, "model")
    layout_map["digits/kernel"] = ("model", None)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


if __name__ == "__main__":
    count = subprocess.check_output([sys.executable, "-c", "import jax; print(jax.device_count())"], text=True)
    if int(count) == 1:
        kd.simulate_devices(8)  # before anything else starts JAX
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()

"""Training that is cut off at any moment, started again, and goes on as if it had not been; elsewhere too.

A process is killed with SIGKILL in the middle of an epoch, as a machine that goes away would end it. The same command
is run again: it finds the newest complete checkpoint and goes on with the next batch. Its losses are those of a run
that nobody disturbed, to the last bit. Then the checkpoint is read under other distributions.

Eight CPU devices are simulated where there is one device only.

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
    """Returns a compiled model. It has dropout, so it draws random numbers at every step."""
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


# --- 1. What a program needs: one callback.
#
# There is no code for the restart. `fit` looks into the directory when it begins: if a complete checkpoint is there, it
# restores the model, the optimizer, the metrics and the random generators, and goes on with the batch that is next.
# What decides when to save:
#
# - `save_freq="epoch"`, or a number of batches. A save takes the time to copy the device's part of the variables to the
#   host; they are written while training goes on.
# - `max_to_keep`: the newest so many are kept. A checkpoint counts when all of it is written, and only then is an older
#   one deleted, so 1 is enough for restarts.
#
# On several hosts, every process writes its own part, into a directory that all of them see. What starts the processes
# again, under Slurm or Kubernetes, is in guides/many_hosts.py; the program is the same.


def train(directory: str, notes: str, killed_after: int | None) -> None:
    """Trains on scikit-learn's digits and notes the loss after each batch; kills its process if it is told to."""
    import keras
    from sklearn.datasets import load_digits

    class Notes(keras.callbacks.Callback):
        batches, epoch = 0, 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            with open(notes, "a") as file:
                file.write(json.dumps([self.epoch, batch, float(logs["loss"])]) + "\n")
            self.batches += 1
            if self.batches == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)

    digits = load_digits()
    images = digits.data[:1437].astype("float32") / 16
    kd.set_distribution(kd.FullyShardedDataParallel())
    checkpoint = kd.TrainingCheckpoint(directory, save_freq=10)
    callbacks = [checkpoint, Notes()]
    build().fit(images, digits.target[:1437], batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0)


def start(directory: pathlib.Path, notes: pathlib.Path, killed_after: int | None = None) -> int:
    """Runs this program's `train` in a process of its own and returns its exit status."""
    command = [sys.executable, __file__, "train", str(directory), str(notes), json.dumps(killed_after)]
    return subprocess.run(command, check=False).returncode


def losses(notes: pathlib.Path) -> list[tuple]:
    """Returns epoch, batch and loss in the order in which they were noted."""
    return [tuple(json.loads(line)) for line in notes.read_text().splitlines()]


def main() -> None:
    """Trains undisturbed, trains with a kill, compares, and reads the checkpoint elsewhere."""
    folder = pathlib.Path(tempfile.mkdtemp())
    start(folder / "undisturbed", folder / "undisturbed.txt")
    whole = losses(folder / "undisturbed.txt")
    print(f"--- 1. undisturbed: {len(whole)} batches, the last loss is {whole[-1][2]:.6f}")

    # --- 2. Killed and started again.
    #
    # The kill comes 40 batches after the start, right when a checkpoint begins to be written. What is written of it is
    # left behind as a directory whose name says so, never counts, and is removed at the next start. The batches since
    # the checkpoint before are done once more, and come out as they did.
    status = start(folder / "killed", folder / "killed.txt", KILLED_AFTER)
    before = losses(folder / "killed.txt")
    print(f"--- 2. killed: exit status {status} after epoch {before[-1][0]}, batch {before[-1][1]}")
    start(folder / "killed", folder / "killed.txt")
    after = losses(folder / "killed.txt")[len(before) :]
    print(f"started again: goes on with epoch {after[0][0]}, batch {after[0][1]}")
    if set(before + after) != set(whole):
        sys.exit("the losses are not those of the undisturbed training")
    print(f"all {len(whole)} losses are those of the undisturbed training, to the last bit")

    # --- 3. On another mesh, under another strategy, as another number of processes.
    #
    # A program that is started again may install another distribution than the one before: each device reads its own
    # part of what it will hold. `fit` does so by itself; `model.load_weights` does it for a model that is used
    # otherwise. On another mesh the losses differ in the last digits, since sums are taken in another order.
    print("--- 3. elsewhere")
    import numpy as np

    weights = []
    for distribution in (kd.DataParallel(), kd.FullyShardedDataParallel(min_shard_bytes=0), tensor_parallel()):
        with distribution.scope():
            model = build()
            model.load_weights(str(folder / "killed"))
            kernel = model.get_layer("up").kernel.value
            print(f"{type(distribution).__name__:24} 'up/kernel' {kernel.shape}, a device holds", end=" ")
            print(kernel.sharding.shard_shape(kernel.shape))
            weights.append(np.asarray(kernel))
    print("the same values:", all(np.array_equal(weights[0], other) for other in weights))

    # --- 4. What is restored, and what is refused.
    #
    # Keras's own callback, `keras.callbacks.OrbaxCheckpoint`, writes the same format: for the best model by a metric,
    # or to load a model with its configuration by `keras.saving.load_model(directory)`. While a distribution of
    # keras_dist is installed, loading either finds each variable also where Keras has named it otherwise (a model made
    # a second time, or rebuilt from its configuration), and never restores a part in silence:
    print("--- 4. what does not fit")
    import keras

    with kd.DataParallel().scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, name="digits")])
        try:
            model.load_weights(str(folder / "killed"))
        except ValueError as error:
            print(f"ValueError: {str(error).replace(str(folder), '...')}")

    # --- 5. What is not in a checkpoint.
    #
    # - What other callbacks remember: `EarlyStopping` and `ReduceLROnPlateau` count anew, `History` begins where
    #   training went on.
    # - What a `PyDataset` keeps of itself, such as an order that it shuffles in `on_epoch_end`.
    # - The seed of a shuffle that the program draws by itself: `tf.data` and PyTorch need the same one each time. They
    #   are read from the beginning and what was done is dropped. Arrays, `PyDataset` and grain are not read twice.


def tensor_parallel() -> kd.Distribution:
    """Returns model parallelism over all devices: the larger layer is cut into parts."""
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

"""Time per step of `fit` on a source that takes as long as the step: under keras_dist, and under keras.distribution.

The source sleeps before each batch, for the measured time of a step, as if it read from a disk or a network. A callback
reads the loss of each step, as a progress bar does, so the host waits for the step: only reading ahead can overlap step
and source. Each turn times the step alone, the source alone, and `fit` of both packages on this source. A ratio is the
time per step in `fit`, divided by the longer of step and source. The machine may be busy, so a ratio is taken in each
turn, and the median of the ratios is printed.

Run: python benchmarks/look_ahead.py [--turns 9] [--devices 8] [--steps 30]
"""

import argparse
import os
import statistics
import time

import keras_dist as kd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--turns", type=int, default=9, help="how often each way is timed")
parser.add_argument("--devices", type=int, default=8, help="how many CPU devices to simulate")
parser.add_argument("--steps", type=int, default=30, help="how many steps an epoch has")
arguments = parser.parse_args()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
kd.simulate_devices(arguments.devices)

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

ROWS, WIDTH = 256, 512


class Waiting(keras.utils.PyDataset):
    """Batches that are there after some seconds."""

    def __init__(self, seconds: float):
        super().__init__()
        random = np.random.default_rng(0)
        self.batch = random.normal(size=(ROWS, WIDTH)).astype("float32"), random.normal(size=(ROWS, 1))
        self.seconds = seconds

    def __len__(self):
        return arguments.steps

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.batch


class ReadLoss(keras.callbacks.Callback):
    """Looks at the loss of each step, as a progress bar does."""

    def on_train_batch_end(self, batch, logs=None):
        assert logs is not None
        float(logs["loss"])


def build() -> keras.Model:
    """Returns a compiled model whose step takes some tens of milliseconds."""
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((WIDTH,)), *dense, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def time_per_step(distribution, model: keras.Model, seconds: float) -> float:
    """Returns the seconds per step of an epoch on batches that take so long each."""
    data = Waiting(seconds)
    with distribution.scope():
        begin = time.perf_counter()
        model.fit(data, verbose=0, callbacks=[ReadLoss()])
        jax.block_until_ready([v.value for v in model.variables])
        return (time.perf_counter() - begin) / arguments.steps


def main() -> None:
    """Times both in turns and prints a table."""
    ours, theirs = kd.DataParallel(), keras.distribution.DataParallel(devices=kd.list_devices())
    with ours.scope():
        our_model = build()
    with theirs.scope():
        their_model = build()
    ratios: dict[str, list[float]] = {"keras_dist": [], "keras.distribution": [], "sum of both": []}
    time_per_step(ours, our_model, 0), time_per_step(theirs, their_model, 0)  # compiles
    for _ in range(arguments.turns):
        step = min(time_per_step(ours, our_model, 0), time_per_step(theirs, their_model, 0))
        begin = time.perf_counter()
        for _ in range(arguments.steps):
            time.sleep(step)
        source = (time.perf_counter() - begin) / arguments.steps
        longer = max(step, source)
        ratios["sum of both"].append((step + source) / longer)
        ratios["keras_dist"].append(time_per_step(ours, our_model, step) / longer)
        ratios["keras.distribution"].append(time_per_step(theirs, their_model, step) / longer)
    print(f"{arguments.devices} devices, medians of {arguments.turns} turns; time per step over the longer of the two")
    for name, found in ratios.items():
        print(f"{name:20} {statistics.median(found):.2f}   (smallest {min(found):.2f}, largest {max(found):.2f})")


if __name__ == "__main__":
    main()

"""Time of a training step in `fit` with `StepMonitor` and without, and how well it measures the step.

Both train the same model on the same batches, in turns, in one process. The machine may be busy, so a ratio is taken in
each turn, and the median of the ratios is printed, beside the ratio of the medians of all turns. The bar is a ratio of
1.01 for a step of 5 ms or more. "CPU ratio" is the same for the time of all cores, which other programs disturb less.
"reported/clock" is the mean step time that the monitor reports over that of a clock around the epoch. The last column
is the time that a monitor adds to a step that computes next to nothing, from the fastest epochs: all of it is work of
the host, which a longer step hides in part. On a busy machine ratios are off by some percent; look at that column.

Run: python benchmarks/monitor.py [--turns 25] [--devices 1] [--milliseconds 8]
"""

import argparse
import os
import statistics
import time

import keras_dist as kd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--turns", type=int, default=25, help="how often each way is timed")
parser.add_argument("--devices", type=int, default=1, help="how many CPU devices to simulate")
parser.add_argument("--milliseconds", type=float, default=8, help="about how long a step takes")
arguments = parser.parse_args()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
kd.simulate_devices(arguments.devices)

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

STEPS, ROWS, WIDTH = 50, 64, 512


def build(layers: int) -> keras.Model:
    """Returns a compiled model."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, "relu") for _ in range(layers))])
    model.compile("sgd", "mse")
    return model


def epoch(model: keras.Model, data: tuple, monitor: kd.StepMonitor | None, rows: int = ROWS) -> tuple[float, ...]:
    """Trains one epoch. Returns seconds per step: by a clock, of all cores, and those that the monitor reports."""
    begin, busy = time.perf_counter(), time.process_time()
    callbacks = [] if monitor is None else [monitor]
    history = model.fit(*data, batch_size=rows, shuffle=False, verbose=0, callbacks=callbacks).history
    jax.block_until_ready([variable.value for variable in model.variables])
    taken = [each * rows / len(data[0]) for each in (time.perf_counter() - begin, time.process_time() - busy)]
    return *taken, rows / history["samples_per_second"][0] if monitor is not None else 0.0


def measure(distribution: kd.Distribution | None, data: tuple) -> None:
    """Prints a line: a distribution, or None for plain Keras."""
    kd.set_distribution(distribution)
    layers = 4
    for _ in range(2):  # the second time the model has as many layers as the step should take milliseconds
        model = build(layers)
        epoch(model, data, kd.StepMonitor(log_every=None))
        taken = min(epoch(model, data, None)[0] for _ in range(3))
        layers = max(1, round(layers * arguments.milliseconds / (1e3 * taken)))
    times: dict[str, list[float]] = {"on": [], "off": []}
    cores: dict[str, list[float]] = {"on": [], "off": []}
    reported = []
    order = np.random.default_rng(0)
    for _ in range(arguments.turns):
        for way in order.permutation(list(times)):
            seconds, busy, seen = epoch(model, data, kd.StepMonitor(log_every=STEPS) if way == "on" else None)
            times[way].append(seconds)
            cores[way].append(busy)
            reported += [seen / seconds] if way == "on" else []
    on, off = (statistics.median(times[way]) * 1e3 for way in ("on", "off"))
    ratio, of_cores = (
        statistics.median(a / b for a, b in zip(each["on"], each["off"], strict=True)) for each in (times, cores)
    )
    added = host_seconds(data) * 1e6
    name = "plain Keras" if distribution is None else type(distribution).__name__
    accuracy = statistics.median(reported)
    print(
        f"{name:14} {off:8.3f} {on:8.3f} {on / off:18.4f} {ratio:17.4f} {of_cores:10.4f} {accuracy:15.3f} {added:9.1f}",
        flush=True,
    )


def host_seconds(data: tuple) -> float:
    """Returns the seconds that a monitor adds to a step of a tiny model."""
    small = tuple(array[:, :1] for array in data)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    best = {}
    for way in ("off", "on") * arguments.turns:
        seconds, *_ = epoch(model, small, kd.StepMonitor(log_every=STEPS) if way == "on" else None, rows=8)
        best[way] = min(best.get(way, seconds), seconds)
    return best["on"] - best["off"]


def main() -> None:
    """Prints a line for plain Keras and one for a distribution."""
    data = tuple(np.random.default_rng(seed).random((STEPS * ROWS, WIDTH), dtype=np.float32) for seed in (0, 1))
    print(f"jax {jax.__version__}, keras {keras.__version__}; {STEPS} steps an epoch, {arguments.turns} turns")
    columns = f"{'off ms':>8} {'on ms':>8} {'ratio of medians':>18} {'median of ratios':>17}"
    print(f"{'':14} {columns} {'CPU ratio':>10} {'reported/clock':>15} {'added us':>9}")
    measure(None, data)
    measure(kd.DataParallel(), data)


if __name__ == "__main__":
    main()

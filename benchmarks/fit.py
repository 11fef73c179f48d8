"""Time of a training step: `fit` under keras_dist, under keras.distribution, and a hand-written `jax.jit` loop.

All three train the same model on the same batches with the same shardings, in turns, in one process. The machine may be
busy, so the ratio of each turn is taken and the median of the ratios is printed.

Run: python benchmarks/fit.py [--turns 25] [--devices 8]
"""

import argparse
import os
import statistics
import time

import keras_dist as kd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--turns", type=int, default=25, help="how often each way is timed")
parser.add_argument("--devices", type=int, default=8, help="how many CPU devices to simulate")
arguments = parser.parse_args()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
kd.simulate_devices(arguments.devices)

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

STEPS, ROWS, WIDTH = 50, 64, 32


def build(layers: int) -> keras.Model:
    """Returns a compiled model of `2 * layers` variables."""
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((WIDTH,)), *dense])
    model.compile("adam", "mse")
    return model


def fit_under(distribution, layers: int, x, y):
    """Returns a function that trains one epoch with `fit`, and the number of its compilations so far."""
    with distribution.scope():
        model = build(layers)

    def epoch():
        with distribution.scope():
            model.fit(x, y, batch_size=ROWS, verbose=0)
        jax.block_until_ready([v.value for v in model.variables])

    return epoch


def by_hand(distribution, layers: int, x, y):
    """Returns a function that trains one epoch in a loop of its own: slices, `device_put`, one jitted step."""
    with distribution.scope():
        model = build(layers)
        model._symbolic_build(data_batch=(x[:ROWS], y[:ROWS]))
        state = [
            [v.value for v in variables]
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
                model.metrics_variables,
            )
        ]
        batch_sharding = distribution.get_data_layout((ROWS, WIDTH)).backend_layout
        out_shardings = (None, tuple(jax.tree.map(lambda value: value.sharding, part) for part in state))
        step = jax.jit(model.train_step, donate_argnums=0, out_shardings=out_shardings)

    def epoch():
        nonlocal state
        order = np.random.permutation(len(x))
        for start in range(0, len(x), ROWS):
            rows = order[start : start + ROWS]
            logs, state = step(tuple(state), jax.device_put((x[rows], y[rows]), batch_sharding))
        jax.block_until_ready((logs, state))

    return epoch


def main() -> None:
    """Prints a line for each number of devices in the mesh and each model."""
    x = np.random.default_rng(0).random((STEPS * ROWS, WIDTH), dtype=np.float32)
    y = np.random.default_rng(1).random((STEPS * ROWS, WIDTH), dtype=np.float32)
    print(f"jax {jax.__version__}, keras {keras.__version__}; {STEPS} steps an epoch, {arguments.turns} turns, medians")
    print(f"{'devices':>7} {'variables':>9} {'ours ms':>8} {'keras/hand':>11} {'ours/hand':>10} {'ours/keras':>11}")
    for devices in sorted({1, 2, arguments.devices}):
        names = kd.list_devices()[:devices]
        for layers in (13, 100):
            ways = {
                "hand": by_hand(kd.DataParallel(devices=names), layers, x, y),
                "keras": fit_under(keras.distribution.DataParallel(devices=names), layers, x, y),
                "ours": fit_under(kd.DataParallel(devices=names), layers, x, y),
            }
            times: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(arguments.turns + 2):
                for name in sorted(ways, key=lambda name: hash((turn, name))):
                    begin = time.perf_counter()
                    ways[name]()
                    if turn >= 2:  # the first turns compile
                        times[name].append(time.perf_counter() - begin)

            def ratio(one: str, other: str, times=times) -> float:
                return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))

            print(
                f"{devices:7} {2 * layers:9} {statistics.median(times['ours']) / STEPS * 1e3:8.2f} "
                f"{ratio('keras', 'hand'):11.2f} {ratio('ours', 'hand'):10.2f} {ratio('ours', 'keras'):11.2f}"
            )


if __name__ == "__main__":
    main()

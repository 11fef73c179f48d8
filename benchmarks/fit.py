"""Time of a training step: `fit` under keras_dist, under keras.distribution, and a hand-written `jax.jit` loop.

All three train the same model on the same batches with the same shardings, in turns, in one process. The machine may be
busy, so a ratio is taken in each turn, and the median of the ratios is printed. The last ratio is one of CPU time,
which other programs affect less. Compilations are counted in the first epoch, which builds the model, and in all later
ones. (On a mesh of one device, Keras does not place new variables on the mesh, but the results of a step are on it, so
Keras compiles the step for both placements.)

Two last lines are of a tiny model on one device, with `steps_per_execution` of 1 and 32, under keras_dist and under
Keras without a distribution.

The devices are threads of this machine. On one device a step is short, so the ratio shows all that Keras and this
package do on the host for each step. With more devices that work overlaps with their computation.

Run: python benchmarks/fit.py [--turns 25] [--devices 8] [--tiny]
"""

import argparse
import contextlib
import os
import statistics
import time

import keras_dist as kd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--turns", type=int, default=25, help="how often each way is timed")
parser.add_argument("--devices", type=int, default=8, help="how many CPU devices to simulate")
parser.add_argument("--tiny", action="store_true", help="time the tiny model only")
arguments = parser.parse_args()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
kd.simulate_devices(arguments.devices)

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

STEPS, ROWS, WIDTH = 50, 64, 32
compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compilations.append(event) if event.endswith("backend_compile_duration") else None
)


def build(layers: int, steps_per_execution: int = 1) -> keras.Model:
    """Returns a compiled model of `2 * layers` variables."""
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((WIDTH,)), *dense])
    model.compile("adam", "mse", steps_per_execution=steps_per_execution)
    return model


def fit_under(distribution, layers: int, x, y, steps_per_execution: int = 1):
    """Returns a function that trains one epoch with `fit`."""
    scope = contextlib.nullcontext if distribution is None else distribution.scope
    with scope():
        model = build(layers, steps_per_execution)

    def epoch():
        with scope():
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
    """Prints a line for each mesh and each model."""
    x = np.random.default_rng(0).random((STEPS * ROWS, WIDTH), dtype=np.float32)
    y = np.random.default_rng(1).random((STEPS * ROWS, WIDTH), dtype=np.float32)
    print(f"jax {jax.__version__}, keras {keras.__version__}; {STEPS} steps an epoch, {arguments.turns} turns, medians")
    if not arguments.tiny:
        print(
            f"{'devices':>7} {'variables':>9} {'ours ms':>8} {'keras/hand':>11} {'ours/hand':>10} {'ours/keras':>11}"
            "  CPU time  compilations first + later: keras, ours"
        )
        for devices in sorted({1, 2, arguments.devices}):
            names = kd.list_devices()[:devices]
            for layers in (13, 100):
                measure(names, layers, x, y)
    x, y = (np.concatenate([each] * 4) for each in (x, y))
    print(
        f"{'devices':>7} {'variables':>9} {'steps_per_execution':>19} {'ours us':>8} {'keras us':>8} {'ours/keras':>10}"
        "  CPU time"
    )
    for steps_per_execution in (1, 32):
        measure_tiny(steps_per_execution, x, y)


def measure_tiny(steps_per_execution: int, x, y) -> None:
    """Prints the line of a tiny model on one device."""
    one_device = kd.DataParallel(devices=kd.list_devices()[:1])
    ways = {
        "keras": fit_under(None, 2, x, y, steps_per_execution),
        "ours": fit_under(one_device, 2, x, y, steps_per_execution),
    }
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    order = np.random.default_rng(0)
    for turn in range(arguments.turns + 2):
        for name in order.permutation(list(ways)):
            begin, cpu_begin = time.perf_counter(), time.process_time()
            ways[name]()
            if turn >= 2:  # before that, everything is compiled
                times[name].append([time.perf_counter() - begin, time.process_time() - cpu_begin])
    ours, alone = (np.array(times[name]) / (len(x) / ROWS) * 1e6 for name in ("ours", "keras"))
    ratio, cpu_ratio = np.median(ours / alone, axis=0)
    print(
        f"{1:7} {4:9} {steps_per_execution:19} {np.median(ours[:, 0]):8.0f} {np.median(alone[:, 0]):8.0f} {ratio:10.2f}"
        f"  {cpu_ratio:8.2f}",
        flush=True,
    )


def measure(names: list[str], layers: int, x, y) -> None:
    """Prints the line of one mesh and one model."""
    makers = {
        "hand": lambda: by_hand(kd.DataParallel(devices=names), layers, x, y),
        "keras": lambda: fit_under(keras.distribution.DataParallel(devices=names), layers, x, y),
        "ours": lambda: fit_under(kd.DataParallel(devices=names), layers, x, y),
    }
    ways, compiled = {}, {}
    for name, make in makers.items():
        make()()  # what is compiled once in a process, whoever comes first
        compilations.clear()
        ways[name] = make()
        ways[name]()
        compiled[name] = [len(compilations), 0]
    times: dict[str, list[float]] = {name: [] for name in ways}
    cpu_times: dict[str, list[float]] = {name: [] for name in ways}
    order = np.random.default_rng(0)
    for _ in range(arguments.turns):
        for name in order.permutation(list(ways)):
            compilations.clear()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            ways[name]()
            times[name].append(time.perf_counter() - begin)
            cpu_times[name].append(time.process_time() - cpu_begin)
            compiled[name][1] += len(compilations)

    def ratio(one: str, other: str, times: dict[str, list[float]] = times) -> float:
        return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))

    print(
        f"{len(names):7} {2 * layers:9} {statistics.median(times['ours']) / STEPS * 1e3:8.2f} "
        f"{ratio('keras', 'hand'):11.2f} {ratio('ours', 'hand'):10.2f} {ratio('ours', 'keras'):11.2f}"
        f"  {ratio('ours', 'keras', cpu_times):8.2f}"
        f"  {compiled['keras'][0]} + {compiled['keras'][1]}, {compiled['ours'][0]} + {compiled['ours'][1]}",
        flush=True,
    )


if __name__ == "__main__":
    main()

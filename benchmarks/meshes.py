"""Time to lower a mesh: `DeviceMesh.backend_mesh` of keras_dist and of Keras, relative to a `jax.sharding.Mesh`.

Each size runs in a new process with as many simulated CPU devices. A turn creates each mesh once. JAX caches meshes, so
every turn uses another order of the devices.

Run: python benchmarks/meshes.py [--turns 15]
"""

import argparse
import statistics
import subprocess
import sys
import time

SIZES = (8, 256, 2048, 16384)
KERAS_UP_TO = 2048  # Keras's time grows with the square of the number of devices


def measure(count: int, turns: int) -> None:
    """Prints the row of one size."""
    import keras_dist as kd

    kd.simulate_devices(count)
    import jax
    import keras
    import numpy as np

    names = np.array(kd.list_devices())
    devices = np.array(jax.devices())
    shape, axes = (count // 8, 8), ("data", "model")
    random = np.random.default_rng(0)

    def timed(make, order) -> float:
        begin = time.perf_counter()
        make(order)
        return time.perf_counter() - begin

    methods = {
        "raw": lambda order: jax.sharding.Mesh(devices[order].reshape(shape), axes),
        "ours": lambda order: kd.DeviceMesh(shape, axes, names[order]).backend_mesh,
    }
    if count <= KERAS_UP_TO:
        methods["keras"] = lambda order: keras.distribution.DeviceMesh(shape, axes, names[order]).backend_mesh
    lowering = lambda order: kd.DeviceMesh(shape, axes, names[order])  # noqa: E731
    times: dict[str, list[float]] = {name: [] for name in (*methods, "construction")}
    for _ in range(turns):
        for name, make in methods.items():
            times[name].append(timed(make, random.permutation(count)))
        times["construction"].append(timed(lowering, random.permutation(count)))

    def ratio(name: str) -> str:
        if name not in methods:
            return "-"
        return f"{statistics.median(a / b for a, b in zip(times[name], times['raw'], strict=True)):.2f}"

    lowered = statistics.median(
        (a - c) / b for a, b, c in zip(times["ours"], times["raw"], times["construction"], strict=True)
    )
    print(
        f"{count:7} {statistics.median(times['raw']) * 1e3:8.2f} {lowered:14.2f} {ratio('ours'):24} {ratio('keras'):>9}"
    )


def main() -> None:
    """Prints a table of ratios to the time of a `jax.sharding.Mesh`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="number of measurements of each method")
    parser.add_argument("--count", type=int, help="measure only this size, in this process")
    arguments = parser.parse_args()
    if arguments.count:
        measure(arguments.count, arguments.turns)
        return
    print(
        f"{'devices':>7} {'raw ms':>8} {'ours, lowering':>14} {'ours, incl. construction':24} {'keras':>9}", flush=True
    )
    for count in SIZES:
        command = [sys.executable, __file__, "--turns", str(arguments.turns), "--count", str(count)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

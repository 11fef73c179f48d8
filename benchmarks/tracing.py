"""CPU time in which a train step is traced, per block of a model, and that of the whole first step.

A transformer and a network of convolutions, each with 2 and 10 blocks, on eight simulated devices: under FSDP of
keras_dist, and under `keras.distribution`, which replicates the weights. Each measurement is a process of its own, and
counts the CPU seconds of the thread that traces, so that a busy machine changes little. What one block adds is the
difference of the two depths. The ways are measured in turns, and medians are printed.

Run: python benchmarks/tracing.py [--turns 3] [--against FOLDER]

`--against` adds another checkout of this repository, for example the commit before a change.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

DEPTHS = 2, 10
MODELS = "transformer", "convolutions"
ROOT = Path(__file__).parents[1]


def build(name: str, depth: int):
    """Returns a compiled model, and a batch."""
    import keras
    import numpy as np
    from keras import layers

    rows = np.random.default_rng(0)
    if name == "transformer":
        x = inputs = keras.Input((32, 64))
        for _ in range(depth):
            y = layers.LayerNormalization()(x)
            x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(y, y)])
            x = layers.Add()([x, layers.Dense(64)(layers.Dense(256, "gelu")(layers.LayerNormalization()(x)))])
        batch = rows.normal(size=(16, 32, 64)), rows.normal(size=(16, 32, 8))
    else:
        x = inputs = keras.Input((16, 16, 16))
        for _ in range(depth):
            y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(x)))
            x = layers.Add()([x, layers.Conv2D(16, 3, padding="same")(y)])
        x = layers.GlobalAveragePooling2D()(x)
        batch = rows.normal(size=(16, 16, 16, 16)), rows.normal(size=(16, 8))
    model = keras.Model(inputs, layers.Dense(8)(x))
    model.compile("adam", "mse")
    return model, batch


def measure(way: str, name: str, depth: int) -> None:
    """Prints the CPU seconds until the step is traced, and until the first step has ended."""
    import keras_dist as kd

    kd.simulate_devices(8)
    import jax
    import keras

    if way == "keras.distribution":
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    else:
        kd.set_distribution(kd.FullyShardedDataParallel(min_shard_bytes=0))
    ends = []  # of functions that were traced: how long that took, and when it ended

    def listen(event: str, duration_secs: float, **_) -> None:
        if event.endswith("jaxpr_trace_duration"):
            ends.append((duration_secs, time.thread_time()))

    jax.monitoring.register_event_duration_secs_listener(listen)
    model, batch = build(name, depth)
    begin = time.thread_time()
    model.train_on_batch(*batch)
    print(json.dumps([max(ends)[1] - begin, time.thread_time() - begin]))


def seconds(way: str, name: str, depth: int) -> list[float]:
    """Returns the two figures of `measure`, from a process in which `way` is the package or the folder of another."""
    folder = ROOT if way in ("keras_dist", "keras.distribution") else way
    settings = {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, __file__, "--measure", way, name, str(depth)]
    output = subprocess.run(command, env=os.environ | settings, cwd=folder, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    """Measures all ways in turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="how often each is measured")
    parser.add_argument("--against", type=Path, help="the folder of another checkout")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, name, depth = arguments.measure
        measure(way, name, int(depth))
        return
    ways = ["keras_dist", "keras.distribution", *([str(arguments.against.resolve())] if arguments.against else [])]
    print(f"CPU seconds of the tracing thread, medians of {arguments.turns} turns")
    print(f"{'model':14}{'traced, per block':>20}{f'first step, {DEPTHS[1]} blocks':>25}   way")
    for name in MODELS:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(arguments.turns):
            for way in ways:
                (shallow, _), (deep, first) = (seconds(way, name, depth) for depth in DEPTHS)
                found[way].append(((deep - shallow) / (DEPTHS[1] - DEPTHS[0]), first))
        for way, figures in found.items():
            block, first = (statistics.median(column) for column in zip(*figures, strict=True))
            print(f"{name:14}{block:20.3f}{first:25.2f}   {way}")


if __name__ == "__main__":
    main()

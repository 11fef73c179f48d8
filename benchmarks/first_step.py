"""Time to the first step, split into its phases: plain Keras, `keras.distribution` and keras_dist.

A Llama of KerasHub with 8 and with 32 blocks of width 256, on the CPU or the accelerator of this machine. Each
measurement is a process of its own that imports, builds, and trains one step in `fit`. The ways are measured in turns,
and medians are printed: seconds of imports, of the build, and of tracing, lowering and compiling the step and whatever
else runs until the first loss, then all of them together, and the median of the ratios to plain Keras. Since other
programs disturb them, CPU seconds of the process are printed too.

Run: pip install ".[hub]" tensorflow-cpu && python benchmarks/first_step.py [--turns 5] [--blocks 8 32]

`--against FOLDER` adds another checkout of this repository, for example the commit before a change.
"""

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402

WAYS = "keras", "keras.distribution", "keras_dist"
COLUMNS = "imports", "build", "trace", "lower", "compile", "other", "first loss", "CPU"
SIZES = {"vocabulary": 1024, "width": 256, "heads": 8, "key_heads": 2, "hidden": 1024, "rows": 4, "length": 64}
ROOT = Path(__file__).parents[1]


def measure(way: str, blocks: int) -> None:
    """Prints the seconds of each phase as JSON."""
    from one_gpu import CASES, Phases, measure_keras

    case = replace(CASES["llama"], sizes=SIZES | {"blocks": blocks})
    phases = Phases()
    times = measure_keras("llama", case, way, epochs=0)
    found = {"imports": times.imported - STARTED, "build": times.built - times.imported}
    found |= phases.seconds(times.built, times.first)
    found["other"] = times.first - STARTED - sum(found.values())
    print(json.dumps(found | {"first loss": times.first - STARTED, "CPU": time.process_time()}))


def seconds(way: str, blocks: int) -> dict[str, float]:
    """Returns the figures of `measure`, from a process in which `way` is one of the ways or the folder of another."""
    folder, name = (ROOT, way) if way in WAYS else (Path(way), "keras_dist")
    settings = {"PYTHONPATH": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "jax"}
    settings["PYTHONDONTWRITEBYTECODE"] = ""  # an installed package has its bytecode
    command = [sys.executable, __file__, "--measure", name, str(blocks)]
    output = subprocess.run(command, env=os.environ | settings, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    """Measures all ways in turns and prints a table for each depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="how often each is measured")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32], help="numbers of blocks")
    parser.add_argument("--against", type=Path, help="the folder of another checkout")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure[0], int(arguments.measure[1]))
        return
    ways = [*WAYS, *([str(arguments.against.resolve())] if arguments.against else [])]
    print(f"seconds, medians of {arguments.turns} turns")
    print(f"{'blocks':>6}" + "".join(f"{column:>11}" for column in COLUMNS) + f"{'ratio':>8}{'CPU ratio':>11}   way")
    for blocks in arguments.blocks:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(arguments.turns):
            for way in ways:
                found[way].append(seconds(way, blocks))
        for way, turns in found.items():
            medians = [statistics.median(turn[column] for turn in turns) for column in COLUMNS]
            ratios = [
                statistics.median(
                    turn[column] / keras[column] for turn, keras in zip(turns, found["keras"], strict=True)
                )
                for column in ("first loss", "CPU")
            ]
            print(f"{blocks:6}" + "".join(f"{each:11.2f}" for each in medians), end="")
            print(f"{ratios[0]:8.2f}{ratios[1]:11.2f}   {way}", flush=True)


if __name__ == "__main__":
    main()

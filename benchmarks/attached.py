"""Plans of a step against the step itself, on the accelerators of this machine.

The transformer of `step_options.py`, with 8 rows of 1,024 tokens per device, is trained under FSDP with each step
option. Each step is also planned for the same hardware by a process that uses none of it. Printed are the difference of
the loss of the first epoch from that without options, the peak of memory over the plan's memory, and the time of a step
next to the plan's lower bound and forecast.

Run on a machine with GPUs or TPUs: pip install ".[cuda12]" && python benchmarks/attached.py
"""

import argparse
import json
import os
import subprocess
import sys
import time

from step_options import LENGTH, OPTIONS, VOCABULARY, build  # isort: skip  # sets the environment
import jax
import keras
import numpy as np

import keras_dist as kd

ROWS = 8  # of each device
STEPS, EPOCHS = 20, 4
CASES = [
    *OPTIONS,
    kd.StepOptions(optimizer_state_dtype="bfloat16"),
    kd.StepOptions(offload="optimizer"),
    kd.StepOptions(remat="dots", offload=("activations", "optimizer")),
]


class EpochTimes(keras.callbacks.Callback):
    """Notes how long each epoch took. At its end, Keras waits for the last step."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)


def measure(options: kd.StepOptions) -> dict:
    """Trains on the attached devices, and returns the loss of the first epoch, seconds of a step and bytes."""
    device, rows = jax.devices()[0], ROWS * len(jax.devices())
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (rows, LENGTH), "int32")
    batches = np.tile(tokens, (STEPS, 1))
    keras.utils.set_random_seed(0)
    times = EpochTimes()
    with kd.FullyShardedDataParallel().with_step_options(options).scope():
        history = build().fit(batches, batches, rows, EPOCHS, verbose=0, callbacks=[times]).history
    hardware = kd.hardware.of_device(device)
    return {
        "device": device.device_kind,
        "target": f"{hardware.name}:{len(jax.devices())}" if hardware else None,
        "loss": history["loss"][0],
        "seconds": min(times.seconds[1:]) / STEPS,  # the first one compiles
        "peak": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }


def plan(options: kd.StepOptions, target: str) -> dict:
    """Plans the same step."""
    mesh = kd.create_device_mesh("fsdp:-1", devices=kd.target(target))
    tokens = jax.ShapeDtypeStruct((ROWS * mesh.devices.size, LENGTH), "int32")
    found = kd.plan(build, kd.FullyShardedDataParallel(mesh).with_step_options(options), (tokens, tokens))
    forecast = found.roofline.forecast
    return {
        "memory": found.memory.total,
        "bound": found.roofline.seconds,
        "forecast": forecast.seconds if forecast else None,
    }


def in_new_process(*arguments: str, **environment: str) -> dict:
    """Runs one case in a process of its own, whose peak of memory is that of the case alone."""
    call = [sys.executable, __file__, *arguments]
    done = subprocess.run(call, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_all() -> None:
    """Prints a line for each case."""
    first = None
    for case, options in enumerate(CASES):
        measured = in_new_process(f"--case={case}")
        if first is None:
            first = measured
            if first["target"] is None:
                sys.exit(f"kd.hardware has no figures of {first['device']!r}, so nothing can be planned for it.")
            print(f"{first['device']}, jax {jax.__version__}, keras {keras.__version__}")
            print("loss, differs   peak / plan   ms: bound, forecast, measured   time / forecast")
        planned = in_new_process(f"--case={case}", f"--target={first['target']}", JAX_PLATFORMS="cpu")
        loss = abs(measured["loss"] / first["loss"] - 1)
        memory = measured["peak"] / planned["memory"]
        times = [1e3 * (each or float("nan")) for each in (planned["bound"], planned["forecast"], measured["seconds"])]
        print(f"{loss:13.1e} {memory:13.2f}   {times[0]:8.1f} {times[1]:8.1f} {times[2]:8.1f}", end="")
        print(f" {times[2] / times[1]:17.2f}   {options}", flush=True)


def main() -> None:
    """Runs all cases, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, help="the index of the only case to run, in this process")
    parser.add_argument("--target", help="hardware to plan that case for, instead of running it")
    arguments = parser.parse_args()
    if arguments.case is None:
        run_all()
        return
    keras.config.set_dtype_policy("mixed_bfloat16")
    options = CASES[arguments.case]
    print(json.dumps(plan(options, arguments.target) if arguments.target else measure(options)))


if __name__ == "__main__":
    main()

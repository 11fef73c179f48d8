"""Memory and time to write a model that is sharded over 8 devices as a folder of Hugging Face: KerasHub and keras_dist.

The model is read from a checkpoint with random weights (`benchmarks/load_weights.py`), of a Llama or a Mixtral, which
KerasHub does not write. Each export runs in its own process. Memory is the increase while it is written: peak resident
memory of the host without pages of files, and peak bytes of arrays on device 0, looked at every 2 ms. The files are
compared with those of the checkpoint.

Run: python benchmarks/export_weights.py [--format llama|mixtral] [--gigabytes 2] [--turns 1]
"""

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from load_weights import SIZES, number_of_blocks, on_device_0, resident, write

WAYS = {"llama": ["KerasHub", "keras_dist"], "mixtral": ["keras_dist"]}


def export(how: str, source: str, target: str) -> dict:
    """Exports a model in this process; returns seconds, and peak bytes on the host and on device 0."""
    import keras_dist as kd

    kd.simulate_devices(8)
    import jax
    import keras_hub

    with kd.FullyShardedDataParallel().scope():
        model = keras_hub.models.CausalLM.from_preset(source, preprocessor=None)
    jax.block_until_ready([variable.value for variable in model.variables])
    gc.collect()
    peak, ended = {"device 0": 0, "host": 0}, threading.Event()

    def watch():
        while not ended.wait(0.002):
            peak["host"] = max(peak["host"], resident())
            peak["device 0"] = max(peak["device 0"], on_device_0(jax.live_arrays()))

    before = {"device 0": on_device_0(jax.live_arrays()), "host": resident()}
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    if how == "KerasHub":
        model.export_to_transformers(target)
    else:
        kd.export_safetensors(model, target, like=source)
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    return {"seconds": seconds, "same": is_same(source, target), **{name: peak[name] - before[name] for name in peak}}


def is_same(source: str, target: str) -> bool:
    """Whether two folders have the same tensors."""
    import numpy as np
    from safetensors import safe_open

    with (
        safe_open(os.path.join(source, "model.safetensors"), "np") as one,
        safe_open(os.path.join(target, "model.safetensors"), "np") as other,
    ):
        names = set(one.keys())
        same_names = names == set(other.keys())
        return same_names and all(np.array_equal(one.get_tensor(name), other.get_tensor(name)) for name in names)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=list(WAYS), default="llama")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(export(*arguments.only)))
        return
    results: dict[str, list[dict]] = {how: [] for how in WAYS[arguments.format]}
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "source")
        write(arguments.format, source, number_of_blocks(arguments.format, arguments.gigabytes))
        sizes = SIZES[arguments.format]
        largest = max(sizes["vocabulary"], sizes["intermediate"] * sizes.get("experts", 1)) * sizes["hidden"] * 4
        size = sum(os.path.getsize(file) for file in pathlib.Path(source).glob("*"))
        print(f"{size / 1e9:.2f} GB of float32, largest variable {largest / 1e6:.0f} MB, FSDP over 8 devices,")
        print(f"medians of {arguments.turns} turns")
        for turn in range(arguments.turns):
            for how, of_how in results.items():
                target = os.path.join(folder, f"{how}{turn}")
                command = [sys.executable, __file__, "--only", how, source, target]
                output = subprocess.run(command, capture_output=True, text=True, check=True)
                of_how.append(json.loads(output.stdout.splitlines()[-1]))
                subprocess.run(["rm", "-r", target], check=True)
    print(f"{'':12}{'host memory':>14}{'device 0':>14}{'seconds':>10}  files")
    for how, of in results.items():
        host, device, seconds, same = (
            statistics.median(each[key] for each in of) for key in ("host", "device 0", "seconds", "same")
        )
        print(f"{how:12}{host / 1e6:11.0f} MB{device / 1e6:11.0f} MB{seconds:10.2f}  {'equal' if same else 'differ'}")


if __name__ == "__main__":
    main()

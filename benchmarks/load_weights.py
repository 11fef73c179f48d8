"""Memory and time to load a `.weights.h5` into a model sharded over 8 devices: `keras.distribution` against keras_dist.

Each loads in its own process, into a model that is built already, under the same layout map. Memory is the increase
since before loading: peak resident memory of the host, and peak bytes of arrays on device 0, measured each time a
variable has its shards and the value that they were taken from still exists. Simulated devices use host memory, so
"host memory" contains the new shards too. Freed memory is returned at once (MALLOC_MMAP_THRESHOLD_). Values are
compared with the file.

Run: python benchmarks/load_weights.py [--gigabytes 2] [--layout rows|columns] [--turns 1]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # of the processes that this one starts

WIDTH, VOCABULARY = 2048, 50304
BLOCK = 12 * WIDTH * WIDTH  # weights
RULES = {"rows": ("model", None), "columns": (None, "model")}


def build(blocks: int):
    """Returns a model with the kernels of a GPT, initialized to zeros."""
    import keras

    x = tokens = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH, embeddings_initializer="zeros", name="tokens")(x)
    for number in range(blocks):
        for name, units in (("query", 1), ("key", 1), ("value", 1), ("out", 1), ("up", 4), ("down", 1)):
            layer = keras.layers.Dense(units * WIDTH, kernel_initializer="zeros", name=f"{name}{number}")
            x = layer(x)
    return keras.Model(tokens, x)


def write(path: str, blocks: int) -> None:
    """Writes random weights to a file."""
    import numpy as np

    model, rng = build(blocks), np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(rng.random(variable.shape, dtype="float32"))
    model.save_weights(path)


def on_device_0(arrays) -> int:
    """Bytes of arrays on device 0; buffers that several arrays share count once."""
    import jax

    device, buffers = jax.devices()[0], {}
    for array in arrays:
        for shard in array.addressable_shards if device in array.sharding.device_set else ():
            if shard.device == device:
                buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


def resident() -> int:
    """Resident host memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def load(how: str, path: str, blocks: int, axes: tuple) -> dict:
    """Loads the file in this process; returns seconds, and peak bytes on the host and on device 0."""
    import keras_dist as kd

    kd.simulate_devices(8)
    import h5py
    import jax
    import keras
    import numpy as np

    from keras_dist._keras import internals

    api = keras.distribution if how == "keras" else kd
    layout_map = api.LayoutMap(api.DeviceMesh((8,), ["model"]))
    layout_map[".*(embeddings|kernel)"] = api.TensorLayout(axes)
    api.set_distribution(api.ModelParallel(layout_map=layout_map, batch_dim_name=None))
    model = build(blocks)
    jax.block_until_ready([variable.value for variable in model.variables])
    distribute, peak = internals.backend_lib.distribute_tensor, {"device 0": 0, "host": 0}

    def measured(tensor, layout):
        result = jax.block_until_ready(distribute(tensor, layout))
        peak["device 0"] = max(peak["device 0"], on_device_0(jax.live_arrays()))
        return result

    internals.backend_lib.distribute_tensor = measured
    ended = threading.Event()

    def watch():
        while not ended.wait(0.002):
            peak["host"] = max(peak["host"], resident())

    before = {"device 0": on_device_0(jax.live_arrays()), "host": resident()}
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    model.load_weights(path)
    jax.block_until_ready([variable.value for variable in model.variables])
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    with h5py.File(path) as file:
        same = np.array_equal(np.asarray(model.layers[1].embeddings.value), file["layers/embedding/vars/0"])
        same &= np.array_equal(np.asarray(model.layers[-1].kernel.value), file[f"layers/dense_{6 * blocks - 1}/vars/0"])
    return {"seconds": seconds, "same": bool(same), **{name: peak[name] - before[name] for name in peak}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--layout", choices=RULES, default="rows")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    blocks = max(1, round((arguments.gigabytes * 1e9 / 4 - VOCABULARY * WIDTH) / BLOCK))
    if arguments.only:
        how, path = arguments.only
        if how == "write":
            write(path, blocks)
        else:
            print(json.dumps(load(how, path, blocks, RULES[arguments.layout])))
        return
    results = {"keras": [], "keras_dist": []}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.weights.h5")
        command = [sys.executable, __file__, "--gigabytes", str(arguments.gigabytes), "--layout", arguments.layout]
        subprocess.run([*command, "--only", "write", path], check=True)
        print(f"{os.path.getsize(path) / 1e9:.2f} GB of float32, largest tensor {VOCABULARY * WIDTH * 4 / 1e6:.0f} MB,")
        print(f"kernels and embeddings in {arguments.layout} over 8 devices, medians of {arguments.turns} turns")
        for _ in range(arguments.turns):
            for how, of_how in results.items():
                output = subprocess.run([*command, "--only", how, path], capture_output=True, text=True, check=True)
                of_how.append(json.loads(output.stdout.splitlines()[-1]))
    print(f"{'':10}{'host memory':>14}{'device 0':>14}{'seconds':>10}  values")
    medians = {how: {key: statistics.median(each[key] for each in of) for key in of[0]} for how, of in results.items()}
    for how, of in medians.items():
        values = "equal the file" if of["same"] else "WRONG"
        print(f"{how:10}{of['host'] / 1e6:11.0f} MB{of['device 0'] / 1e6:11.0f} MB{of['seconds']:10.2f}  {values}")
    ratios = {
        key: medians["keras"][key] / max(1e-9, medians["keras_dist"][key]) for key in ("host", "device 0", "seconds")
    }
    print(f"{'ratio':10}{ratios['host']:14.1f}{ratios['device 0']:14.1f}{ratios['seconds']:10.2f}")


if __name__ == "__main__":
    main()

"""Memory and time to load weights into a model sharded over 8 devices: `keras.distribution` against keras_dist.

The weights are a `.weights.h5`, or with `--format llama` or `mixtral` a checkpoint of Hugging Face (safetensors), which
a converter of KerasHub reads.

Each loads in its own process, into a model that is built already, under the same layout map. Memory is the increase
since before loading: peak resident memory of the host without pages of files, and peak bytes of arrays on device 0,
measured each time a variable has its shards and the value that they were taken from still exists. Simulated devices use
host memory, so "host memory" contains the new shards too. Freed memory is returned at once (MALLOC_MMAP_THRESHOLD_).
Values are compared with the file.

Run: python benchmarks/load_weights.py [--format h5|llama|mixtral] [--gigabytes 2] [--layout rows|columns] [--turns 1]
"""

import argparse
import functools
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

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # of the processes that this one starts

WIDTH, VOCABULARY = 2048, 50304
BLOCK = 12 * WIDTH * WIDTH  # weights
RULES = {"rows": ("model", None), "columns": (None, "model")}
SIZES = {  # of checkpoints of Hugging Face
    "llama": {"hidden": WIDTH, "intermediate": 4 * WIDTH, "vocabulary": VOCABULARY},
    "mixtral": {"hidden": WIDTH // 2, "intermediate": 2 * WIDTH, "vocabulary": 1024, "experts": 8},
}


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


def number_of_blocks(format: str, gigabytes: float) -> int:
    """Returns the number of blocks of a model whose weights have about so many bytes."""
    if format == "h5":
        return max(1, round((gigabytes * 1e9 / 4 - VOCABULARY * WIDTH) / BLOCK))
    sizes = SIZES[format]
    block = 3 * sizes["hidden"] * (sizes["hidden"] + sizes["intermediate"] * sizes.get("experts", 1))
    return max(1, round((gigabytes * 1e9 / 4 - 2 * sizes["vocabulary"] * sizes["hidden"]) / block))


def write(format: str, path: str, blocks: int) -> None:
    """Writes random weights to a file, or a folder."""
    if format != "h5":
        sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
        from support.hub_checkpoints import write_checkpoint  # pyright: ignore[reportMissingImports]

        os.makedirs(path)
        write_checkpoint(pathlib.Path(path), format, layers=blocks, **SIZES[format])
        return
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
    """Resident host memory of this process in bytes, without pages of files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def of_keras_hub(folder: str):
    """Returns a model with the configuration of a checkpoint, a function that loads it, and one that checks values."""
    import keras_hub
    import numpy as np
    from keras_hub.src.utils.transformers.preset_loader import SafetensorLoader, TransformersPresetLoader

    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    model = keras_hub.models.Backbone.from_preset(folder, load_weights=False)

    def read():
        with SafetensorLoader(folder) as loader:
            TransformersPresetLoader(folder, config).converter.convert_weights(model, loader, config)

    def is_same():
        last = model.get_layer(f"transformer_layer_{model.num_layers - 1}")
        block, down = f"model.layers.{model.num_layers - 1}", [v for v in last.weights if "output_dense" in v.path][-1]
        with SafetensorLoader(folder) as loader:
            same = np.array_equal(model.token_embedding.embeddings, loader.get_tensor("model.embed_tokens.weight"))
            if len(down.shape) == 2:
                return same and np.array_equal(down, loader.get_tensor(f"{block}.mlp.down_proj.weight").T)
            names = [f"{block}.block_sparse_moe.experts.{i}.w2.weight" for i in range(down.shape[0])]
            return same and np.array_equal(down, np.stack([loader.get_tensor(name).T for name in names]))

    return model, read, is_same


def of_keras(path: str, blocks: int):
    """As `of_keras_hub`, for a `.weights.h5`."""
    import h5py
    import numpy as np

    model = build(blocks)

    def is_same():
        first, last = model.layers[1].embeddings.value, model.layers[-1].kernel.value
        with h5py.File(path) as file:
            same = np.array_equal(np.asarray(first), file["layers/embedding/vars/0"])
            return same and np.array_equal(np.asarray(last), file[f"layers/dense_{6 * blocks - 1}/vars/0"])

    return model, functools.partial(model.load_weights, path), is_same


def load(how: str, format: str, path: str, blocks: int, axes: tuple) -> dict:
    """Loads the weights in this process; returns seconds, and peak bytes on the host and on device 0."""
    import keras_dist as kd

    kd.simulate_devices(8)
    import jax
    import keras

    from keras_dist._keras import internals

    api = keras.distribution if how == "keras" else kd
    layout_map = api.LayoutMap(api.DeviceMesh((8,), ["model"]))
    if format == "h5":
        layout_map[".*(embeddings|kernel)"] = api.TensorLayout(axes)
    else:
        layout_map[".*(embeddings|(gate|intermediate|output)_dense/kernel)"] = api.TensorLayout(axes)
        layout_map[".*((query|key|value)/kernel|/experts/.*)"] = api.TensorLayout((axes[0], None, axes[1]))
        layout_map[".*attention_output/kernel"] = api.TensorLayout((None, *axes))
    api.set_distribution(api.ModelParallel(layout_map=layout_map, batch_dim_name=None))
    model, read, is_same = of_keras(path, blocks) if format == "h5" else of_keras_hub(path)
    jax.block_until_ready([variable.value for variable in model.variables])
    gc.collect()
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
    read()
    jax.block_until_ready([variable.value for variable in model.variables])
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    return {"seconds": seconds, "same": bool(is_same()), **{name: peak[name] - before[name] for name in peak}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=["h5", *SIZES], default="h5")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--layout", choices=RULES, default="rows")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    blocks = number_of_blocks(arguments.format, arguments.gigabytes)
    if arguments.only:
        how, path = arguments.only
        if how == "write":
            write(arguments.format, path, blocks)
        else:
            print(json.dumps(load(how, arguments.format, path, blocks, RULES[arguments.layout])))
        return
    results = {"keras": [], "keras_dist": []}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.weights.h5" if arguments.format == "h5" else "checkpoint")
        command = [sys.executable, __file__, "--gigabytes", str(arguments.gigabytes), "--layout", arguments.layout]
        command += ["--format", arguments.format]
        subprocess.run([*command, "--only", "write", path], check=True)
        size = sum(os.path.getsize(file) for file in (path, *pathlib.Path(path).glob("*")))
        sizes = SIZES.get(arguments.format, {"vocabulary": VOCABULARY, "hidden": WIDTH, "intermediate": 0})
        largest = max(sizes["vocabulary"], sizes["intermediate"] * sizes.get("experts", 1)) * sizes["hidden"] * 4
        print(f"{size / 1e9:.2f} GB of float32, largest variable {largest / 1e6:.0f} MB,")
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

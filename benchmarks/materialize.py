"""Time and memory to initialize a sharded GPT (204 M parameters, AdamW, 8 devices): Keras against keras_dist.

keras_dist uses `deferred` and `materialize`. For comparison, "random numbers" only draws as many numbers as the model
has weights, with JAX's default generator, sharded, in one compiled program. Each build runs in its own process, in
turns. Time is until all values are ready. Memory is the increase of the peak since before the build, as a multiple of
the bytes of weights and optimizer state (12 per weight).

Run: python benchmarks/materialize.py [--turns 5] [--layout fully_sharded|tensor_parallel]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

DEPTH, WIDTH, HEADS, VOCABULARY, LENGTH = 8, 1024, 16, 50304, 256

RULES = {
    "fully_sharded": {
        ".*embeddings": ("data", None),
        ".*(query|key|value)/kernel": ("data", None, None),
        ".*attention_output/kernel": (None, None, "data"),
        ".*(up|down|head)/kernel": ("data", None),
    },
    "tensor_parallel": {
        ".*embeddings": ("model", None),
        ".*(query|key|value)/kernel": (None, "model", None),
        ".*attention_output/kernel": ("model", None, None),
        ".*(up|head)/kernel": (None, "model"),
        ".*down/kernel": ("model", None),
    },
}
MESHES = {"fully_sharded": ((8,), ["data"]), "tensor_parallel": ((2, 4), ["data", "model"])}


def build():
    """Returns a compiled GPT."""
    import keras
    from keras import layers

    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    for number in range(DEPTH):
        y = layers.LayerNormalization(name=f"block{number}_norm1")(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"block{number}_attention")
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(name=f"block{number}_norm2")(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=f"block{number}_up")(y)
        x = layers.Add()([x, layers.Dense(WIDTH, name=f"block{number}_down")(y)])
    x = layers.LayerNormalization(name="norm")(x)
    model = keras.Model(tokens, layers.Dense(VOCABULARY, use_bias=False, name="head")(x))
    model.compile(keras.optimizers.AdamW(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def measure(how: str, layout: str) -> dict:
    """Builds in this process; returns seconds, peak bytes, number of weights, and the sum of their absolute values."""
    import keras_dist as kd

    kd.simulate_devices(8)
    import jax
    import keras

    api = keras.distribution if how == "keras" else kd
    shape, names = MESHES[layout]
    layout_map = api.LayoutMap(api.DeviceMesh(shape, names))
    for pattern, axes in RULES[layout].items():
        layout_map[pattern] = api.TensorLayout(axes)
    keras.utils.set_random_seed(1)
    api.set_distribution(api.ModelParallel(layout_map=layout_map, batch_dim_name="data"))
    jax.block_until_ready(jax.device_put(0.0))  # starts JAX
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    if how == "random numbers":
        sharding = jax.sharding.NamedSharding(layout_map.device_mesh.backend_mesh, jax.sharding.PartitionSpec(names[0]))
        draw = jax.jit(lambda key: jax.random.uniform(key, (1024, 1024, 8)), out_shardings=sharding)
        values = [draw(jax.random.key(number)) for number in range(24)]
        weights = values
        jax.block_until_ready(values)
    else:
        if how == "keras":
            model = build()
            model.optimizer.build(model.trainable_variables)
        else:
            with kd.deferred():
                model = build()
            kd.materialize(model)
        values = [variable.value for variable in model.variables + model.optimizer.variables]
        weights = [variable.value for variable in model.weights]
        jax.block_until_ready(values)
    seconds = time.perf_counter() - started
    held = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    total = float(sum(abs(weight).sum() for weight in weights))
    return {"seconds": seconds, "bytes": held, "count": sum(weight.size for weight in weights), "total": total}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layout", choices=RULES, default="fully_sharded")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.layout)))
        return
    results = {"keras": [], "random numbers": [], "keras_dist": []}
    for _ in range(arguments.turns):
        for how, of_how in results.items():
            command = [sys.executable, __file__, "--layout", arguments.layout, "--only", how]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            of_how.append(json.loads(output.splitlines()[-1]))
    weights = results["keras_dist"][0]["count"]
    totals = {how: results[how][0]["total"] for how in ("keras", "keras_dist")}
    print(
        f"Sum of the absolute values of the weights: Keras {totals['keras']:.6g}, keras_dist {totals['keras_dist']:.6g}"
    )
    print(f"{weights / 1e6:.0f} M parameters, {arguments.layout}, medians of {arguments.turns} turns")
    for how, of_how in results.items():
        seconds = statistics.median(each["seconds"] for each in of_how)
        held = statistics.median(each["bytes"] for each in of_how)
        ratio = statistics.median(
            keras["seconds"] / each["seconds"] for keras, each in zip(results["keras"], of_how, strict=True)
        )
        memory = "" if how == "random numbers" else f", memory {held / 12 / weights:.2f} of weights and optimizer state"
        print(f"{how:>15}: {seconds:5.2f} s, {ratio:.2f} times as fast as Keras{memory}")


if __name__ == "__main__":
    main()

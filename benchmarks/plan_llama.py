"""Time and memory to plan the training of a Llama 3 on TPU v5p, on a laptop's CPU.

KerasHub's Llama 3 with 8 billion parameters on 64 chips, or 70 billion on 256: AdamW, bfloat16 compute, sequences of
4,096 tokens, FSDP over one axis and TP over the other. By default, models of 2 and 4 blocks are compiled and the plan
is extrapolated; `--whole` compiles all blocks, for comparison.

Run: pip install "keras-dist[tpu,hub]" tensorflow-cpu && python benchmarks/plan_llama.py 8b
"""

import argparse
import os
import resource
import time

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import keras
import keras_hub

import keras_dist as kd

# Source: the model cards of Llama 3 8B and 70B. Sizes are those of KerasHub's presets.
SIZES = {
    "8b": {"layers": 32, "hidden_dim": 4096, "intermediate_dim": 14336, "num_query_heads": 32},
    "70b": {"layers": 80, "hidden_dim": 8192, "intermediate_dim": 28672, "num_query_heads": 64},
}
CLUSTERS = {"8b": ("v5p:4x4x4", "data:16,model:4"), "70b": ("v5p:4x8x8", "data:32,model:8")}
LENGTH = 4096


def build(depth: int, hidden_dim: int, intermediate_dim: int, num_query_heads: int) -> keras.Model:
    """Returns a compiled Llama 3. Nothing in it refers to a distribution."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=128256,
        num_layers=depth,
        num_query_heads=num_query_heads,
        num_key_value_heads=8,
        hidden_dim=hidden_dim,
        intermediate_dim=intermediate_dim,
        rope_max_wavelength=500_000,
    )
    model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
    model.compile(keras.optimizers.AdamW(3e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def layout(mesh: kd.DeviceMesh) -> kd.Distribution:
    """FSDP over "data" and TP over "model"; outputs of blocks are sharded over "data" only."""
    layout_map = kd.LayoutMap(mesh)
    layout_map["token_embedding/embeddings"] = ("model", "data")
    layout_map["token_embedding/reverse_embeddings"] = ("data", "model")
    layout_map[".*(query|key|value)/kernel"] = ("data", "model", None)
    layout_map[".*attention_output/kernel"] = ("model", None, "data")
    layout_map[".*feedforward_(gate|intermediate)_dense/kernel"] = ("data", "model")
    layout_map[".*feedforward_output_dense/kernel"] = ("model", "data")
    layout_map[r"transformer_layer_\d+/output"] = ("data", None, None)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--whole", action="store_true", help="compile all blocks instead of 2 and 4")
    parser.add_argument("--rows", type=int, default=32, help="sequences in a batch")
    arguments = parser.parse_args()
    sizes = dict(SIZES[arguments.size])
    depth = sizes.pop("layers")
    target, axes = CLUSTERS[arguments.size]
    mesh = kd.create_device_mesh(axes, devices=kd.target(target))
    rows = arguments.rows
    tokens = jax.ShapeDtypeStruct((rows, LENGTH), "int32")
    batch = {"token_ids": tokens, "padding_mask": jax.ShapeDtypeStruct((rows, LENGTH), "bool")}, tokens
    started, cpu_started = time.perf_counter(), time.process_time()
    if arguments.whole:
        planned = kd.plan(lambda: build(depth, **sizes), layout(mesh), batch)
    else:
        planned = kd.plan(lambda blocks: build(blocks, **sizes), layout(mesh), batch, depth=depth)
    print(planned)
    print(
        f"Planned in {time.perf_counter() - started:.0f} s ({time.process_time() - cpu_started:.0f} s of CPU time), "
        f"with a peak of {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory."
    )


if __name__ == "__main__":
    main()

"""Time and memory to plan the training of a Llama 3 on TPUs and GPUs, on a laptop's CPU.

KerasHub's Llama 3 with AdamW and bfloat16 compute:

* `8b`: 8 billion parameters on 64 chips of TPU v5p, 32 sequences of 4,096 tokens, FSDP over one axis, TP over another
* `70b`: 70 billion parameters on 256 chips, the same otherwise
* `8b-128k`: one sequence of 131,072 tokens on 8 H100, FSDP and context parallelism over all of them
* `8b-1m`: one sequence of 1,048,576 tokens on 256 chips of TPU v5p, TP + SP over 8 and context parallelism over 32

By default, models of few blocks are compiled and the plan is extrapolated; `--whole` compiles all blocks. `8b-128k` is
always compiled in full: it needs so much memory that the compiler computes some activations again.

Run: pip install ".[tpu,cuda12,hub]" tensorflow-cpu && python benchmarks/plan_llama.py 8b
"""

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

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
# Llama 2 70B has the blocks of Llama 3 70B, and a smaller vocabulary.
SIZES["llama2-70b"] = {**SIZES["70b"], "vocabulary_size": 32000}


def build(
    depth: int, hidden_dim: int, intermediate_dim: int, num_query_heads: int, vocabulary_size: int = 128256
) -> keras.Model:
    """Returns a compiled Llama 3. Nothing in it refers to a distribution."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=vocabulary_size,
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


def fully_sharded_and_tensor_parallel(mesh: kd.DeviceMesh, builder: Callable) -> kd.Distribution:
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


def fully_sharded_and_context_parallel(mesh: kd.DeviceMesh, builder: Callable) -> kd.Distribution:
    """FSDP over both axes, and sequences over "context". Blocks gather their weights again for the backward pass."""
    return kd.FullyShardedDataParallel(mesh, sequence_dim_name="context", reshard_after_forward=True)


def tensor_and_context_parallel(mesh: kd.DeviceMesh, builder: Callable) -> kd.Distribution:
    """TP and SP over "model", and sequences over "context"."""
    rules = kd.tensor_parallel_layout_map(lambda: builder(2), mesh, sequence_parallel=True, sequence_dim_name="context")
    return kd.ModelParallel(layout_map=rules, batch_dim_name="data", sequence_dim_name="context")


class Case(NamedTuple):
    """A model, a cluster and a batch. `compile_depths` of None: all blocks are compiled."""

    size: str
    target: str
    axes: str
    distribution: Callable[[kd.DeviceMesh, Callable], kd.Distribution]
    rows: int
    tokens: int
    compile_depths: tuple[int, int] | None


CASES = {
    "8b": Case("8b", "v5p:4x4x4", "data:16,model:4", fully_sharded_and_tensor_parallel, 32, 4096, (2, 4)),
    "70b": Case("70b", "v5p:4x8x8", "data:32,model:8", fully_sharded_and_tensor_parallel, 32, 4096, (2, 4)),
    "8b-128k": Case("8b", "h100:8", "fsdp:1,context:8", fully_sharded_and_context_parallel, 1, 2**17, None),
    "8b-1m": Case("8b", "v5p:4x8x8", "data:1,context:32,model:8", tensor_and_context_parallel, 1, 2**20, (4, 8)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--whole", action="store_true", help="compile all blocks instead of a few")
    parser.add_argument("--rows", type=int, help="sequences in a batch")
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    sizes = dict(SIZES[case.size])
    depth = sizes.pop("layers")
    mesh = kd.create_device_mesh(case.axes, devices=kd.target(case.target))
    shape = arguments.rows or case.rows, case.tokens
    tokens = jax.ShapeDtypeStruct(shape, "int32")
    batch = {"token_ids": tokens, "padding_mask": jax.ShapeDtypeStruct(shape, "bool")}, tokens
    started, cpu_started = time.perf_counter(), time.process_time()
    distribution = case.distribution(mesh, lambda blocks: build(blocks, **sizes))
    if arguments.whole or case.compile_depths is None:
        planned = kd.plan(lambda: build(depth, **sizes), distribution, batch)
    else:
        planned = kd.plan(
            lambda blocks: build(blocks, **sizes), distribution, batch, depth=depth, compile_depths=case.compile_depths
        )
    print(planned)
    print(
        f"Planned in {time.perf_counter() - started:.0f} s ({time.process_time() - cpu_started:.0f} s of CPU time), "
        f"with a peak of {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory."
    )


if __name__ == "__main__":
    main()

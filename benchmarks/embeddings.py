"""Bytes that a train step of KerasHub's Gemma and Llama 3 sends, over those of each gradient and weight once.

Gemma multiplies with the table that it also looks up; Llama 3 has a matrix of its own for the logits. Two blocks of
width 1,024 and a vocabulary of 32,768, 512 tokens per device on 8 devices that need not be attached, in float32 and in
bfloat16. The lower bound: each gradient is reduced once, and under FSDP each weight gathered once, in the dtype of
compute; under ZeRO-1 each new weight is gathered in float32.

Run: pip install ".[tpu,cuda12,hub]" tensorflow-cpu && python benchmarks/embeddings.py
"""

import math
import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import keras
import keras_hub

import keras_dist as kd

ROWS, LENGTH = 32, 128
SIZES = {"vocabulary_size": 32768, "num_layers": 2, "hidden_dim": 1024, "intermediate_dim": 4096, "num_query_heads": 8}
STRATEGIES = {
    "DP": kd.DataParallel,
    "ZeRO-1": lambda mesh: kd.DataParallel(mesh, shard_optimizer_state=True),
    "FSDP": kd.FullyShardedDataParallel,
}


def gemma() -> keras.Model:
    """Returns a compiled Gemma."""
    backbone = keras_hub.models.GemmaBackbone(**SIZES, num_key_value_heads=1, head_dim=128)
    return compiled(keras_hub.models.GemmaCausalLM(backbone, preprocessor=None))


def llama() -> keras.Model:
    """Returns a compiled Llama 3."""
    backbone = keras_hub.models.Llama3Backbone(**SIZES, num_key_value_heads=8)
    return compiled(keras_hub.models.Llama3CausalLM(backbone, preprocessor=None))


def compiled(model: keras.Model) -> keras.Model:
    """Returns a model with an optimizer and a loss."""
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def bytes_over_floor(build, target: str, strategy: str) -> float:
    """Returns the bytes that a device sends in a step, over the lower bound."""
    mesh = kd.create_device_mesh("data:8", devices=kd.target(target))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32")
    inputs = {"token_ids": tokens, "padding_mask": jax.ShapeDtypeStruct((ROWS, LENGTH), "bool")}
    plan = kd.plan(build, STRATEGIES[strategy](mesh), (inputs, tokens))
    item = {"float32": 4, "bfloat16": 2}[keras.config.dtype_policy().compute_dtype]
    elements = sum(math.prod(each.shape) for each in plan.variables if each.part == "weights")
    return plan.wire_bytes / (7 / 8 * elements * (item + (4 if strategy == "ZeRO-1" else item)))


def main() -> None:
    """Prints a row for each model, dtype and strategy."""
    targets = ("h100:8", "v5e:2x4")
    print(f"{'model':8}{'dtype':16}{'strategy':10}" + "".join(f"{target:>10}" for target in targets))
    for build in (gemma, llama):
        for policy in ("float32", "mixed_bfloat16"):
            keras.config.set_dtype_policy(policy)
            for strategy in STRATEGIES:
                ratios = [bytes_over_floor(build, target, strategy) for target in targets]
                figures = "".join(f"{ratio:10.3f}" for ratio in ratios)
                print(f"{build.__name__:8}{policy:16}{strategy:10}{figures}", flush=True)


if __name__ == "__main__":
    main()

"""`generate()` of a Llama of KerasHub: what a token sends and reads, and tokens per second.

For targets, which need not be attached, `generate()` is compiled under each strategy, with and without the rewriting of
its loop: collectives and bytes of a token, and memory. On the devices at hand ("here"), it runs under each strategy, in
turns with plain Keras on one of them.

Run: pip install ".[tpu,cuda12,hub]" tensorflow-cpu && python benchmarks/decode.py [h100:8 v5e:2x4 here]
"""

import argparse
import contextlib
import os
import statistics
import time
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd  # isort: skip  # sets Keras's backend
import jax
import keras
import keras_hub
import numpy as np

from keras_dist.steps import layer_calls

ROWS, LENGTH, TURNS = 16, 256, 5
STRATEGIES = "DP", "FSDP", "TP"


def build():
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=4096,
        num_layers=4,
        num_query_heads=8,
        num_key_value_heads=8,
        hidden_dim=512,
        intermediate_dim=1024,
        dtype="mixed_bfloat16",
    )
    model = keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None, dtype="mixed_bfloat16")
    model.compile(sampler="greedy")
    return model


def strategy(name: str, devices) -> kd.Distribution:
    mesh = kd.create_device_mesh("data:1,model:-1" if name == "TP" else "data:-1", devices=devices)
    if name == "TP":
        return kd.ModelParallel(layout_map=kd.tensor_parallel_layout_map(build, mesh), batch_dim_name="data")
    return (kd.DataParallel if name == "DP" else kd.FullyShardedDataParallel)(mesh)


def as_keras_does() -> contextlib.ExitStack:
    """Weights are read as they are stored, and loops stay as they are written."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(layer_calls, "with_improved_loops", lambda program: program))
    stack.enter_context(mock.patch.object(layer_calls.LayerCalls, "_resharded", lambda self, variable, value: value))
    return stack


def compile_for(target: str) -> None:
    """Prints what a token needs, each figure with the rewriting and without it."""
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32")
    batch = ({"token_ids": tokens, "padding_mask": tokens},)
    for name in STRATEGIES:
        distribution = strategy(name, kd.target(target).devices)
        with as_keras_does():
            before = kd.plan(build, distribution, batch, step="generate", progress=False)
        after = kd.plan(build, distribution, batch, step="generate", progress=False)
        figures = {
            "collectives": [sum(each.count for each in plan.traffic) for plan in (after, before)],
            "KB sent": [plan.wire_bytes / 1e3 for plan in (after, before)],
            "MB read and written": [plan.memory_traffic / 1e6 for plan in (after, before)],
            "MB of memory": [plan.memory.total / 1e6 for plan in (after, before)],
            "tokens/s by forecast": [plan.tokens_per_second or 0.0 for plan in (after, before)],
        }
        print(f"{target:8} {name:5}", "; ".join(f"{key} {a:.4g} ({b:.4g})" for key, (a, b) in figures.items()))


def time_here() -> None:
    """Prints tokens per second relative to plain Keras on one device, in turns, medians."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 4096, (ROWS, LENGTH)).astype("int32") * (np.arange(LENGTH) < 16)
    inputs = {"token_ids": prompts.astype("int32"), "padding_mask": (prompts > 0).astype("int32")}

    def timed(model, distribution) -> float:
        with distribution.scope() if distribution else contextlib.nullcontext():
            begin = time.perf_counter()
            model.generate(dict(inputs), stop_token_ids=None)
            return time.perf_counter() - begin

    models = {}
    for name in ("plain Keras", *STRATEGIES):
        distribution = None if name == "plain Keras" else strategy(name, None)
        with distribution.scope() if distribution else contextlib.nullcontext():
            keras.utils.set_random_seed(0)
            models[name] = build(), distribution
        timed(*models[name])  # compiles
    seconds = {name: [] for name in models}
    for _ in range(TURNS):
        for name, (model, distribution) in models.items():
            seconds[name].append(timed(model, distribution))
    tokens = ROWS * (LENGTH - 16)
    for name, times in seconds.items():
        ratio = statistics.median(b / a for a, b in zip(times, seconds["plain Keras"], strict=True))
        print(f"{name:12} {tokens / statistics.median(times):8.0f} tokens/s, {ratio:.2f} times plain Keras")


def main() -> None:
    """Compiles for each target, or runs here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=["h100:8", "v5e:2x4", "here"])
    for target in parser.parse_args().targets:
        time_here() if target == "here" else compile_for(target)


if __name__ == "__main__":
    main()

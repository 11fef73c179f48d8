"""Losses in chunks of tokens, planned for hardware that is not attached: what they save and what they cost.

The model is what a language model computes after its blocks: a norm, logits and their loss, in mixed bfloat16. Each
target is planned with logits that are stored, and in chunks: for a mean of the losses, whose gradients are computed in
the loop of the forward pass, and for a root of it, whose chunks are computed again in the backward pass.

Run anywhere: python benchmarks/loss_chunk.py
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
from keras import layers, ops

import keras_dist as kd

LENGTH, TOKENS = 2048, 16_384  # of a sequence, of a device
HEADS = {"Llama 3.2 1B": (128_256, 2048), "65,536 of 1,024": (65_536, 1024)}  # vocabulary and width
FORMS = "mean, stored", "mean, in chunks", "root, stored", "root, in chunks"


def root(labels, logits):
    return ops.sqrt(ops.mean(ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)))


def model(vocabulary: int, width: int, loss: str, dtype: str = "mixed_bfloat16") -> keras.Model:
    hidden = keras.Input((LENGTH, width), dtype="bfloat16" if dtype == "mixed_bfloat16" else "float32")
    x = layers.LayerNormalization(name="norm", dtype=dtype)(hidden)
    head = layers.Dense(vocabulary, use_bias=False, name="head", dtype=dtype)
    built = keras.Model(hidden, head(x))
    mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile("sgd", mean if loss == "mean" else root, metrics=["accuracy"])
    return built


def planned(target: str, head: str, form: str, chunk: int = 2048, parallel: str = "FSDP") -> kd.Plan:
    vocabulary, width = HEADS[head]
    loss, _, way = form.partition(", ")
    devices = kd.target(target)
    options = kd.StepOptions(loss_chunk=chunk if way == "in chunks" else None)
    if parallel == "TP":
        mesh = kd.create_device_mesh({"data": 1, "model": len(devices)}, devices=devices)
        layout_map = kd.LayoutMap(mesh)
        layout_map["head/kernel"] = (None, "model")
        distribution = kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", step_options=options)
        rows = TOKENS // LENGTH
    else:
        mesh = kd.create_device_mesh({"data": len(devices)}, devices=devices)
        distribution = kd.FullyShardedDataParallel(mesh, step_options=options)
        rows = len(devices) * TOKENS // LENGTH
    batch = jax.ShapeDtypeStruct((rows, LENGTH, width), "bfloat16"), jax.ShapeDtypeStruct((rows, LENGTH), "int32")
    return kd.plan(lambda: model(vocabulary, width, loss), distribution, batch=batch, progress=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", nargs="+", default=["v5e:1x1", "h100:1", "v5e:2x4", "h100:8"])
    parser.add_argument("--chunks", nargs="+", type=int, default=[2048], help="tokens of a device at a time")
    parser.add_argument("--heads", nargs="+", default=[*HEADS], choices=HEADS)
    parser.add_argument("--parallel", nargs="+", default=["FSDP", "TP"])
    arguments = parser.parse_args()
    print("| | TFLOP a device | MiB of temporaries | MiB sent | forecast, ms |\n|---|---|---|---|---|")
    for target in arguments.targets:
        for parallel in arguments.parallel[: None if len(kd.target(target)) > 1 else 1]:
            for head in arguments.heads:
                for form in FORMS:
                    for chunk in arguments.chunks if "chunks" in form else [0]:
                        plan = planned(target, head, form, chunk, parallel)
                        figures = plan.flops / 1e12, plan.memory.temporaries / 2**20, plan.wire_bytes / 2**20
                        row = [f"{target} {parallel}, {head}, {form}" + f" of {chunk}" * bool(chunk)]
                        row += [f"{each:.2f}" for each in figures]
                        print(f"| {' | '.join(row)} | {plan.roofline.forecast.seconds * 1e3:.2f} |", flush=True)


if __name__ == "__main__":
    main()

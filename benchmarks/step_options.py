"""Memory, traffic and FLOP of each step option, relative to a step without options, and to `jax.checkpoint` by hand.

A transformer with 6 blocks of width 1,024 and 8,192 tokens per device, bfloat16 compute and float32 Adam, compiled for
eight devices that need not be attached.

Run: pip install ".[tpu,cuda12]" && python benchmarks/step_options.py [--target h100:8]
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import keras_dist as kd  # isort: skip  # sets Keras's backend
import jax
import keras
from keras import layers

BLOCKS, WIDTH, LENGTH, VOCABULARY, ROWS = 6, 1024, 1024, 4096, 64

OPTIONS = [
    kd.StepOptions(),
    kd.StepOptions(microbatches=4),
    kd.StepOptions(microbatches=4, reduce_gradients="microbatch"),
    kd.StepOptions(microbatches=4, gather_weights="update"),
    kd.StepOptions(reduce_dtype="float32"),
    kd.StepOptions(remat="attention"),
    kd.StepOptions(remat="dots"),
    kd.StepOptions(remat="dots", offload="activations"),
    kd.StepOptions(remat="full"),
    kd.StepOptions(microbatches=4, remat="full"),
]


class Checkpointed(layers.Layer):
    """A function of layers that the backward pass computes again."""

    def __init__(self, function, parts):
        super().__init__()
        self.function, self.parts = function, parts

    def call(self, x):
        return jax.checkpoint(lambda x: self.function(x))(x)  # a new function each time: JAX keeps the trace of one

    def compute_output_shape(self, shape):
        return shape


def block(by_hand):
    """Returns a transformer block as a function of a tensor."""
    norms = [layers.LayerNormalization() for _ in range(2)]
    adds = [layers.Add() for _ in range(2)]
    attention = layers.MultiHeadAttention(8, WIDTH // 8)
    up, down = layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH)

    def call(x):
        y = norms[0](x)
        x = adds[0]([x, attention(y, y, use_causal_mask=True)])
        return adds[1]([x, down(up(norms[1](x)))])

    if by_hand:
        call(keras.Input((LENGTH, WIDTH)))  # creates the weights
        return Checkpointed(call, [*norms, *adds, attention, up, down])
    return call


def build(by_hand=False):
    """Returns the compiled model."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(BLOCKS):
        x = block(by_hand)(x)
    model = keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="h100:8")
    arguments = parser.parse_args()
    kd.simulate_devices(8)
    keras.config.set_dtype_policy("mixed_bfloat16")
    mesh = kd.create_device_mesh("data:8", devices=kd.target(arguments.target))
    strategies = {
        "DP": kd.DataParallel(mesh),
        "ZeRO-1": kd.DataParallel(mesh, shard_optimizer_state=True),
        "FSDP": kd.FullyShardedDataParallel(mesh),
    }
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32")
    print(f"{arguments.target}: temporaries, bytes sent and FLOP of a device, relative to no options")
    for name, distribution in strategies.items():
        first = None
        for options in OPTIONS:
            plan = kd.plan(build, distribution.with_step_options(options), (tokens, tokens))
            first = first or plan
            print(f"{name:7} {ratios(plan, first)}  {options}", flush=True)
        print(f"{name:7} {ratios(kd.plan(lambda: build(True), distribution, (tokens, tokens)), first)}  by hand")


def ratios(plan, other):
    """Returns the figures of a plan relative to those of another."""
    temporaries = plan.memory.temporaries / other.memory.temporaries
    return f"{temporaries:6.2f} {plan.wire_bytes / other.wire_bytes:6.3f} {plan.flops / other.flops:6.3f}"


if __name__ == "__main__":
    main()

# %% [markdown]
# # One transformer under eight strategies: equal losses, and the memory and traffic of each
#
# First a small transformer is trained to write Python, on the source of the standard library: once on one device and
# once under each strategy on eight simulated devices, with equal losses. Then a larger one is planned under each
# strategy.
#
# As a script, it plans for the hardware that you name, which need not be attached:
# `python strategies.py v5e:2x4 h100:8` (with the extras `tpu` and `cuda13`). By default it plans for the simulated
# devices. On CPUs, XLA sends float32 instead of bfloat16, and uses all-reduces instead of reduce-scatters.

# %%
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import functools
import inspect
import json
import sys

import keras_dist as kd

kd.simulate_devices(8)

import jax
import keras
import numpy as np
from keras import layers

LENGTH = 64
TARGETS = [] if "ipykernel" in sys.modules else sys.argv[1:]  # the arguments of a notebook are Jupyter's


# %% [markdown]
# ## The model
#
# Nothing in it depends on a distribution.


# %%
def transformer(blocks: int, width: int, length: int = LENGTH, vocabulary: int = 256) -> keras.Model:
    """Returns a compiled language model."""
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width, name="embedding")(tokens)
    for number in range(blocks):
        y = layers.LayerNormalization(name=f"block{number}_norm1")(x)
        attention = layers.MultiHeadAttention(8, width // 8, name=f"block{number}_attention")
        x = layers.Add(name=f"block{number}_add1")([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(name=f"block{number}_norm2")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"block{number}_up")(y)
        x = layers.Add(name=f"block{number}_add2")([x, layers.Dense(width, name=f"block{number}_down")(y)])
    x = layers.LayerNormalization(name="norm")(x)
    model = keras.Model(tokens, layers.Dense(vocabulary, name="head")(x), name="transformer")
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# %% [markdown]
# ## The strategies


# %%
def strategies(build, devices=None) -> dict:
    """Returns for each strategy a function that creates its distribution, on all devices or on those passed."""

    def mesh(axes: str):
        return kd.create_device_mesh(axes, devices=devices)

    def rules(axes: str, sequence_parallel: bool = False):
        return kd.tensor_parallel_layout_map(build, mesh(axes), sequence_parallel=sequence_parallel)

    return {
        # Every device stores everything; gradients are all-reduced.
        "DP": lambda: kd.DataParallel(mesh("data:8")),
        # As DP, but each device stores and updates a shard of the optimizer state.
        "ZeRO-1": lambda: kd.DataParallel(mesh("data:8"), shard_optimizer_state=True),
        # Each device stores a shard of everything, and layers gather their weights when they are called.
        "FSDP": lambda: kd.FullyShardedDataParallel(mesh("fsdp:8")),
        # As FSDP within groups of four devices; the groups all-reduce their gradients.
        "HSDP": lambda: kd.FullyShardedDataParallel(mesh("replica:2,fsdp:4")),
        # Each device computes some heads of each attention, and some columns or rows of each kernel.
        "TP": lambda: kd.ModelParallel(layout_map=rules("data:1,model:8")),
        # As TP, and between those layers each device computes some positions of each sequence.
        "TP + SP": lambda: kd.ModelParallel(layout_map=rules("data:1,model:8", sequence_parallel=True)),
        # TP within pairs of devices, FSDP across the four pairs.
        "FSDP x TP": lambda: kd.FullyShardedDataParallel(layout_map=rules("fsdp:4,model:2")),
        # Groups of four devices share sequences: each computes a quarter of the positions of all layers.
        "FSDP x CP": lambda: kd.FullyShardedDataParallel(mesh("fsdp:2,context:4"), sequence_dim_name="context"),
    }


# %% [markdown]
# ## Equal losses


# %%
def python_source(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns sequences of bytes from the standard library, and for each byte the next one."""
    text = np.frombuffer(inspect.getsource(json).encode() + inspect.getsource(inspect).encode(), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - LENGTH - 1, rows)
    return tuple(np.stack([text[s + shift : s + shift + LENGTH] for s in starts]).astype("int32") for shift in (0, 1))


def losses(distribution) -> list[float]:
    """Returns the losses of three epochs."""
    kd.set_distribution(distribution)
    keras.utils.set_random_seed(0)
    x, y = python_source(128)
    history = transformer(blocks=2, width=64).fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"]
    kd.set_distribution(None)
    return history


# %%
expected = losses(None)
print("losses of three epochs on one device:", *(f"{loss:.4f}" for loss in expected))
for name, make in strategies(functools.partial(transformer, 2, 64)).items():
    under = losses(make())
    difference = max(abs(one - other) / one for one, other in zip(expected, under, strict=True))
    print(f"{name:10} {' '.join(f'{loss:.4f}' for loss in under)}  relative difference {difference:.0e}")

# %% [markdown]
# The rules for tensor parallelism are derived from what the model computes:

# %%
mesh = kd.create_device_mesh("data:1,model:8")
print(kd.tensor_parallel_layout_map(functools.partial(transformer, 2, 64), mesh).to_source())


# %% [markdown]
# ## Memory and traffic
#
# The table shows memory and traffic of one device, for a training step of a larger transformer under each strategy.


# %%
def table(target: str) -> None:
    """Prints memory and traffic per device of a larger transformer's train step, under each strategy."""
    on_cpu = target.startswith("cpu")
    build = functools.partial(transformer, 2 if on_cpu else 4, 256 if on_cpu else 1024, 256 if on_cpu else 1024, 4096)
    print(f"\n{target}: memory of one device, and bytes that it sends in a step")
    print(f"{'':10} {'state':>9} {'temporaries':>11} {'sent':>9}  collectives")
    for name, make in strategies(build, kd.target(target)).items():
        distribution = make()
        rows = 4 * distribution.num_model_replicas
        tokens = jax.ShapeDtypeStruct((rows, 256 if on_cpu else 1024), "int32")
        plan = kd.plan(build, distribution, (tokens, tokens))
        kinds = {each.kind: 0 for each in plan.traffic}
        for each in plan.traffic:
            kinds[each.kind] += int(each.count)
        figures = [f"{size / 2**20:.1f} MiB" for size in (plan.memory.state, plan.memory.temporaries, plan.wire_bytes)]
        collectives = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        print(f"{name:10} {figures[0]:>9} {figures[1]:>11} {figures[2]:>9}  {collectives}")


# %%
keras.config.set_dtype_policy("mixed_bfloat16")
for target in TARGETS or ["cpu:8"]:
    table(target)

# %% [markdown]
# # Plan before you pay: what fits, and what bounds the time of a step
#
# A GPT of 1.4 billion parameters is planned with three distributions. The hardware is not attached and no weights are
# allocated: the real training step is compiled for each cluster, and the compiled program is analyzed. Each plan
# compiles models of 1 and 2 blocks and extrapolates to 24 blocks.
#
# As a script, it plans for the hardware that you name: `python plan_before_you_pay.py v5e:4x4 h100:8`. By default it
# plans for eight chips of TPU v5e if the extra `tpu` is installed. (For GPUs, install the extra `cuda13`.) Otherwise it
# plans for eight CPU devices. For these, plans have memory and traffic, but no times.

# %%
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import importlib.util
import sys

import keras_dist as kd

kd.simulate_devices(8)

import keras
from keras import layers

DEPTH, WIDTH, HEADS, VOCABULARY, LENGTH = 24, 2048, 16, 50304, 1024
ROWS = 8  # sequences in a global batch
IN_NOTEBOOK = "ipykernel" in sys.modules
TARGETS = [] if IN_NOTEBOOK else sys.argv[1:]  # the arguments of a notebook are Jupyter's
if not TARGETS:
    TARGETS = ["v5e:8" if importlib.util.find_spec("libtpu") else "cpu:8"]


def show(value) -> None:
    """Displays a table, a report or a figure in a notebook, and prints it in a script."""
    if IN_NOTEBOOK:
        from IPython.display import display

        display(value)
    else:
        print(value)


# %% [markdown]
# ## Known hardware

# %%
show(kd.hardware)


# %% [markdown]
# ## The model
#
# Nothing in it refers to a distribution.


# %%
def build(depth: int) -> keras.Model:
    """Returns a compiled GPT with `depth` blocks."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    for number in range(depth):
        y = layers.LayerNormalization(name=f"block{number}_norm1")(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"block{number}_attention")
        x = layers.Add(name=f"block{number}_add1")([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(name=f"block{number}_norm2")(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=f"block{number}_up")(y)
        x = layers.Add(name=f"block{number}_add2")([x, layers.Dense(WIDTH, name=f"block{number}_down")(y)])
    x = layers.LayerNormalization(name="norm")(x)
    model = keras.Model(tokens, layers.Dense(VOCABULARY, use_bias=False, name="head")(x), name="gpt")
    model.compile(keras.optimizers.AdamW(3e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# %% [markdown]
# ## Three distributions


# %%
def data_parallel(devices) -> kd.Distribution:
    """DP: every device holds all weights and processes its shard of the batch."""
    return kd.DataParallel(kd.create_device_mesh({"data": len(devices)}, devices=devices))


def fully_sharded(devices) -> kd.Distribution:
    """FSDP: every device holds a shard of each large weight, and gathers it when it is needed."""
    return kd.FullyShardedDataParallel(kd.create_device_mesh({"fsdp": len(devices)}, devices=devices))


def tensor_parallel(devices) -> kd.Distribution:
    """TP: groups of four devices share each block, as in Megatron. Each group processes its shard of the batch."""
    mesh = kd.create_device_mesh({"data": len(devices) // 4, "model": 4}, devices=devices)
    return kd.ModelParallel(layout_map=kd.tensor_parallel_layout_map(lambda: build(depth=2), mesh))


# %% [markdown]
# ## Their plans
#
# The figure of a plan shows what takes the memory of a device, and the schedule of a step: compute, and the collectives
# over each axis. The gray part of a collective overlaps with compute; during the other part, the device waits. A script
# prints bar charts instead.

# %%
plans = {}
for name in TARGETS:
    for letters, layout in (("DP", data_parallel), ("FSDP", fully_sharded), ("TP", tensor_parallel)):
        plan = kd.plan(build, layout(kd.target(name)), ROWS, depth=DEPTH, compile_depths=(1, 2))
        plans[f"{name} {letters}"] = plan
        show(plan.figure() if IN_NOTEBOOK else f"{name} {letters}\n{plan.picture()}")

# %% [markdown]
# This is the full report of the plan that needs the least memory. Its method `save_html("plan.html")` writes the report
# to a file.

# %%
show(min(plans.values(), key=lambda plan: plan.memory.total))

# %% [markdown]
# ## Which one?

# %%
show(kd.compare(**plans))

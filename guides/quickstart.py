# %% [markdown]
# # Quick start: one model on one device, under data and under model parallelism
#
# A model is trained on handwritten digits three times, with the same losses. The number of images of scikit-learn,
# 1,797, is not divisible by any number of devices from 2 to 8. If the machine has only one device, eight CPU devices
# are simulated.

# %%
import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd

count = subprocess.check_output([sys.executable, "-c", "import jax; print(jax.device_count())"], text=True)
if int(count) == 1:
    kd.simulate_devices(8)  # before anything else starts JAX

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

EPOCHS, BATCH = 20, 64
digits = load_digits()
train_images, test_images, train_digits, test_digits = train_test_split(
    digits.data.astype("float32") / 16, digits.target, test_size=0.2, random_state=42, stratify=digits.target
)


# %% [markdown]
# ## The model does not depend on a distribution


# %%
def build() -> keras.Model:
    """Returns a compiled model."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="gelu", name="up"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(128, activation="gelu", name="down"),
            keras.layers.Dense(10, name="digits"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, EPOCHS * 23), momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(distribution=None) -> tuple[keras.Model, list[float]]:
    """Trains on one device, or under a distribution. Returns the model, and the loss of each epoch."""
    kd.set_distribution(distribution)
    model = build()
    losses = model.fit(train_images, train_digits, batch_size=BATCH, epochs=EPOCHS, verbose=0).history["loss"]
    _, accuracy = model.evaluate(test_images, test_digits, verbose=0)
    kd.set_distribution(None)
    print(f"test accuracy {accuracy:.1%}, loss {losses[-1]:.4f} after {EPOCHS} epochs")
    assert accuracy > 0.97, "the accuracy is below 97%"
    return model, losses


def compare(distribution) -> keras.Model:
    """Trains under a distribution, and compares the losses with those of one device. Returns the model."""
    mesh = distribution.device_mesh
    axes = " x ".join(f"{name}:{size}" for name, size in mesh.axis_sizes.items())
    print(f"\n--- {type(distribution).__name__} on {mesh.devices.size} devices, mesh {axes}")
    model, losses = train(distribution)
    difference = np.max(np.abs(np.array(losses) / np.array(losses_of_one_device) - 1))
    print(f"largest relative difference from the losses of one device: {difference:.1e}")
    assert difference < 1e-5, "the losses differ by more than 1e-5"
    return model


# %% [markdown]
# ## One device

# %%
print("--- one device")
_, losses_of_one_device = train()

# %% [markdown]
# ## Data parallelism
#
# All weights are replicated, and each batch is sharded over all devices.

# %%
_ = compare(kd.DataParallel())

# %% [markdown]
# ## Model parallelism
#
# Each batch is sharded over two groups of devices. The weights of two layers are sharded over the devices of a group.

# %%
groups = 2 if kd.get_device_count() % 2 == 0 else 1
mesh = kd.DeviceMesh((groups, kd.get_device_count() // groups), ["data", "model"])
layout_map = kd.LayoutMap(mesh)
layout_map["up/kernel"] = (None, "model")
layout_map["up/bias"] = ("model",)
layout_map["down/kernel"] = ("model", None)
sharded_model = compare(kd.ModelParallel(layout_map=layout_map, batch_dim_name="data"))

# %% [markdown]
# The layout of a weight names a mesh axis for each of its dims. A dim with `model` is sharded over the devices of a
# group. A dim with `None` is not sharded.

# %%
rows = [("weight", "shape", "on each device", "layout")]
for weight in sharded_model.weights:
    sharding, shape = weight.value.sharding, tuple(weight.shape)
    layout = "replicated" if sharding.is_fully_replicated else f"{tuple(sharding.spec)}"
    rows.append((weight.path, f"{shape}", f"{sharding.shard_shape(shape)}", layout))
widths = [max(len(row[column]) for row in rows) for column in range(3)]
print()
for path, shape, shard_shape, layout in rows:
    print(f"{path:{widths[0]}}  {shape:>{widths[1]}}  {shard_shape:>{widths[2]}}  {layout}")

# %% [markdown]
# ## Where to go next
#
# [Get started](../get_started.md) distributes a model of your own, step by step.

# %%
count = kd.get_device_count()
print(f"""
The model had the same losses on one device, with copies of it on {count} devices, and sharded over them.
Only the distribution differed. Next: docs/get_started.md""")

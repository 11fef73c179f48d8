# %% [markdown]
# # Quick start: one model on one device, under data and under model parallelism
#
# A model is trained on handwritten digits three times. The three trainings have the same losses. scikit-learn's 1,797
# images are not divisible by any mesh of 2 to 8 devices. With a single device, eight CPU devices are simulated.

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


def show_layouts(mesh: kd.DeviceMesh, model: keras.Model) -> None:
    """Prints the mesh and the shape of each variable on one device."""
    axes = " x ".join(f"{name}:{size}" for name, size in mesh.axis_sizes.items())
    print(f"mesh {axes}: {mesh.devices.tolist()}")
    print(f"{'variable':34} {'shape':>12} {'on a device':>12}  layout")
    for variable in model.variables:
        sharding, shape = variable.value.sharding, tuple(variable.shape)
        layout = "replicated" if sharding.is_fully_replicated else f"sharded as {sharding.spec}"
        print(f"{variable.path:34} {shape!s:>12} {sharding.shard_shape(shape)!s:>12}  {layout}")


def train(distribution) -> tuple[list[float], float]:
    """Trains under a distribution (None: one device) and returns the loss of each epoch and the test accuracy."""
    kd.set_distribution(distribution)
    model = build()
    if distribution is not None:
        show_layouts(distribution.device_mesh, model)
    history = model.fit(train_images, train_digits, batch_size=BATCH, epochs=EPOCHS, verbose=2)
    _, accuracy = model.evaluate(test_images, test_digits, verbose=0)
    kd.set_distribution(None)
    return history.history["loss"], accuracy


def compare(distribution) -> None:
    """Trains under a distribution, and compares the losses with those of one device."""
    print(f"\n--- {type(distribution).__name__}")
    sharded_losses, sharded_accuracy = train(distribution)
    difference = np.max(np.abs(np.array(sharded_losses) / np.array(losses) - 1))
    print(f"test accuracy {sharded_accuracy:.1%} (one device: {accuracy:.1%})")
    print(f"largest relative difference from the losses on one device over {EPOCHS} epochs: {difference:.1e}")
    assert difference < 1e-5, "the losses differ by more than 1e-5"
    assert sharded_accuracy > 0.97, "the accuracy is below 97%"


# %% [markdown]
# ## One device

# %%
print("--- one device")
losses, accuracy = train(None)

# %% [markdown]
# ## Data parallelism
#
# All weights are replicated, and each batch is sharded over all devices.

# %%
compare(kd.DataParallel())

# %% [markdown]
# ## Model parallelism
#
# Each batch is sharded over two groups of devices, and two layers over the devices of a group.

# %%
groups = 2 if kd.get_device_count() % 2 == 0 else 1
mesh = kd.DeviceMesh((groups, kd.get_device_count() // groups), ["data", "model"])
layout_map = kd.LayoutMap(mesh)
layout_map["up/kernel"] = (None, "model")
layout_map["up/bias"] = ("model",)
layout_map["down/kernel"] = ("model", None)
compare(kd.ModelParallel(layout_map=layout_map, batch_dim_name="data"))

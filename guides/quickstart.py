"""Trains on handwritten digits three times: on one device, under data parallelism, and under model parallelism.

The three trainings have the same losses. scikit-learn's 1,797 images are not divisible by any mesh of 2 to 8 devices.
With a single device, eight CPU devices are simulated.

Run: python guides/quickstart.py
"""

import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd

count = subprocess.check_output([sys.executable, "-c", "import jax; print(jax.device_count())"], text=True)
if int(count) == 1:
    kd.simulate_devices(8)  # before anything else starts JAX

import keras  # noqa: E402
import numpy as np  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402

EPOCHS, BATCH = 20, 64


def load_data():
    """Returns training and test images, float32 in [0, 1] of shape (rows, 64), and their digits."""
    digits = load_digits()
    images = digits.data.astype("float32") / 16
    return train_test_split(images, digits.target, test_size=0.2, random_state=42, stratify=digits.target)


def build() -> keras.Model:
    """Returns a compiled model, which does not depend on a distribution."""
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


def data_parallel() -> kd.Distribution:
    """Replicates all weights, and shards each batch over all devices."""
    return kd.DataParallel()


def model_parallel() -> kd.Distribution:
    """Shards each batch over two groups of devices, and two layers over the devices of a group."""
    groups = 2 if kd.get_device_count() % 2 == 0 else 1
    mesh = kd.DeviceMesh((groups, kd.get_device_count() // groups), ["data", "model"])
    layout_map = kd.LayoutMap(mesh)
    layout_map["up/kernel"] = (None, "model")
    layout_map["up/bias"] = ("model",)
    layout_map["down/kernel"] = ("model", None)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


def train(distribution, data) -> tuple[list[float], float]:
    """Trains under a distribution (None: one device) and returns the loss of each epoch and the test accuracy."""
    train_images, test_images, train_digits, test_digits = data
    kd.set_distribution(distribution)
    model = build()
    if distribution is not None:
        show(distribution.device_mesh, model)
    history = model.fit(train_images, train_digits, batch_size=BATCH, epochs=EPOCHS)
    _, accuracy = model.evaluate(test_images, test_digits, verbose=0)
    kd.set_distribution(None)
    return history.history["loss"], accuracy


def show(mesh: kd.DeviceMesh, model: keras.Model) -> None:
    """Prints the mesh and the shape of each variable on one device."""
    axes = " x ".join(f"{name}:{size}" for name, size in mesh.axis_sizes.items())
    print(f"mesh {axes}: {mesh.devices.tolist()}")
    print(f"{'variable':34} {'shape':>12} {'on a device':>12}  layout")
    for variable in model.variables:
        sharding, shape = variable.value.sharding, tuple(variable.shape)
        layout = "replicated" if sharding.is_fully_replicated else f"sharded as {sharding.spec}"
        print(f"{variable.path:34} {shape!s:>12} {sharding.shard_shape(shape)!s:>12}  {layout}")


def main() -> None:
    """Trains three times and compares the losses."""
    data = load_data()
    print("--- one device")
    losses, accuracy = train(None, data)
    for make in (data_parallel, model_parallel):
        distribution = make()
        print(f"\n--- {type(distribution).__name__}")
        sharded_losses, sharded_accuracy = train(distribution, data)
        difference = np.max(np.abs(np.array(sharded_losses) / np.array(losses) - 1))
        print(f"test accuracy {sharded_accuracy:.1%} (one device: {accuracy:.1%})")
        print(f"largest relative difference from the losses on one device over {EPOCHS} epochs: {difference:.1e}")
        if difference > 1e-5 or sharded_accuracy < 0.97:
            sys.exit("the losses differ by more than 1e-5, or the accuracy is below 97%")


if __name__ == "__main__":
    main()

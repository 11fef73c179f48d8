"""Meshes from a laptop to two slices of 256 chips, and the benefit of ordering devices.

Communication between neighbors along a mesh axis goes around a ring of its devices. Each step around the ring takes as
long as its longest link, which depends on the positions of the devices in the hardware. The clusters below consist of
mock devices, so this runs anywhere.

Run: python guides/meshes.py
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd

kd.simulate_devices(8)  # before anything else starts JAX

import keras  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402


def train_on_a_laptop() -> None:
    """Creates the same mesh from every form of axes, and trains a model on it."""
    print("--- on a laptop")
    mesh = kd.create_device_mesh("data:2,model:-1")  # -1 stands for the remaining devices
    assert mesh == kd.create_device_mesh({"data": 2, "model": 4})
    assert mesh == kd.create_device_mesh([("data", 2), ("model", 4)])
    assert mesh == kd.create_device_mesh((2, 4), axis_names=["data", "model"])
    print(mesh.picture())

    layout_map = kd.LayoutMap(mesh)
    layout_map["up/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", None)
    digits = load_digits()
    with kd.ModelParallel(layout_map=layout_map, batch_dim_name="data").scope():
        model = keras.Sequential(
            [keras.layers.Dense(128, "relu", name="up"), keras.layers.Dense(10, "softmax", name="down")]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        history = model.fit(digits.data / 16, digits.target, epochs=5, batch_size=64, verbose=0).history
    print(f"digits, training accuracy after 5 epochs: {history['accuracy'][-1]:.3f}")

    try:
        kd.create_device_mesh("data:3,model:4")
    except ValueError as error:
        print(error)
    print("a mesh of some devices:", kd.create_device_mesh("data:4", devices=4))


# The name of the cluster, its devices in JAX's order, and the axes of a mesh.
CLUSTERS = [
    ("TPU v3, 4 chips of 2 cores", kd.mock_tpus("v3:2x2"), "data:8"),
    ("TPU v5p, 4 x 4 x 4 chips", kd.mock_tpus("v5p:4x4x4"), "data:4,model:16"),
    ("TPU v5p, 4 x 4 x 4 chips", kd.mock_tpus("v5p:4x4x4"), "data:2,fsdp:8,model:4"),
    ("TPU v5e, 16 x 16 chips", kd.mock_tpus("v5e:16x16"), "data:32,model:8"),
    ("TPU v5e, 16 x 16 chips", kd.mock_tpus("v5e:16x16"), "fsdp:256"),
    ("16 hosts of 8 GPUs", kd.mock_gpus(16, 8), "data:16,model:8"),
    ("2 slices of TPU v5e, 16 x 16 chips", kd.mock_tpus("v5e:16x16", slices=2), "data:8,fsdp:16,model:4"),
    ("4 slices of TPU v5p, 4 x 4 x 4 chips", kd.mock_tpus("v5p:4x4x4", slices=4), "data:2,fsdp:32,model:4"),
]


def compare_orders() -> None:
    """Prints the longest link on the rings of each axis, in JAX's order and in that of create_device_mesh.

    JAX's mesh_utils assigns chips to axes, beginning with the innermost, so that axes share as few links as possible.
    An outer axis can then have a longer link than in JAX's order (data:32). create_device_mesh makes each axis run
    around its chips in a ring of short links.
    """
    print("\n--- the longest link on the rings of each axis, in JAX's order and from create_device_mesh")
    for cluster, devices, axes in CLUSTERS:
        listed = kd.DeviceMesh(axes, devices=devices).info()["longest_link"]
        ordered = kd.create_device_mesh(axes, devices).info()["longest_link"]
        links = ", ".join(f"{axis}: {listed[axis]} -> {ordered[axis]}" for axis in listed)
        print(f"{cluster:38} {axes:24} {links}")


def choose_axes_across_slices() -> None:
    """Shows which axes cross the network between slices, and how to choose them."""
    print("\n--- two slices of 256 chips: axes that cross the network")
    devices = kd.mock_tpus("v5e:16x16", slices=2)
    axes = "data:8,fsdp:16,model:4"
    for dcn in (None, "fsdp", {"model": 2}):
        links = kd.create_device_mesh(axes, devices, dcn=dcn).info()["longest_link"]
        print(f"dcn={dcn!s:14}", ", ".join(f"{axis}: {link}" for axis, link in links.items()))
    print(kd.create_device_mesh(axes, devices).picture())


if __name__ == "__main__":
    train_on_a_laptop()
    compare_orders()
    choose_axes_across_slices()

# %% [markdown]
# # Meshes, from a laptop to two slices of 256 chips
#
# Communication between neighbors along a mesh axis goes around a ring of its devices. Each step around the ring takes
# as long as its longest link, which depends on the positions of the devices in the hardware. The clusters below consist
# of mock devices, so this runs anywhere.

# %%
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd

kd.simulate_devices(8)  # before anything else starts JAX

import keras
from sklearn.datasets import load_digits

IN_NOTEBOOK = "ipykernel" in sys.modules


def show(mesh: kd.DeviceMesh) -> None:
    """Displays the table of a mesh in a notebook, and prints it in a script."""
    if IN_NOTEBOOK:
        from IPython.display import display

        display(mesh)
    else:
        print(mesh.picture())


# %% [markdown]
# ## On a laptop
#
# All forms of axes create the same mesh. The size -1 stands for the remaining devices.

# %%
mesh = kd.create_device_mesh("data:2,model:-1")
assert mesh == kd.create_device_mesh({"data": 2, "model": 4})
assert mesh == kd.create_device_mesh([("data", 2), ("model", 4)])
assert mesh == kd.create_device_mesh((2, 4), axis_names=["data", "model"])
show(mesh)

# %% [markdown]
# A tensor whose dims are sharded over all axes has one shard on each device:

# %%
shards = kd.visualize((8, 64), kd.TensorLayout(("data", "model"), mesh))
if IN_NOTEBOOK:
    from IPython.display import display

    display(shards.figure())
else:
    print(shards)

# %% [markdown]
# A model is trained on it:

# %%
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

# %% [markdown]
# If the axes do not fit, an error is raised. A mesh may have only some of the devices:

# %%
try:
    kd.create_device_mesh("data:3,model:4")
except ValueError as error:
    print(error)
print(kd.create_device_mesh("data:4", devices=4))

# %% [markdown]
# ## The order of devices
#
# The next cell prints the longest link on the rings of each axis, in JAX's order of devices and in the order of
# `create_device_mesh`.
#
# JAX's `mesh_utils` assigns chips to axes, beginning with the innermost, so that axes share as few links as possible.
# An outer axis can then have a longer link than in JAX's order (`data:32`). `create_device_mesh` makes each axis run
# around its chips in a ring of short links.

# %%
CLUSTERS = [  # its name, its devices in JAX's order, and the axes of a mesh
    ("TPU v3, 4 chips of 2 cores", kd.mock_tpus("v3:2x2"), "data:8"),
    ("TPU v5p, 4 x 4 x 4 chips", kd.mock_tpus("v5p:4x4x4"), "data:4,model:16"),
    ("TPU v5p, 4 x 4 x 4 chips", kd.mock_tpus("v5p:4x4x4"), "data:2,fsdp:8,model:4"),
    ("TPU v5e, 16 x 16 chips", kd.mock_tpus("v5e:16x16"), "data:32,model:8"),
    ("TPU v5e, 16 x 16 chips", kd.mock_tpus("v5e:16x16"), "fsdp:256"),
    ("16 hosts of 8 GPUs", kd.mock_gpus(16, 8), "data:16,model:8"),
    ("2 slices of TPU v5e, 16 x 16 chips", kd.mock_tpus("v5e:16x16", slices=2), "data:8,fsdp:16,model:4"),
    ("4 slices of TPU v5p, 4 x 4 x 4 chips", kd.mock_tpus("v5p:4x4x4", slices=4), "data:2,fsdp:32,model:4"),
]
for cluster, devices, axes in CLUSTERS:
    listed = kd.DeviceMesh(axes, devices=devices).info()["longest_link"]
    ordered = kd.create_device_mesh(axes, devices).info()["longest_link"]
    links = ", ".join(f"{axis}: {listed[axis]} -> {ordered[axis]}" for axis in listed)
    print(f"{cluster:38} {axes:24} {links}")

# %% [markdown]
# The notebook draws the ring of `fsdp:256` through the chips of a slice:

# %%
if IN_NOTEBOOK:
    from matplotlib import pyplot

    chips = kd.mock_tpus("v5e:16x16")
    meshes = {
        "JAX's order of devices": kd.DeviceMesh("fsdp:256", devices=chips),
        "create_device_mesh": kd.create_device_mesh("fsdp:256", chips),
    }
    _, pictures = pyplot.subplots(1, 2, figsize=(9, 4.8), layout="constrained")
    for axes, (title, mesh) in zip(pictures, meshes.items(), strict=True):
        ring = [*mesh.devices, mesh.devices[0]]
        axes.plot([chip.coords[0] for chip in ring], [chip.coords[1] for chip in ring], ".-", linewidth=1)
        longest = mesh.info()["longest_link"]["fsdp"]
        axes.set(title=f"{title}, longest link {longest}", xlabel="x of the chip", ylabel="y of the chip", aspect=1)
    pyplot.show()

# %% [markdown]
# ## Two slices of 256 chips
#
# By default the outermost axis crosses the network between the slices. The argument `dcn` selects other axes.

# %%
devices = kd.mock_tpus("v5e:16x16", slices=2)
axes = "data:8,fsdp:16,model:4"
for dcn in (None, "fsdp", {"model": 2}):
    links = kd.create_device_mesh(axes, devices, dcn=dcn).info()["longest_link"]
    print(f"dcn={dcn!s:14}", ", ".join(f"{axis}: {link}" for axis, link in links.items()))

# %%
show(kd.create_device_mesh(axes, devices))

# %% [markdown]
# # Train a vision model in mixed precision
#
# A residual network learns to read handwritten digits. Its augmentation, its batch normalization and its losses are
# those of one device. Before that, plans show what such a network for photos costs on a TPU: in float32, in mixed
# precision, and with augmentation on the devices.

# %%
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import functools
import importlib.util
import math
import sys

import keras_dist as kd

kd.simulate_devices(8)  # leave it out where there are accelerators

import jax
import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

ROWS = 96  # images in a batch

# %% [markdown]
# ## The model
#
# Random rotations, translations and zooms can be layers of the model. Then the devices change the images, each its own
# shard of the batch. Keras does not compile a model with these layers, because TensorFlow's compiler lacks one of their
# operations. JAX's has it, so set `supports_jit = True`. Otherwise `fit` warns, and runs each operation by itself.


# %%
def augmentation(strength: float) -> keras.Sequential:
    """Returns layers that change images at random in training, and in no other step."""
    shift = layers.RandomTranslation(strength, strength)
    members = [layers.RandomRotation(strength / 2), shift, layers.RandomZoom(strength)]
    for layer in members:
        layer.supports_jit = True
    return keras.Sequential(members, name="augmentation")


def residual_block(x, width: int, strides: int):
    """Returns the output of two convolutions with batch normalization, added to the input."""
    y = x
    for stride in (strides, 1):
        y = layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(layers.ReLU()(y))
        y = layers.BatchNormalization(momentum=0.9)(y)
    if strides > 1:
        x = layers.Conv2D(width, 1, strides)(x)
    return layers.Add()([x, y])


def residual_network(
    size: int,
    channels: int,
    classes: int,
    widths: tuple[int, ...],
    policy: str = "float32",
    augmented: bool = True,
    learning_rate=3e-3,
) -> keras.Model:
    """Returns a compiled network for images of size x size pixels, with one block of each width."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((size, size, channels))
    x = augmentation(0.1)(inputs) if augmented else inputs
    x = layers.Conv2D(widths[0], 3, 1 if size < 64 else 4, padding="same")(x)
    for number, width in enumerate(widths):
        x = residual_block(x, width, 1 if number == 0 else 2)
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(x))
    outputs = layers.Dense(classes, dtype="float32")(x)  # a loss needs more digits than bfloat16 has
    keras.config.set_dtype_policy("float32")
    model = keras.Model(inputs, outputs, name="residual_network")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])
    return model


# %% [markdown]
# ## What photos would need
#
# These are plans of one step with 512 photos of 224 x 224 pixels on a TPU with eight chips, which need not be attached.
# With `mixed_bfloat16`, layers compute in 16 bits, while weights, optimizer state and moving averages stay in float32.
# A T4 has no bfloat16. Use `mixed_float16` there: Keras then scales the loss, so that small gradients do not vanish.

# %%
if importlib.util.find_spec("libtpu") is None:
    print("v5e:8: not planned, since libtpu is not installed")
else:
    devices = kd.target("v5e:8")
    data_parallel = kd.DataParallel(kd.create_device_mesh({"data": len(devices)}, devices=devices))
    photos = jax.ShapeDtypeStruct((512, 224, 224, 3), "float32"), jax.ShapeDtypeStruct((512,), "int32")
    variants = {
        "float32": {"augmented": False},
        "bfloat16": {"augmented": False, "policy": "mixed_bfloat16"},
        "bfloat16, augmented": {"policy": "mixed_bfloat16"},
    }
    network = functools.partial(residual_network, 224, 3, 1000, (64, 128, 256))
    plans = {
        name: kd.plan(functools.partial(network, **variant), data_parallel, photos)
        for name, variant in variants.items()
    }
    print(kd.compare(**plans))

# %% [markdown]
# Mixed precision needs about half as much memory for activations, and sends about half as many bytes of gradients.
# Augmentation by these layers costs more than the network: each pixel of a rotated image is read from a place that
# depends on the angle, and a TPU reads single numbers slowly. For photos, rotate in the data pipeline, on the host, and
# leave what is cheap, such as `RandomFlip`, in the model.
#
# ## Data
#
# The digits of scikit-learn are so small that augmentation on the devices costs little. They are enlarged from 8 x 8 to
# 16 x 16 pixels.

# %%
digits = load_digits()
images = (digits.images / 16).repeat(2, axis=1).repeat(2, axis=2)[..., None].astype("float32")
labels = digits.target.astype("int32")
TRAIN = 1430  # images to learn from; the last batch has 86, which 8 devices do not divide
train, test = (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])

if "ipykernel" in sys.modules:
    from matplotlib import pyplot

    augmented = np.asarray(augmentation(0.1)(images[:10], training=True))
    figure, rows = pyplot.subplots(2, 10, figsize=(10, 2.2))
    for row, shown in zip(rows, (images, augmented), strict=True):
        for axes, image in zip(row, shown, strict=False):
            axes.imshow(image[..., 0], cmap="gray_r")
            axes.axis("off")
    figure.suptitle("Digits, and the same digits after augmentation")
    pyplot.show()

# %% [markdown]
# ## One device or eight: the same training
#
# Random layers draw for the global batch, so an image is rotated by the same angle however many devices there are.
# `BatchNormalization` computes mean and variance of the global batch, too. So losses and moving averages are those of
# one device, up to rounding, also for the last batch of an epoch. The learning rate is small here, because a large one
# amplifies differences of rounding.

# %%
digits_network = functools.partial(residual_network, 16, 1, 10, (16, 32, 64))

results = {}
for name, distribution in {
    "one device": None,
    "DataParallel": kd.DataParallel(),
    "FSDP": kd.FullyShardedDataParallel(),
}.items():
    kd.set_distribution(distribution)
    model = digits_network(learning_rate=1e-4)
    loss = model.fit(*train, ROWS, shuffle=False, verbose=0).history["loss"][0]
    averages = np.concatenate([np.ravel(v.numpy()) for v in model.non_trainable_variables if "moving" in v.path])
    results[name] = loss, averages
    expected, own = results["one device"]
    print(f"{name:12} loss {loss:.6f}, largest difference of moving averages {abs(averages - own).max():.1e}")
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(averages, own, rtol=1e-3, atol=1e-3)

# %% [markdown]
# ## Training in mixed precision
#
# The last layer computes in float32, and so does the loss. The rest of the program is as before.

# %%
kd.set_distribution(kd.FullyShardedDataParallel())
EPOCHS = 10
schedule = keras.optimizers.schedules.CosineDecay(5e-3, EPOCHS * math.ceil(TRAIN / ROWS))
model = digits_network(policy="mixed_bfloat16", learning_rate=schedule)
history = model.fit(*train, ROWS, epochs=EPOCHS, verbose=0).history
print("losses:", *(f"{loss:.2f}" for loss in history["loss"]))
_, accuracy = model.evaluate(*test, ROWS, verbose=0)
print(f"test accuracy: {accuracy:.1%}")
assert accuracy > 0.9, "the network does not learn"
kernel = max(model.trainable_variables, key=lambda weight: weight.value.nbytes)
shard = kernel.value.sharding.shard_shape(kernel.shape)
print(f"largest weight: {kernel.dtype} {kernel.shape}, shard of a device {shard}")
print(f"layers compute in {sorted({layer.compute_dtype for layer in model.layers})}")
kd.set_distribution(None)

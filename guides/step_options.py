# %% [markdown]
# # Step options: equal losses, and what each option costs
#
# Residual blocks are trained on handwritten digits with each step option. The table compares the temporaries, the bytes
# sent and the FLOP of the compiled step on one of eight simulated devices.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd

kd.simulate_devices(8)

import keras
from sklearn.datasets import load_digits

ROWS, BLOCKS, WIDTH = 1024, 4, 128


def build() -> keras.Model:
    """Returns a compiled model of residual blocks, which knows nothing of the options."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((64,))
    x = keras.layers.Dense(WIDTH)(inputs)
    for _ in range(BLOCKS):
        y = keras.layers.Dense(4 * WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(WIDTH)(y)])
    model = keras.Model(inputs, keras.layers.Dense(10)(x), name="digits")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# %% [markdown]
# `microbatches` splits the batch inside of the compiled step, `remat` computes blocks again for the backward pass. Both
# need less memory for temporaries. Gradients are reduced once per step, unless `reduce_gradients` says otherwise.

# %%
OPTIONS = [
    kd.StepOptions(),
    kd.StepOptions(microbatches=4),
    kd.StepOptions(microbatches=4, reduce_gradients="microbatch"),
    kd.StepOptions(remat="full"),
    kd.StepOptions(microbatches=4, remat="full"),
]
digits = load_digits()
images, labels = digits.data.astype("float32") / 16, digits.target.astype("int32")
fsdp = kd.FullyShardedDataParallel()
print("last of 3 losses, temporaries, bytes sent and FLOP of a device")
for options in OPTIONS:
    distribution = fsdp.with_step_options(options)
    with distribution.scope():
        losses = build().fit(images, labels, ROWS, epochs=3, shuffle=False, verbose=0).history["loss"]
    plan = kd.plan(build, distribution, (images[:ROWS], labels[:ROWS]))
    print(
        f"{losses[-1]:.4f} {plan.memory.temporaries / 2**20:6.2f} MiB {plan.wire_bytes / 2**20:6.2f} MiB "
        f"{plan.flops / 1e9:.2f} GFLOP  {options}"
    )

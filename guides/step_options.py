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

import jax
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
# `microbatches` splits the batch inside of the compiled step, which needs less memory for temporaries. By default,
# gradients are reduced once per step. With `reduce_gradients="microbatch"` they are reduced in each microbatch, which
# sends more bytes.
#
# `remat` computes blocks again for the backward pass. This takes more FLOP, but activations need not be stored. On the
# simulated CPU devices of this guide, it saves memory since JAX 0.12.

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
temporaries, flops = [], []
print("loss of epoch 3; temporaries, bytes sent and FLOP of one device; options")
for options in OPTIONS:
    distribution = fsdp.with_step_options(options)
    with distribution.scope():
        losses = build().fit(images, labels, ROWS, epochs=3, shuffle=False, verbose=0).history["loss"]
    plan = kd.plan(build, distribution, (images[:ROWS], labels[:ROWS]))
    temporaries.append(plan.memory.temporaries / 2**20)
    flops.append(plan.flops / 1e9)
    figures = f"{temporaries[-1]:8.2f} MiB {plan.wire_bytes / 2**20:8.2f} MiB {flops[-1]:5.2f} GFLOP"
    print(f"{losses[-1]:.4f} {figures}  {options}")

assert temporaries[1] < temporaries[0], "microbatches need as much memory"
assert flops[3] > flops[0], "remat computes nothing again"
assert jax.__version_info__ < (0, 12) or temporaries[3] < temporaries[0], "remat needs as much memory"

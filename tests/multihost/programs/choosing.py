"""Plans a model, lets `auto` choose for all processes, and trains with the choice."""

import keras
import numpy as np
from keras import layers

import keras_dist as kd

_random = np.random.default_rng(0)
TOKENS, TARGETS = _random.integers(0, 64, (16, 16)), _random.integers(0, 64, (16, 16))


def build() -> keras.Model:
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(64, 128, name="embedding")(tokens)
    x = layers.Dense(128, name="down")(layers.Dense(512, activation="relu", name="up")(x))
    model = keras.Model(tokens, layers.Dense(64, name="head")(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def chosen() -> dict:
    """Returns the choice, the bytes of its plan, and the losses of training with it."""
    choice = kd.auto(build, (TOKENS, TARGETS), trials=3)
    kd.set_distribution(choice.distribution)
    keras.utils.set_random_seed(0)
    losses = build().fit(TOKENS, TARGETS, batch_size=16, epochs=3, shuffle=False, verbose=0).history["loss"]
    kd.set_distribution(None)
    meshes = [dict(trial.candidate.axes) for trial in choice.trials]
    planned = kd.plan(build, choice.distribution, (TOKENS, TARGETS))
    return {
        "source": choice.to_source(),
        "outcomes": [trial.outcome for trial in choice.trials],
        "most of a process": max(mesh.get("model", 1) * mesh.get("context", 1) for mesh in meshes),
        "memory": planned.memory.total,
        "planned": choice.plan.memory.total,
        "losses": losses,
    }

"""A model of sequences, trained under context parallelism with devices of one process or of several."""

import keras
import numpy as np
from keras import layers

import keras_dist as kd

ROWS, BATCH, LENGTHS, WIDTH = 11, 4, (8, 9), 8  # the last batch has 3 rows; four devices divide one of the lengths

_random = np.random.default_rng(0)
TOKENS = _random.integers(0, 16, (ROWS, max(LENGTHS)))
TARGETS = _random.integers(0, 16, (ROWS, max(LENGTHS)))

# Axes, outermost first: with two processes, the devices that share a sequence are of one process, or of both.
MESHES = {"context in a process": ("data", "context"), "context over processes": ("context", "data")}


def distribution(name: str, is_whole: bool) -> kd.Distribution:
    sizes = {"data": 2, "context": 4}
    names = MESHES[name]
    mesh = kd.DeviceMesh([sizes[axis] for axis in names], names)
    layout_map = kd.LayoutMap(mesh)
    return kd.ModelParallel(
        layout_map=layout_map, batch_dim_name="data", sequence_dim_name="context", auto_shard_dataset=is_whole
    )


def trained(name: str, is_whole: bool, length: int) -> dict:
    """Returns the numbers of a model that is passed the whole batches, or this process's part of each."""
    rows = []
    for start in range(0, ROWS, BATCH):
        size, count, me = min(BATCH, ROWS - start), kd.num_processes(), kd.process_id()
        first, last = (0, size) if is_whole else (size * me // count, size * (me + 1) // count)
        rows.append(slice(start + first, start + last))
    batches = [(TOKENS[part, :length], TARGETS[part, :length]) for part in rows]
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with distribution(name, is_whole).scope():
        tokens = keras.Input((length,), dtype="int32")
        x = layers.Embedding(16, WIDTH)(tokens)
        x = layers.Conv1D(WIDTH, 3, padding="same", activation="tanh")(x)
        model = keras.Model(tokens, layers.Dense(16)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"])
        fitted = model.fit((batch for batch in batches), steps_per_epoch=len(batches), verbose=0).history
        predicted = [model.predict_on_batch(batch[0]).tolist() for batch in batches]
        return {"fit": fitted, "predict": predicted, "weights": [weight.tolist() for weight in model.get_weights()]}


def everything() -> dict:
    """Returns the numbers of all meshes, ways to pass data, and lengths."""
    return {
        f"{name}, {'whole' if is_whole else 'parts'}, {length}": trained(name, is_whole, length)
        for name in MESHES
        for is_whole in (True, False)
        for length in LENGTHS
    }

"""Data: one dataset by tf.data, Grain and PyDataset on several processes, and sequences packed into rows.

A small language model is trained on docstrings of Python's standard library. The guide runs itself as two processes
with four simulated devices each, and compares their losses with those of one process with eight. Then it compares
packed rows with one document a row: the share of padding, the tokens per second, and the loss of each document.

Run: pip install ".[guides]" && python guides/data.py (with TensorFlow installed, it reads by tf.data, too)
"""

import ast
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd

LENGTH, BATCH, ROWS = 256, 16, 45  # 45 rows: the last of 3 batches has 13, which 8 devices do not divide
MODULES = ["calendar", "csv", "functools", "heapq", "random", "shlex", "statistics", "textwrap"]


# --- 1. The corpus: a document is a docstring, as bytes. A document of n bytes has n - 1 inputs, and as many targets.


def documents() -> list[dict]:
    import numpy as np

    texts = []
    for name in MODULES:
        path = pathlib.Path(sysconfig.get_path("stdlib"), name)
        tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8"))
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef
        texts += [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    encoded = [text.encode("ascii", "replace")[: LENGTH + 1] for text in texts if text and len(text) > 20]
    tokens = [np.frombuffer(each, "uint8").astype("int32") for each in encoded]
    return [{"tokens": each[:-1], "targets": each[1:]} for each in tokens]


# --- 2. Packing. Grain fills rows of a fixed length with whole documents. It adds two arrays to each feature: the id of
# the document that a position belongs to (0: padding), and the position in that document.


def packed(source: list[dict]) -> dict:
    """Returns rows, as arrays (rows, LENGTH), into which documents are packed in order."""
    import grain
    import numpy as np

    lengths = {"tokens": LENGTH, "targets": LENGTH}
    rows = grain.experimental.FirstFitPackIterDataset(
        grain.MapDataset.source(source).to_iter_dataset(),
        length_struct=lengths,
        num_packing_bins=32,
        shuffle_bins=False,
    )
    rows = [
        {
            "tokens": row["tokens"],
            "segments": row["tokens_segment_ids"],
            "positions": row["tokens_positions"],
            "targets": row["targets"],
            "weights": (row["targets_segment_ids"] > 0).astype("float32"),
        }
        for row in rows
    ]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def one_a_row(source: list[dict]) -> dict:
    """Returns rows of one document each, with padding after it."""
    import numpy as np

    parts = [packed([document]) for document in source]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def as_batch(rows: dict) -> tuple[dict, object, object]:
    """Returns inputs, targets and weights as `fit` takes them: padding has no weight."""
    return {name: rows[name] for name in ("tokens", "segments", "positions")}, rows["targets"], rows["weights"]


# --- 3. The model. A position attends to earlier positions of its own document. Attention recognizes the mask from the
# operations that create it, and passes it to the TPU's kernel as segment ids, so that no array (rows, LENGTH, LENGTH)
# is created there.


def build():
    import keras
    from keras import layers, ops

    keras.utils.set_random_seed(1)
    inputs = {name: keras.Input((LENGTH,), dtype="int32", name=name) for name in ("tokens", "segments", "positions")}
    segments, order = inputs["segments"], ops.arange(LENGTH)
    same = ops.equal(ops.expand_dims(segments, 2), ops.expand_dims(segments, 1))
    mask = ops.logical_and(same, ops.expand_dims(order, 1) >= ops.expand_dims(order, 0))
    x = layers.Embedding(128, 64)(inputs["tokens"]) + layers.Embedding(LENGTH, 64)(inputs["positions"])
    y = layers.LayerNormalization()(x)
    x += layers.MultiHeadAttention(4, 16)(y, y, attention_mask=mask)
    x += layers.Dense(64)(layers.Dense(256, "gelu")(layers.LayerNormalization()(x)))
    model = keras.Model(inputs, layers.Dense(128)(layers.LayerNormalization()(x)))
    model.compile(keras.optimizers.SGD(0.3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# --- 4. Three ways to read the same rows. If each process reads its own rows, `shard` is (index of the process, number
# of processes). If each reads all rows, it is (0, 1). In both cases a global batch has the same BATCH rows.


def by_tf_data(rows: dict, shard: tuple[int, int]):
    import tensorflow as tf

    index, count = shard
    return tf.data.Dataset.from_tensor_slices(as_batch(rows)).shard(count, index).batch(BATCH // count)


def by_grain(rows: dict, shard: tuple[int, int]):
    import grain

    index, count = shard
    examples = [as_batch({name: array[row] for name, array in rows.items()}) for row in range(len(rows["tokens"]))]
    return grain.MapDataset.source(examples)[index::count].batch(BATCH // count)


def by_pydataset(rows: dict, shard: tuple[int, int]):
    import keras

    index, count = shard
    own, size = {name: array[index::count] for name, array in rows.items()}, BATCH // count

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-len(own["tokens"]) // size)

        def __getitem__(self, number):
            return as_batch({name: array[number * size : (number + 1) * size] for name, array in own.items()})

    return Batches()


READERS = {"tf.data": by_tf_data, "Grain": by_grain, "PyDataset": by_pydataset}


def train(directory: str) -> None:
    """Trains by each reader, as one of several processes or alone, and writes the losses."""
    kd.initialize(timeout=120)
    # Keras warns where the first epoch of a Grain dataset ends, since it does not ask such a dataset for its length.
    warnings.filterwarnings("ignore", "Your input ran out of data")
    rows, losses = {name: array[:ROWS] for name, array in packed(documents()).items()}, []
    # By default every process passes the same global dataset, and its devices take their rows of each batch. With
    # `auto_shard_dataset=False` each process passes its own rows, and the global batch consists of the rows of all.
    for is_global in (True, False):
        distribution = kd.DataParallel(auto_shard_dataset=is_global)
        kd.set_distribution(distribution)
        shard = (0, 1) if is_global else (distribution.data_shard_id, distribution.num_data_shards)
        model = build()
        initial = model.get_weights()
        for name, reader in READERS.items():
            if name == "tf.data" and importlib.util.find_spec("tensorflow") is None:
                say("tf.data    skipped: TensorFlow is not installed")
                continue
            model.set_weights(initial)
            losses += model.fit(reader(rows, shard), epochs=2, shuffle=False, verbose=0).history["loss"]
            read = len(range(shard[0], ROWS, shard[1]))
            say(f"{name:10} process 0 reads {read} of {ROWS} rows, losses {losses[-2]:.6f} {losses[-1]:.6f}")
    kd.set_distribution(None)
    if kd.process_id() == 0:
        pathlib.Path(directory, f"{kd.num_processes()}.json").write_text(json.dumps(losses))


def say(text: str) -> None:
    """Prints on process 0."""
    if kd.process_id() == 0:
        print(text, flush=True)


# --- 5. Packed rows compared with one document per row: each document has the same loss, in fewer rows.


def compare_packing() -> None:
    kd.simulate_devices(8)

    import numpy as np

    source = documents()
    kd.set_distribution(kd.DataParallel())
    model, losses, padding = build(), {}, {}
    for name, rows in {"packed": packed(source), "one a row": one_a_row(source)}.items():
        inputs, targets, weights = as_batch(rows)
        times = []
        for _ in range(4):  # the first one compiles
            begin = time.perf_counter()
            model.fit(inputs, targets, batch_size=16, sample_weight=weights, verbose=0)
            times.append(time.perf_counter() - begin)
        speed = weights.sum() / min(times)
        padding[name] = 1 - weights.mean()
        print(f"{name:10} {len(weights):4} rows, {padding[name]:5.1%} padding, {speed:6.0f} tokens per second")
    for name, rows in {"packed": packed(source), "one a row": one_a_row(source)}.items():
        logits = model.predict(as_batch(rows)[0], batch_size=16, verbose=0).astype("float64")
        scores = np.take_along_axis(logits, rows["targets"][..., None], -1)[..., 0]
        of_tokens = np.log(np.exp(logits).sum(-1)) - scores
        losses[name] = {}
        for row, ids in enumerate(rows["segments"]):
            for number in range(1, ids.max() + 1):
                document = rows["tokens"][row][ids == number].tobytes(), rows["targets"][row][ids == number].tobytes()
                losses[name][document] = of_tokens[row][ids == number].mean()
    assert losses["packed"].keys() == losses["one a row"].keys()
    difference = max(abs(loss / losses["one a row"][each] - 1) for each, loss in losses["packed"].items())
    print(f"{len(losses['packed'])} different documents, largest relative difference of their losses: {difference:.0e}")
    assert difference < 1e-5
    assert padding["packed"] < 0.1 < padding["one a row"]


def main() -> None:
    directory = tempfile.mkdtemp()
    losses = []
    for processes, devices in ((1, 8), (2, 4)):
        print(f"--- {processes} process{'es' * (processes > 1)} with {devices} devices", flush=True)
        launcher = ["launch", "-n", str(processes), "--devices-per-process", str(devices)]
        subprocess.run([sys.executable, "-m", "keras_dist", *launcher, __file__, "train", directory], check=True)
        losses += json.loads(pathlib.Path(directory, f"{processes}.json").read_text())
    for of_epoch in (losses[::2], losses[1::2]):
        assert max(of_epoch) / min(of_epoch) - 1 < 1e-5, "the losses differ"
    print("all losses are equal to 1e-5\n--- packing", flush=True)
    compare_packing()


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    else:
        main()

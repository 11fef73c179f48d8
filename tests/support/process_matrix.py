"""What one process and several must agree on: a model trained from every kind of data, under every distribution.

The same functions run in the test, on one process with eight simulated devices, and in the processes that it starts.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

import keras_dist as kd

ROWS, BATCH = 26, 7  # batches of 7, 7, 7 and 5 rows: neither 2, 4 nor 8 divides one of them
STARTS = range(0, ROWS, BATCH)

_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, 4)).astype("float32")
Y = _random.normal(size=(ROWS, 3)).astype("float32")
WEIGHT = _random.uniform(0.5, 2, size=ROWS).astype("float32")
CLASS_WEIGHT = {0: 1.0, 1: 3.0, 2: 0.5}  # the class of a row of Y is the index of its largest value


# ------------------------------------------------------------------------------------------------------ distributions


def data_parallel(**options: Any) -> kd.Distribution:
    """Returns eight replicas."""
    return kd.DataParallel(**options)


def model_parallel_across(**options: Any) -> kd.Distribution:
    """Returns two replicas whose rows lie on devices of several processes in turn."""
    mesh = kd.DeviceMesh((4, 2), ["model", "data"])
    layout_map = kd.LayoutMap(mesh)
    layout_map["hidden/kernel"] = (None, "model")
    layout_map["head/kernel"] = ("model", None)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", **options)


def fully_sharded(**options: Any) -> kd.Distribution:
    """Returns weights that are sharded over all devices."""
    return kd.FullyShardedDataParallel(**options)


DISTRIBUTIONS: dict[str, Callable[..., kd.Distribution]] = {
    make.__name__: make for make in (data_parallel, model_parallel_across, fully_sharded)
}


# -------------------------------------------------------------------------------------------------------------- model


def new_model(gradient_accumulation_steps: int | None = None) -> keras.Model:
    """Makes and compiles a model from `X` to `Y`, with state of every kind, and two metrics of one path."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    hidden = layers.Dense(16, activation="tanh", name="hidden")(inputs)
    hidden = layers.Dropout(0.25)(layers.BatchNormalization()(hidden))
    model = keras.Model(inputs, layers.Dense(3, name="head")(hidden))
    optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=gradient_accumulation_steps)
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


class Reset:
    """Brings a model back to where it was, without compiling it again."""

    def __init__(self, model: keras.Model):
        self.model = model
        self.values = [keras.ops.copy(v.value) for v in self._variables()]

    def _variables(self):
        return [*self.model.variables, *self.model.optimizer.variables]

    def __call__(self) -> None:
        keras.utils.set_random_seed(1)
        for variable, value in zip(self._variables(), self.values, strict=True):
            variable.assign(keras.ops.copy(value))


# ------------------------------------------------------------------------------------------------------------ sources


class Source(NamedTuple):
    """Data for `fit`, `evaluate` or `predict`, and the arguments that it needs beside it."""

    x: Any
    y: Any = None
    batch_size: int | None = None
    steps: int | None = None


def local_rows(start: int) -> slice:
    """Returns the rows of the batch that begins at `start` which this process passes as its own part.

    The first processes pass fewer rows than the last. The batches of one process have one size, but for the last.
    """
    rows, count, me = min(BATCH, ROWS - start), kd.num_processes(), kd.process_id()
    ends = [rows * (process + 1) // count for process in range(count)]
    return slice(start + ([0, *ends])[me], start + ends[me])


class Batches(NamedTuple):
    """The batches that a process reads: whole ones, or its own part of each."""

    is_whole: bool

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        parts = [self.rows(start) for start in STARTS]
        return np.concatenate([X[part] for part in parts]), np.concatenate([Y[part] for part in parts])

    def rows(self, start: int) -> slice:
        return slice(start, start + BATCH) if self.is_whole else local_rows(start)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return ((X[self.rows(start)], Y[self.rows(start)]) for start in STARTS)

    @property
    def size(self) -> int:
        return len(X[self.rows(0)])


def numpy_arrays(batches: Batches) -> Source:
    return Source(*batches.arrays(), batches.size)


def jax_arrays(batches: Batches) -> Source:
    return Source(*map(keras.ops.array, batches.arrays()), batches.size)


class _Numbered(keras.utils.PyDataset):
    def __init__(self, batches: Batches):
        super().__init__(workers=1)
        self.batches = list(batches)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def py_dataset(batches: Batches) -> Source:
    return Source(_Numbered(batches))


def generator(batches: Batches) -> Source:
    return Source((batch for _ in itertools.count() for batch in batches), steps=len(STARTS))


def tf_data(batches: Batches) -> Source:
    import tensorflow

    spec = tuple(tensorflow.TensorSpec((None, width), tensorflow.float32) for width in (4, 3))
    return Source(tensorflow.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec))


def grain_dataset(batches: Batches) -> Source:
    import grain

    return Source(grain.MapDataset.source(list(batches)).to_iter_dataset())


def torch_loader(batches: Batches) -> Source:
    import torch.utils.data

    return Source(torch.utils.data.DataLoader(list(batches), batch_size=None))


SOURCES: dict[str, Callable[[Batches], Source]] = {
    make.__name__: make
    for make in (numpy_arrays, jax_arrays, py_dataset, generator, tf_data, grain_dataset, torch_loader)
}


# --------------------------------------------------------------------------------------------------------- what is run


def every_method(model: keras.Model, source: Source) -> dict[str, Any]:
    """Returns the numbers of training, evaluating and predicting with one source."""
    x, y, size, steps = source
    fitted = model.fit(x, y, batch_size=size, steps_per_epoch=steps, epochs=2, shuffle=False, verbose=0)
    evaluated = model.evaluate(x, y, batch_size=size, steps=steps, verbose=0)
    predicted = model.predict(x, batch_size=size, steps=steps, verbose=0)
    return {"fit": fitted.history, "evaluate": evaluated, "predict": predicted.tolist()}


def weights_of_rows(model: keras.Model, reset: Reset) -> dict[str, Any]:
    """Returns the losses with weights of rows and classes, a part for validation, and rows in another order."""
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "verbose": 0}
    results = {}
    for name, more in {
        "sample_weight": {"sample_weight": WEIGHT, "shuffle": False},
        "class_weight": {"class_weight": CLASS_WEIGHT, "shuffle": False},
        "shuffled": {"shuffle": True},
        "shuffled batches": {"shuffle": "batch"},
        "validation_split": {"validation_split": 0.2},
    }.items():
        reset()
        results[name] = model.fit(X, Y, **options, **more).history
    return results


def single_batches(model: keras.Model, reset: Reset, is_whole: bool) -> dict[str, Any]:
    """Returns the numbers of the methods that take one batch."""
    reset()
    x, y = X[Batches(is_whole).rows(0)], Y[Batches(is_whole).rows(0)]
    return {
        "train": [model.train_on_batch(x, y) for _ in range(2)],
        "test": model.test_on_batch(x, y),
        "predict": model.predict_on_batch(x).tolist(),
    }


def saved_and_loaded(model: keras.Model, reset: Reset, folder: str) -> dict[str, Any]:
    """Saves a trained model in every way, loads it, and returns what is predicted before and after."""
    reset()
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    results = {"trained": model.predict(X, verbose=0).tolist()}
    results["weights"] = [weight.tolist() for weight in model.get_weights()]
    file, whole = os.path.join(folder, "model.weights.h5"), os.path.join(folder, "model.keras")
    model.save_weights(file)
    model.save(whole)
    reset()
    model.load_weights(file)
    results["loaded weights"] = model.predict(X, verbose=0).tolist()
    loaded = keras.saving.load_model(whole)
    results["loaded model"] = loaded.predict(X, verbose=0).tolist()
    results["goes on"] = loaded.fit(X, Y, batch_size=BATCH, verbose=0, shuffle=False).history
    return results


def accumulated_gradients(folder: str) -> dict[str, Any]:
    """Returns the losses of a model that is saved and loaded with gradients of some batches of an update."""
    model, file, results = new_model(gradient_accumulation_steps=4), os.path.join(folder, "accumulated.keras"), {}
    for part in ("first", "second"):
        results[part] = model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history
        state = model.get_weights() if part == "second" else [v.numpy() for v in model.optimizer.variables]
        results[f"{part} weights"] = [value.tolist() for value in state]
        model.save(file)
        model = keras.saving.load_model(file)
    return results


def ways_to_pass_batches(distribution: kd.Distribution) -> Iterator[tuple[bool, str]]:
    """Yields whether processes pass whole batches or their parts, and a word for it; the distribution expects that."""
    for is_whole, how in ((True, "whole"), (False, "parts")):
        distribution.auto_shard_dataset = is_whole
        yield is_whole, how
    distribution.auto_shard_dataset = True


def of_sources(name: str, sources: list[str]) -> dict[str, Any]:
    """Returns the numbers of every source under a distribution, given whole batches and parts of them."""
    distribution, results = DISTRIBUTIONS[name](), {}
    with distribution.scope():
        model = new_model()
        reset = Reset(model)
        for is_whole, how in ways_to_pass_batches(distribution):
            for source in sources:
                reset()
                results[f"{name}, {source}, {how}"] = every_method(model, SOURCES[source](Batches(is_whole)))
    return results


def of_methods(name: str, folder: str) -> dict[str, Any]:
    """Returns the numbers under a distribution of what is not read from a source: single batches, saved models."""
    distribution, results = DISTRIBUTIONS[name](), {}
    with distribution.scope():
        model = new_model()
        reset = Reset(model)
        for is_whole, how in ways_to_pass_batches(distribution):
            results[f"{name}, single batches, {how}"] = single_batches(model, reset, is_whole)
        results[f"{name}, saved and loaded"] = saved_and_loaded(model, reset, folder)
        results[f"{name}, accumulated gradients"] = accumulated_gradients(folder)
        if name == "data_parallel":
            results[f"{name}, weights of rows"] = weights_of_rows(model, reset)
            # 7 rows on 8 devices cost a device what 8 rows cost.
            results[f"{name}, flops"] = [kd.plan(new_model, distribution, rows).flops for rows in (BATCH, 8)]
    return results


def everything(sources: dict[str, list[str]], folder: str) -> dict[str, Any]:
    """Returns all numbers; the keys say what each is of. `sources` are those to read under each distribution."""
    results = {}
    for name in sources:
        results |= of_sources(name, sources[name]) | of_methods(name, folder)
    return results

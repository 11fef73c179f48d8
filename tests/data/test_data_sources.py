"""Whatever Keras accepts as data, in batches that no mesh divides, gives the numbers of one device."""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers
from support.slow_cases import crossed, slow, slow_unless

import keras_dist as kd
from keras_dist._keras.data_adapters import STACK_BATCHES

TOLERANCE = 1e-5  # relative to the largest value of an array, and absolute for arrays that are all below 0.1
ROWS, BATCH = 23, 5  # batches of 5, 5, 5, 5 and 3 rows: neither 2, 4 nor 8 devices divide one of them
STARTS = range(0, ROWS, BATCH)

random = np.random.default_rng(0)
X = random.normal(size=(ROWS, 4)).astype("float32")
Y = random.normal(size=(ROWS, 3)).astype("float32")
WEIGHT = random.uniform(0.5, 2, size=ROWS).astype("float32")
# Two values in each row: JAX compiles anew for each number of values in a batch.
SPARSE_X = np.where((np.arange(4) + np.arange(ROWS)[:, None]) % 2 == 0, X, 0)
CLASS_WEIGHT = {0: 1.0, 1: 3.0, 2: 0.5}  # the class of a row of Y is the index of its largest value

TENSORFLOW = "needs TensorFlow, which the extra 'test' of keras-dist brings"
GRAIN = "needs Grain, which the extra 'test' of keras-dist brings"
SCIPY = "needs SciPy, which the extra 'test' of keras-dist brings"
TORCH = "needs PyTorch, the package 'torch'"

# Keras says so where it finds the end of a source without a length, on one device too.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


def data_parallel() -> kd.Distribution:
    """Returns eight replicas."""
    return kd.DataParallel()


def model_parallel() -> kd.Distribution:
    """Returns two replicas of a model that is cut into four parts."""
    layout_map = kd.LayoutMap(kd.DeviceMesh((2, 4), ["data", "model"]))
    layout_map[".*hidden/kernel"] = (None, "model")
    layout_map[".*hidden/bias"] = ("model",)
    layout_map[".*head.*/kernel"] = ("model", None)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


@pytest.fixture(
    params=[data_parallel, slow(model_parallel)],
    ids=["data_parallel", "model_parallel"],
)
def distribution(request) -> kd.Distribution:
    """Gives each distribution in turn, not installed yet."""
    return request.param()


@functools.cache
def on_one_device(run, *arguments) -> dict[str, Any]:
    """Returns the numbers that a function gives without a distribution."""
    assert kd.distribution() is None
    return run(*arguments)


def assert_same_as_on_one_device(distribution: kd.Distribution, run, *arguments):
    """Compares the numbers that a function gives under a distribution with those without one."""
    expected = on_one_device(run, *arguments)
    with distribution.scope():
        actual = run(*arguments)
    keras.tree.assert_same_structure(actual, expected)
    for (path, got), want in zip(keras.tree.flatten_with_path(actual), keras.tree.flatten(expected), strict=True):
        got, want = np.asarray(got, "float64"), np.asarray(want, "float64")
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * max(0.1, np.abs(want).max()), err_msg=str(path))


# ------------------------------------------------------------------------------------------------------- models


def new_process():
    """Sets Keras's names and seeds to those of a new process."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)


def compiled(model: keras.Model, **options) -> keras.Model:
    """Compiles a model with an optimizer that has state."""
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], weighted_metrics=["mae"], **options)
    return model


def one_input(**compile_options) -> keras.Model:
    """Makes a model from `X` to `Y`."""
    new_process()
    stack = [layers.Dense(8, activation="tanh", name="hidden"), layers.Dense(3, name="head")]
    return compiled(keras.Sequential([keras.Input((4,)), *stack]), **compile_options)


def two_inputs_and_outputs(container) -> keras.Model:
    """Makes a model whose inputs and outputs are held in a container of two."""
    new_process()
    first, second = keras.Input((4,), name="first"), keras.Input((3,), name="second")
    hidden = layers.Dense(8, activation="tanh", name="hidden")(layers.Concatenate()([first, second]))
    outputs = [layers.Dense(3, name="head_first")(hidden), layers.Dense(4, name="head_second")(hidden)]
    model = keras.Model(container(first, second), container(*outputs))
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9), container("mse", "mae"), weighted_metrics=container("mae", "mse")
    )
    return model


class Scaled(keras.Model):
    """Takes an array and a number that its output is multiplied by."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3, name="head")

    def call(self, inputs):
        return self.head(inputs["features"]) * inputs["scale"]


def scaled() -> keras.Model:
    """Makes a `Scaled`, which its first batch builds."""
    new_process()
    return compiled(Scaled())


# ------------------------------------------------------------------------------------------------------ sources


class Source(NamedTuple):
    """Data for `fit`, `evaluate` or `predict`, and the arguments that it needs beside it."""

    x: Any
    y: Any = None
    batch_size: int | None = None
    steps: int | None = None


def numpy_arrays() -> Source:
    return Source(X, Y, BATCH)


def jax_arrays() -> Source:
    return Source(jnp.asarray(X), jnp.asarray(Y), BATCH)


def tensorflow_tensors() -> Source:
    tensorflow = pytest.importorskip("tensorflow", reason=TENSORFLOW)
    return Source(tensorflow.constant(X), tensorflow.constant(Y), BATCH)


def torch_tensors() -> Source:
    torch = pytest.importorskip("torch", reason=TORCH)
    return Source(torch.tensor(X), torch.tensor(Y), BATCH)


def scipy_sparse_matrix() -> Source:
    sparse = pytest.importorskip("scipy.sparse", reason=SCIPY)
    return Source(sparse.csr_matrix(SPARSE_X), Y, BATCH)


def tensorflow_dataset() -> Source:
    tensorflow = pytest.importorskip("tensorflow", reason=TENSORFLOW)
    return Source(tensorflow.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH))


def endless_tensorflow_dataset() -> Source:
    return Source(tensorflow_dataset().x.repeat(), steps=7)


def sparse_tensorflow_dataset() -> Source:
    tensorflow = pytest.importorskip("tensorflow", reason=TENSORFLOW)
    rows = tensorflow.sparse.from_dense(SPARSE_X)
    return Source(tensorflow.data.Dataset.from_tensor_slices((rows, Y)).batch(BATCH))


class Batches(keras.utils.PyDataset):
    """The batches of `X` and `Y`."""

    def __len__(self):
        return len(STARTS)

    def __getitem__(self, index):
        rows = slice(STARTS[index], STARTS[index] + BATCH)
        return X[rows], Y[rows]


def py_dataset() -> Source:
    return Source(Batches())


def py_dataset_of_two_workers() -> Source:
    # Without a distribution Keras begins its first epoch with batches that the workers have read to build the model,
    # and leaves out as many of the last ones; the numbers are those of all batches in their order.
    return Source(Batches(workers=1 if kd.distribution() is None else 2, use_multiprocessing=False))


def generator() -> Source:
    sizes = itertools.cycle([5, 3, 7, 1])
    return Source(((X[:size], Y[:size]) for size in sizes), steps=6)


def torch_loader() -> Source:
    torch = pytest.importorskip("torch", reason=TORCH)
    pairs = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return Source(torch.utils.data.DataLoader(pairs, batch_size=BATCH))


def grain_map_dataset() -> Source:
    grain = pytest.importorskip("grain", reason=GRAIN)
    return Source(grain.MapDataset.range(ROWS).map(lambda row: (X[row], Y[row])).batch(BATCH))


def grain_iter_dataset() -> Source:
    return Source(grain_map_dataset().x.to_iter_dataset())


def grain_loader() -> Source:
    grain = pytest.importorskip("grain", reason=GRAIN)
    sampler = grain.samplers.IndexSampler(ROWS, num_epochs=1, shuffle=False, shard_options=grain.sharding.NoSharding())
    pairs, batching = list(zip(X, Y, strict=True)), grain.transforms.Batch(BATCH)
    return Source(grain.DataLoader(data_source=pairs, sampler=sampler, operations=[batching], worker_count=0))


SOURCES = [
    numpy_arrays,
    jax_arrays,
    tensorflow_tensors,
    torch_tensors,
    scipy_sparse_matrix,
    tensorflow_dataset,
    endless_tensorflow_dataset,
    sparse_tensorflow_dataset,
    py_dataset,
    py_dataset_of_two_workers,
    generator,
    torch_loader,
    grain_map_dataset,
    grain_iter_dataset,
    grain_loader,
]


# ----------------------------------------------------------------------------------------------------- what runs


def fit(model: keras.Model, source: Source, **options) -> dict[str, Any]:
    """Trains for two epochs and returns the history and the weights."""
    is_arrays = source.y is not None  # other sources shuffle by themselves, or not at all
    history = model.fit(
        source.x,
        source.y,
        batch_size=source.batch_size,
        steps_per_epoch=source.steps,
        epochs=2,
        shuffle=is_arrays,
        verbose=0,
        **options,
    ).history
    return {"history": history, "weights": weights(model)}


def evaluate(model: keras.Model, source: Source, **options) -> dict[str, Any]:
    """Returns the loss and the metrics."""
    return model.evaluate(
        source.x, source.y, batch_size=source.batch_size, steps=source.steps, return_dict=True, verbose=0, **options
    )


def predict(model: keras.Model, source: Source) -> Any:
    """Returns the predictions."""
    return model.predict(source.x, batch_size=source.batch_size, steps=source.steps, verbose=0)


METHODS = [fit, evaluate, predict]


def weights(model: keras.Model) -> list[np.ndarray]:
    """Returns the weights of a model."""
    return [np.asarray(variable.value) for variable in model.weights]


def run_source(method, source, **compile_options):
    """Runs a method of a new model on a source."""
    return method(one_input(**compile_options), source())


@pytest.mark.parametrize(("source", "method"), crossed(SOURCES, METHODS))
def test_a_data_source_gives_the_numbers_of_one_device(distribution, method, source):
    assert_same_as_on_one_device(distribution, run_source, method, source)


# -------------------------------------------------------------------------------------------- options of a method

FIT_OPTIONS = {
    "sample_weight": {"sample_weight": WEIGHT},
    "class_weight": {"class_weight": CLASS_WEIGHT},
    "validation_data": {"validation_data": (X[::-2], Y[::-2])},
    "validation_data_with_weights": {"validation_data": (X[::-2], Y[::-2], WEIGHT[::-2])},
    "validation_data_of_another_source": {"validation_data": Batches()},
    "validation_split": {"validation_split": 0.3},
    "validation_split_with_weights": {"validation_split": 0.3, "sample_weight": WEIGHT},
    "validation_batch_size": {"validation_data": (X, Y), "validation_batch_size": 7},
}


def fit_with(option):
    """Trains on NumPy arrays with one of the options."""
    return fit(one_input(), numpy_arrays(), **FIT_OPTIONS[option])


FAST_OPTIONS = "class_weight", "validation_data_of_another_source", "validation_split_with_weights"


@pytest.mark.parametrize("option", [slow_unless(name in FAST_OPTIONS, name) for name in FIT_OPTIONS])
def test_an_option_of_fit_gives_the_numbers_of_one_device(distribution, option):
    assert_same_as_on_one_device(distribution, fit_with, option)


def evaluate_with_weights():
    """Evaluates NumPy arrays with sample weights."""
    return evaluate(one_input(), numpy_arrays(), sample_weight=WEIGHT)


def test_sample_weights_of_evaluate_give_the_numbers_of_one_device(distribution):
    assert_same_as_on_one_device(distribution, evaluate_with_weights)


def train_on_batch_with_class_weight():
    """Trains on one batch with weights for classes."""
    model = one_input()
    return model.train_on_batch(X, Y, class_weight=CLASS_WEIGHT, return_dict=True), weights(model)


def test_class_weights_of_train_on_batch_give_the_numbers_of_one_device(distribution):
    assert_same_as_on_one_device(distribution, train_on_batch_with_class_weight)


def run_several_steps(method, source):
    """Runs a method two steps at a time."""
    return run_source(method, source, steps_per_execution=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Batches of 5 rows")  # the last batch
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("source", [numpy_arrays, generator])  # five batches, the last one alone, and six
def test_several_steps_per_execution_give_the_numbers_of_one_device(distribution, method, source):
    assert_same_as_on_one_device(distribution, run_several_steps, method, source)


def run_eagerly(method, source):
    """Runs a method without compilation."""
    return run_source(method, source, run_eagerly=True)


@pytest.mark.parametrize("method", [slow(fit), evaluate, slow(predict)])
def test_an_eager_run_gives_the_numbers_of_one_device(distribution, method):
    assert_same_as_on_one_device(distribution, run_eagerly, method, numpy_arrays)


# ---------------------------------------------------------------------------------------- structures of a batch


def by_name(first, second) -> dict[str, Any]:
    """Holds two things in a dict."""
    return {"first": first, "second": second}


def by_position(first, second) -> list:
    """Holds two things in a list."""
    return [first, second]


def run_two_inputs_and_outputs(method, container):
    """Runs a method on arrays for two inputs and two outputs."""
    source = Source(container(X, Y), container(Y, X), BATCH)
    options = {} if method is predict else {"sample_weight": container(WEIGHT, np.sqrt(WEIGHT))}
    return method(two_inputs_and_outputs(container), source, **options)


@pytest.mark.parametrize(("method", "container"), crossed(METHODS, [by_name, by_position]))
def test_several_inputs_and_outputs_give_the_numbers_of_one_device(distribution, method, container):
    assert_same_as_on_one_device(distribution, run_two_inputs_and_outputs, method, container)


SCALARS = {
    "python_float": 2.5,
    "python_integer": 2,
    "numpy_scalar": np.float32(2.5),
    "numpy_array": np.array(2.5, "float32"),
    "jax_array": jnp.float32(2.5),
}


def single_batch_with_scalar(method, scalar):
    """Runs a method for single batches on a batch that holds an array and a number."""
    model, x = scaled(), {"features": X, "scale": SCALARS[scalar]}
    if method == "predict_on_batch":
        model.train_on_batch(x, Y)  # it takes no Python number while the model is not built
        return model.predict_on_batch(x)
    numbers = getattr(model, method)(x, Y, return_dict=True)
    return numbers, weights(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scalar", "method"), crossed(SCALARS, ["train_on_batch", "test_on_batch", "predict_on_batch"])
)
def test_a_scalar_in_a_single_batch_gives_the_numbers_of_one_device(distribution, method, scalar):
    assert_same_as_on_one_device(distribution, single_batch_with_scalar, method, scalar)


def generator_with_scalar(method, scalar):
    """Runs a method on a generator of batches that hold an array and a number."""
    sizes = itertools.cycle([5, 3])
    batches = (({"features": X[:size], "scale": SCALARS[scalar]}, Y[:size]) for size in sizes)
    return method(scaled(), Source(batches, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize(("scalar", "method"), crossed(SCALARS, METHODS))
def test_a_scalar_from_a_generator_gives_the_numbers_of_one_device(distribution, method, scalar):
    assert_same_as_on_one_device(distribution, generator_with_scalar, method, scalar)


def changing_structure(method, steps_per_execution):
    """Runs a method on a generator whose batches come with, without, and with absent sample weights in turn."""

    def batches():
        for start in itertools.cycle(STARTS[:-1]):
            rows = slice(start, start + BATCH)
            yield X[rows], Y[rows]
            yield X[rows], Y[rows], WEIGHT[rows]
            yield X[rows], Y[rows], None

    model = one_input(steps_per_execution=steps_per_execution)
    return method(model, Source(batches(), steps=7))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "steps_per_execution",
    [
        slow(1),
        pytest.param(2, marks=pytest.mark.skipif(STACK_BATCHES, reason="this Keras cannot, without a distribution")),
    ],
)
def test_batches_of_changing_structure_give_the_numbers_of_one_device(distribution, method, steps_per_execution):
    assert_same_as_on_one_device(distribution, changing_structure, method, steps_per_execution)


def single_batch_without_weights(method):
    """Runs a method for single batches on a batch that has no sample weights."""
    model = one_input()
    return getattr(model, method)(X, Y, sample_weight=None, return_dict=True), weights(model)


@pytest.mark.parametrize("method", [slow("train_on_batch"), "test_on_batch"])
def test_a_single_batch_without_sample_weights_gives_the_numbers_of_one_device(distribution, method):
    assert_same_as_on_one_device(distribution, single_batch_without_weights, method)


def weights_of_one_output(method):
    """Runs a method on arrays with sample weights for one output, and none for the other."""
    source = Source(by_name(X, Y), by_name(Y, X), BATCH)
    return method(two_inputs_and_outputs(by_name), source, sample_weight=by_name(WEIGHT, None))


@pytest.mark.slow
@pytest.mark.parametrize("method", [fit, evaluate])
def test_sample_weights_of_one_output_only_give_the_numbers_of_one_device(distribution, method):
    assert_same_as_on_one_device(distribution, weights_of_one_output, method)

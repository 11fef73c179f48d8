"""Under any distribution a model gives the losses, metrics, predictions and weights that it gives on one device."""

import functools
import itertools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import layers
from support.slow_cases import slow_unless
from support.strategy_models import assert_same_numbers

import keras_dist as kd
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.layout.tensor_layout import axis_tuple

TOLERANCE = 1e-5  # relative to the largest value of an array, and absolute for arrays that are all below 0.1
AXIS_NAMES = ("data", "fsdp", "model")

# Hypothesis tries the first element of every list first, so every list of choices begins with what shards the most.
# Most of the axes divide the widths of the models: 8, 16 and 24.
MESH_SHAPES = [
    *[(2, 2, 2), (2, 4), (4, 2), (2, 3), (3, 2), (8,), (2, 2), (4,), (6,), (3,), (2,), (2, 1, 4), (1, 8), (3, 1, 2)],
    *[(5,), (7,), (1,)],
]

# The draws are equal in every run. Failures are not shrunk, because each attempt would compile for seconds.
compiling = hypothesis.settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)


class SelfAttention(keras.Layer):
    """Self-attention with a residual and a norm, as one layer for a `Sequential`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(num_heads=2, key_dim=8, name="attention")
        self.normalization = layers.LayerNormalization(name="normalization")

    def build(self, shape):
        self.attention.build(shape, shape)
        self.normalization.build(shape)

    def call(self, sequence):
        return self.normalization(sequence + self.attention(sequence, sequence))


class Architecture(NamedTuple):
    """A stack of layers, the shape of one example, a loss and a metric."""

    row: tuple[int, ...]
    stack: tuple
    loss: object = "mse"
    metric: str = "mae"


ARCHITECTURES = {
    "dense": lambda: Architecture(
        row=(8,),
        stack=(
            layers.Dense(24, activation="relu", name="first"),
            layers.Dense(16, activation="tanh", name="second"),
            layers.Dense(8, name="head"),
        ),
    ),
    "convolution": lambda: Architecture(
        row=(6, 6, 2),
        stack=(
            layers.Conv2D(16, 3, padding="same", name="convolution"),
            layers.BatchNormalization(name="normalization"),
            layers.ReLU(),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(8, name="head"),
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metric="accuracy",
    ),
    "mix": lambda: Architecture(
        row=(6, 6, 2),
        stack=(
            layers.Conv2D(8, 3, strides=2, padding="same", name="convolution"),
            layers.BatchNormalization(name="normalization"),
            layers.Reshape((9, 8)),
            SelfAttention(name="block"),
            layers.Dropout(0.3, name="dropout"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(8, name="head"),
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metric="accuracy",
    ),
}


# The names of all architectures; one of them is fast.
NAMES = [slow_unless(name == "dense", name) for name in ARCHITECTURES]


class Case(NamedTuple):
    """The computation, without its distribution."""

    architecture: str
    form: str
    rows: int
    batch_size: int
    weighted: bool
    validation: str
    seed: int


class Placement(NamedTuple):
    """A distribution, and the axes of the variables that it shards."""

    distribution: kd.Distribution
    axes: dict[str, tuple]


def build(architecture: str, form: str) -> tuple[keras.Model, Architecture]:
    """Builds one of the models, with the names that it has in a new process."""
    keras.utils.clear_session(free_memory=False)
    parts = ARCHITECTURES[architecture]()
    if form == "functional":
        inputs = keras.Input(parts.row)
        return keras.Model(inputs, functools.reduce(lambda x, layer: layer(x), parts.stack, inputs)), parts
    first = [keras.Input(parts.row)] if form == "sequential" else []  # without an Input the first batch builds it
    return keras.Sequential([*first, *parts.stack]), parts


def build_compiled(case: Case) -> tuple[keras.Model, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Builds and compiles the model of a case; returns it with inputs, targets and sample weights."""
    keras.utils.set_random_seed(case.seed)
    model, parts = build(case.architecture, case.form)
    # Not Adam: the gradient of a bias before BatchNormalization is zero but for rounding errors, which Adam scales up
    # to a full step. On one device, too, two orders of summation give different numbers then.
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, parts.loss, metrics=[parts.metric], weighted_metrics=[parts.metric])
    random = np.random.default_rng(case.seed)
    x = random.normal(size=(case.rows, *parts.row)).astype("float32")
    y = (
        random.normal(size=(case.rows, 8)).astype("float32")
        if parts.loss == "mse"
        else random.integers(8, size=case.rows)
    )
    # Shuffling and dropout draw from the seed, too, independent of the draws for the weights.
    keras.utils.set_random_seed(case.seed + 1)
    return model, (x, y, random.uniform(0.5, 2, size=case.rows).astype("float32"))


def in_epochs(case: Case) -> tuple[keras.Model, dict[str, object]]:
    """Fits, evaluates and predicts; returns the model and all numbers."""
    model, (x, y, weight) = build_compiled(case)
    weight = weight if case.weighted else None
    options = {
        "none": {},
        "split": {"validation_split": 0.3},
        "data": {"validation_data": (x[::-2], y[::-2]) if weight is None else (x[::-2], y[::-2], weight[::-2])},
    }[case.validation]
    history = model.fit(x, y, case.batch_size, epochs=2, verbose=0, sample_weight=weight, **options).history
    evaluated = model.evaluate(x, y, case.batch_size, verbose=0, sample_weight=weight, return_dict=True)
    predicted = model.predict(x, case.batch_size, verbose=0)
    return model, {"fit": history, "evaluate": evaluated, "predict": predicted}


def in_single_batches(case: Case) -> tuple[keras.Model, dict[str, object]]:
    """Trains, tests, predicts and calls the model on one batch; returns the model and all numbers."""
    model, (x, y, weight) = build_compiled(case)
    weight = weight if case.weighted else None
    return model, {
        "train_on_batch": [model.train_on_batch(x, y, sample_weight=weight, return_dict=True) for _ in range(2)],
        "test_on_batch": model.test_on_batch(x, y, sample_weight=weight, return_dict=True),
        "predict_on_batch": model.predict_on_batch(x),
        "call": model(x),
        "call in training": model(x, training=True),
    }


def with_weights(model: keras.Model, numbers: dict[str, object]) -> dict[str, object]:
    """Returns the numbers of a run together with the weights of the model after it."""
    return numbers | {"weights": {variable.path: np.asarray(variable.value) for variable in model.weights}}


@functools.cache
def on_one_device(run, case: Case) -> dict[str, object]:
    """Returns the numbers of a case without a distribution."""
    assert kd.distribution() is None
    return with_weights(*run(case))


def assert_layouts(model: keras.Model, placement: Placement):
    """Checks that each variable still has the layout of its rule, so the numbers were computed on sharded weights."""
    mesh = placement.distribution.device_mesh
    for variable in model.variables:
        expected = kd.TensorLayout(placement.axes.get(variable.path, ()), mesh).backend_layout
        assert variable.value.sharding.is_equivalent_to(expected, variable.value.ndim), variable.path


def check(run, case: Case, placement: Placement):
    """Runs a case under a distribution and compares it with one device."""
    distribution = placement.distribution
    hypothesis.note(f"{distribution}, batch_dim_name={distribution.batch_dim_name!r}, {placement.axes}")
    expected = on_one_device(run, case)
    with distribution.scope():
        model, numbers = run(case)
    assert_same_numbers(with_weights(model, numbers), expected, TOLERANCE)
    assert_layouts(model, placement)


@functools.cache
def variables_of(architecture: str, form: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights by their paths.

    They do not include the states of random generators, which stay replicated.
    """
    model, parts = build(architecture, form)
    model.build((None, *parts.row))
    return {variable.path: tuple(variable.shape) for variable in model.weights}


@st.composite
def meshes(draw) -> kd.DeviceMesh:
    """Draws a mesh of one to three axes over one to eight devices."""
    shape = draw(st.sampled_from(MESH_SHAPES))
    return kd.DeviceMesh(shape, AXIS_NAMES[: len(shape)], kd.list_devices()[: math.prod(shape)])


@st.composite
def layouts(draw, shape: tuple[int, ...], axis_sizes: dict[str, int]) -> tuple:
    """Draws the axes of a tensor: for each dim None, an axis or a tuple of axes that divides it, each axis once."""
    free, entries = list(axis_sizes), []
    for dim in shape:
        options = [
            names
            for count in range(len(free), -1, -1)
            for names in itertools.permutations(free, count)
            if dim % math.prod(axis_sizes[name] for name in names) == 0
        ]
        names = draw(st.sampled_from(options))
        free = [name for name in free if name not in names]
        entries.append(names if len(names) > 1 else names[0] if names else None)
    return tuple(entries)


@st.composite
def batch_axes(draw, mesh: kd.DeviceMesh):
    """Draws a `batch_dim_name`: a tuple of axes in any order, one axis, or None."""
    tuples = [names for count in (3, 2) for names in itertools.permutations(mesh.axis_names, count)]
    return draw(st.sampled_from([*tuples, *mesh.axis_names, None]))


def spellings(group: list[str], variables: Iterable[str]) -> list[str]:
    """Returns regexes that match the paths of a group and no others: full paths, without the model's name, or ends."""
    whole = "|".join(map(re.escape, group))
    without_name = "|".join(re.escape(path.removeprefix("sequential/")) for path in group)
    end = ".*" + re.escape("/".join(group[0].split("/")[-2:]))
    matches_group_only = [path for path in variables if re.fullmatch(end, path)] == group
    return [whole, without_name, end] if matches_group_only else [whole, without_name]


@st.composite
def rules(draw, variables: dict[str, tuple[int, ...]], mesh: kd.DeviceMesh) -> tuple[kd.LayoutMap, dict[str, tuple]]:
    """Draws a layout map with a rule for each variable, or for all of a shape; returns the axes of each variable."""
    layout_map, axes = kd.LayoutMap(mesh), {}
    for shape, paths in itertools.groupby(sorted(variables, key=variables.get), key=variables.get):
        paths = list(paths)
        groups = draw(st.sampled_from([[[path] for path in paths], [paths]]))
        for group in groups:
            pattern = draw(st.sampled_from(spellings(group, variables)))
            layout_map[pattern] = layout = draw(layouts(shape, mesh.axis_sizes))
            axes |= dict.fromkeys(group, layout)
    return layout_map, axes


@st.composite
def data_parallel(draw) -> Placement:
    """Draws a `DataParallel` over one to eight devices."""
    count = draw(st.sampled_from([8, 2, 3, 4, 5, 6, 7, 1]))
    mesh = kd.DeviceMesh((count,), ["batch"], kd.list_devices()[:count])
    return Placement(kd.DataParallel(device_mesh=mesh), {})


@st.composite
def model_parallel(draw, variables: dict[str, tuple[int, ...]]) -> Placement:
    """Draws a `ModelParallel` with rules for a model's variables, sometimes also for the output of its last layer."""
    mesh = draw(meshes())
    layout_map, axes = draw(rules(variables, mesh))
    batch_dim_name = draw(batch_axes(mesh))
    if draw(st.sampled_from([True, False])):
        rows = batch_dim_name or mesh.axis_names[0]
        free = {name: size for name, size in mesh.axis_sizes.items() if name not in axis_tuple(rows)}
        layout_map[".*head/output"] = (rows, *draw(layouts((8,), free)))
    return Placement(kd.ModelParallel(layout_map=layout_map, batch_dim_name=batch_dim_name), axes)


def cases(architecture: str, rows: st.SearchStrategy[int]) -> st.SearchStrategy[Case]:
    """Draws a case of an architecture."""
    return st.builds(
        Case,
        architecture=st.just(architecture),
        form=st.sampled_from(["sequential", "functional", "built by the first batch"]),
        rows=rows,
        batch_size=st.integers(3, 17),
        weighted=st.booleans(),
        validation=st.sampled_from(["split", "data", "none"]),
        seed=st.integers(0, 99),
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", NAMES)
@compiling
@hypothesis.given(data=st.data())
def test_fit_evaluate_and_predict_give_the_numbers_of_one_device(architecture, data):
    case = data.draw(cases(architecture, rows=st.integers(5, 40)))
    variables = variables_of(case.architecture, case.form)
    check(in_epochs, case, data.draw(model_parallel(variables)))
    check(in_epochs, case, data.draw(data_parallel()))


@pytest.mark.parametrize("architecture", NAMES)
@hypothesis.settings(compiling, max_examples=1)
@hypothesis.given(data=st.data())
def test_single_batches_and_calls_give_the_numbers_of_one_device(architecture, data):
    case = data.draw(cases(architecture, rows=st.integers(3, 17)))
    variables = variables_of(case.architecture, case.form)
    check(in_single_batches, case, data.draw(model_parallel(variables)))
    check(in_single_batches, case, data.draw(data_parallel()))


@hypothesis.settings(deadline=None, derandomize=True, max_examples=300)
@hypothesis.given(mesh=meshes(), rows=st.integers(0, 10_000), data=st.data())
def test_a_batch_is_sharded_over_the_axes_with_the_largest_product_that_divides_its_rows(mesh, rows, data):
    count = data.draw(st.integers(0, len(mesh.axis_names)))
    axes = data.draw(st.sampled_from(list(itertools.permutations(mesh.axis_names, count))))
    chosen = BatchPlacer(mesh, axes).axes_for(rows)
    assert chosen == tuple(axis for axis in axes if axis in chosen)
    products = (
        math.prod(mesh.axis_sizes[axis] for axis in part)
        for size in range(len(axes) + 1)
        for part in itertools.combinations(axes, size)
    )
    assert math.prod(mesh.axis_sizes[axis] for axis in chosen) == max(p for p in products if rows % p == 0)

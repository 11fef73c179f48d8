"""Operations that XLA cannot compile or partition: the numbers of one device where it fails or has wrong ones."""

import pathlib
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from keras import layers
from support.applied_functions import ROWS, WIDTH, distribution_of, trained
from support.keras_scenarios import start_anew
from support.slow_cases import slow
from support.strategy_models import assert_same_numbers, scope

import keras_dist as kd
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.passes.registry import PASSES
from keras_dist.passes.rewriting import PassError, rewritten
from keras_dist.passes.step_program import StepProgram
from keras_dist.sharding.per_device import call_per_device
from keras_dist.tracing.jaxpr_evaluation import inner_jaxprs

X = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")


def after_passes(program, mesh, *passes):
    """A program whose inputs all have rows, after some passes, by default all."""
    axes = [[("data",), *[()] * (aval.ndim - 1)] for aval in program.in_avals]
    return rewritten(StepProgram(program, BatchPlacer(mesh, ["data"]), ("data",), axes), passes or [*PASSES.values()])


def dtypes_of_indices(jaxpr):
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("scatter"):
            found.add(str(equation.invars[1].aval.dtype))
        else:
            found = found.union(*map(dtypes_of_indices, inner_jaxprs(equation.params)))
    return found


def sums(x, indices):
    """Sums by index: as it is, in a jitted function, in a loop and in a branch."""
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def by_index(x):
        return jax.lax.scatter_add(jnp.zeros_like(x), indices[:, None], jnp.sin(x), numbers)

    looped, _ = jax.lax.scan(lambda total, _: (by_index(total), None), x, length=2)
    return by_index(x) + 2 * jax.jit(by_index)(x) + looped + jax.lax.cond(x[0, 0] > 9, lambda: x, lambda: by_index(x))


@pytest.mark.parametrize("dtype", ["uint32", "int8", "int64", "uint64"])
def test_sums_by_index_in_unequal_shards(dtype):
    with jax.enable_x64(dtype.endswith("64")):
        indices = (np.arange(13) * 5 % 11).astype(dtype)
        indices[3:5] = 100, 120  # out of bounds
        if dtype.endswith("64"):
            indices[5] = 2**32 + 1  # 1, if its first bits are dropped
        program = jax.make_jaxpr(sums)(X, indices)
        mesh = kd.create_device_mesh("data:8")
        changed = after_passes(program, mesh)
        assert dtypes_of_indices(program.jaxpr) == {dtype}
        assert dtypes_of_indices(changed.jaxpr) == {"int32"}

        @jax.jit
        def in_shards(x, indices):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh.backend_mesh, PartitionSpec("data")))
            return jaxpr_as_fun(changed)(x, indices)[0]

        assert_same_numbers(in_shards(X, indices), sums(X, indices), 1e-5)


def convolved(x, window):
    kernel = jnp.broadcast_to(jnp.eye(4), (window, 4, 4))
    return jax.lax.conv_general_dilated(x, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))


def test_other_programs_are_not_changed():
    """Sums by int32, convolutions that are products of matrices, and those of rows that are on each device."""
    mesh = kd.create_device_mesh("data:8")
    x, rows = np.ones((8, 5, 4), "float32"), PartitionSpec("data")
    programs = [
        jax.make_jaxpr(sums)(np.ones((16, 4), "float32"), np.arange(16, dtype="int32")),
        jax.make_jaxpr(lambda x: (convolved(x, 1), convolved(x, 5)))(x),
        jax.make_jaxpr(jax.shard_map(lambda x: convolved(x, 2), mesh=mesh.backend_mesh, in_specs=rows, out_specs=rows))(
            x
        ),
    ]
    assert [after_passes(program, mesh) is program for program in programs] == [True] * 3
    program = jax.make_jaxpr(lambda x: convolved(x, 2))(x)
    assert after_passes(program, mesh) is not program


@pytest.mark.parametrize(("length", "is_changed"), [(8, False), (6, True)])
def test_indices_of_fewer_rows_than_sequence_shards(length, is_changed):
    """Positions may be in unequal shards, and rows are not gathered for them."""
    placer = BatchPlacer(kd.create_device_mesh("data:2,context:4"), ["data"], ["context"])
    indices, updates = np.zeros((2, length), "int32"), np.ones((2, length, 4), "float32")
    program = jax.make_jaxpr(lambda indices, updates: jnp.zeros((32, 4)).at[indices].add(updates))(indices, updates)
    axes = [[("data",), ("context",), ()][: each.ndim] for each in (indices, updates)]
    changed = rewritten(StepProgram(program, placer, ("data",), axes), [*PASSES.values()])
    assert (changed is not program) == is_changed
    assert ("spec=P(UNCONSTRAINED, None" in str(changed)) == is_changed


@pytest.mark.parametrize("fails_when_asked", [False, True])
def test_a_pass_that_fails_is_named_and_can_be_left_out(fails_when_asked, monkeypatch):
    def sines(equation, program):
        if equation.primitive.name != "sin":
            return None
        return undefined if fails_when_asked else lambda sine, x: undefined  # noqa: F821

    def weights(**options):
        return trained(jnp.sin, 8, kd.DataParallel(step_options=kd.StepOptions(**options)))

    expected = weights()
    monkeypatch.setitem(PASSES, "sines", sines)
    with pytest.raises(PassError, match=r"'sines'.* sin of float32\[.*applied.*without_passes='sines'"):
        weights()
    assert_same_numbers(weights(without_passes="sines"), expected, 0)


class Leaks(layers.Layer):
    def call(self, x):
        kept = []

        def step(carry, each):
            kept.append(carry)
            return carry + each, None

        return jax.lax.scan(step, x[:, 0], keras.ops.transpose(x, (1, 0, 2)))[0] + kept[0]


def test_a_value_that_leaks_is_explained_by_jax():
    with kd.DataParallel().scope():
        model = keras.Sequential([layers.Conv2D(4, 2, strides=2), layers.Reshape((2, -1)), Leaks()])
        model.compile("sgd", "mse")
        with pytest.raises(jax.errors.UnexpectedTracerError, match="leaked"):
            model.train_on_batch(np.ones((16, 4, 4, 3), "float32"), np.ones((16, 8), "float32"))


def test_the_example_of_contributing():
    text = (pathlib.Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    names = {"PartitionSpec": PartitionSpec, "call_per_device": call_per_device}
    exec(re.search(r"(?s)```python\n(def cholesky_of_rows.*?)```", text)[1], names)
    mesh = kd.create_device_mesh("data:8")
    factors = np.random.default_rng(0).normal(size=(13, 4, 4)).astype("float32")
    matrices = factors @ factors.transpose(0, 2, 1) + np.eye(4, dtype="float32")
    program = jax.make_jaxpr(jax.lax.linalg.cholesky)(matrices)
    changed = after_passes(program, mesh, names["cholesky_of_rows"])
    assert "shard_map" not in str(program)
    assert "shard_map" in str(changed)
    assert_same_numbers(jax.jit(jaxpr_as_fun(changed))(matrices)[0], np.linalg.cholesky(matrices), 1e-5)


def sorted_by_jax(x):
    """Sorts all activations, a slice of the rows, and one of the positions."""
    parts = jnp.sort(x[:5], axis=-1), jnp.sort(x[:, :6], axis=1), jnp.median(x.reshape(-1, WIDTH)[:61], axis=0)
    return jnp.sort(x, axis=-1) + sum(jnp.mean(part) for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (kd.DataParallel, ROWS),
        (kd.DataParallel, 13),
        (lambda: distribution_of("tensor parallel"), ROWS),
        (lambda: distribution_of("context parallel"), ROWS),
    ],
    ids=["data parallel", "odd rows", "tensor parallel", "context parallel"],
)
def test_layers_that_sort_by_calls_of_jax(make, rows):
    assert_same_numbers(trained(sorted_by_jax, 9, make(), rows), trained(sorted_by_jax, 9, None, rows), 1e-5)


def minima(x, window):
    return jax.lax.reduce_window(x, jnp.inf, jax.lax.min, (1, *window, 1), (1,) * x.ndim, "SAME")


@pytest.mark.parametrize("length", [8, slow(7)])
def test_minima_over_windows_of_a_sharded_sequence(length):
    def function(x):
        return minima(x, (3,))

    distribution = distribution_of("context parallel")
    assert_same_numbers(trained(function, length, distribution), trained(function, length, None), 1e-5)


@pytest.mark.parametrize(
    ("kind", "window", "options"),
    [
        ("convolution", (3, 3), {}),
        ("convolution", (3, 3), {"microbatches": 2}),  # the gradient is computed in a `jax.shard_map` over rows
        ("minima", (3, 3), {}),
        slow("convolution", (3, 1), {"reduce_dtype": "float32"}),
        slow("minima", (3, 1), {"microbatches": 2}),
        slow("minima", (2, 2), {"reduce_dtype": "float32"}),
    ],
)
def test_windows_before_a_layer_whose_kernel_shards_what_is_flattened(kind, window, options):
    def weights(distribution):
        start_anew()
        with scope(distribution):
            images = keras.Input((8, 8, 4), batch_size=8)
            x = layers.Dense(4)(images)
            x = layers.Conv2D(4, window)(x) if kind == "convolution" else layers.Lambda(lambda x: minima(x, window))(x)
            x = layers.Dense(8, activation="tanh", name="head")(layers.Flatten()(x))
            model = keras.Model(images, layers.Dense(4)(x))
            model.compile("sgd", "mse")
            random = np.random.default_rng(0)
            model.train_on_batch(random.normal(size=(8, 8, 8, 4)), random.normal(size=(8, 4)))
            return model.get_weights()

    rules = kd.LayoutMap(kd.create_device_mesh("data:2,model:4"))
    rules["head/kernel"] = ("model", None)
    step_options = kd.StepOptions(**options)
    distribution = kd.ModelParallel(layout_map=rules, batch_dim_name="data", step_options=step_options)
    assert_same_numbers(weights(distribution), weights(None), 1e-5)


def test_convolutions_in_bfloat16_and_their_mean():
    start_anew()
    with scope(kd.DataParallel()):
        x = images = keras.Input((4, 4, 64))
        for _ in range(2):
            x = layers.Conv2D(64, 3, padding="same", dtype="mixed_bfloat16")(x)
            x = layers.ReLU(dtype="mixed_bfloat16")(layers.BatchNormalization(dtype="mixed_bfloat16")(x))
        model = keras.Model(images, layers.GlobalAveragePooling2D(dtype="mixed_bfloat16")(x))
        rows = np.random.default_rng(0).normal(size=(64, 4, 4, 64)).astype("float32")
        predicted = model.predict(rows, batch_size=64, verbose=0).astype("float32")
        np.testing.assert_allclose(predicted, np.asarray(model(rows), "float32"), rtol=0.05, atol=0.02)

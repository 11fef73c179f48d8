"""Gradients as one summand for each shard of a batch: right sums, and nothing sent until they are added up."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from keras import layers, ops
from support.keras_scenarios import start_anew
from support.strategy_models import assert_same_numbers, fsdp, scope

import keras_dist as kd
from keras_dist.steps.unreduced_gradients import UnreducedGradients, total

random = np.random.default_rng(0)
SHAPES = {"table": (32, 16), "up": (16, 24), "bias": (24,), "kernel": (3, 24, 24), "down": (24, 16), "scale": (16,)}
WEIGHTS = {name: jnp.asarray(0.1 * random.normal(size=shape), "float32") for name, shape in SHAPES.items()}
TOKENS, TARGETS = random.integers(0, 32, (16, 6), "int32"), random.normal(size=(16, 6, 16)).astype("float32")


def loss(weights, tokens, targets):
    """A lookup whose table also computes the outputs, a convolution, statistics over rows, and a penalty on weights."""

    def block(x):
        hidden = jax.nn.gelu(x @ weights["up"] + weights["bias"])
        numbers = ("NWC", "WIO", "NWC")
        hidden = jax.lax.conv_general_dilated(hidden, weights["kernel"], (1,), "SAME", dimension_numbers=numbers)
        return x + (hidden @ weights["down"]).astype("bfloat16").astype("float32")

    x = block(jax.checkpoint(block)(weights["table"][tokens]))
    x = (x - x.mean((0, 1))) / jnp.sqrt(x.var((0, 1)) + 1e-3) * weights["scale"]
    outputs = jax.jit(lambda x: x @ weights["table"].T)(x) @ weights["table"]
    return jnp.mean((outputs - targets) ** 2) + sum(jnp.sum(weight**2) for weight in weights.values())


def gradients(weights, tokens, targets):
    value, found = jax.value_and_grad(loss)(weights, tokens, targets)
    return jax.tree.leaves(found), value


@pytest.fixture
def arguments():
    """Weights, tokens and targets on a mesh with an axis of rows and another one."""
    mesh = kd.create_device_mesh({"data": 4, "model": 2}).backend_mesh
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return WEIGHTS, jax.device_put(TOKENS, rows), jax.device_put(TARGETS, rows)


@pytest.fixture
def unreduced(arguments):
    mesh = arguments[1].sharding.mesh
    return UnreducedGradients(gradients, arguments, [False] * len(WEIGHTS) + [True, True], mesh, ("data",))


def test_the_sums_are_the_gradients(unreduced, arguments):
    def summed(*arguments):
        found, value = unreduced(*arguments)
        return [total(each) for each in found], value

    found, value = jax.jit(summed)(*arguments)
    expected, expected_value = jax.jit(gradients)(WEIGHTS, TOKENS, TARGETS)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def test_no_gradient_is_sent(unreduced, arguments):
    """Only the statistics of the 16 channels, and the loss, are sums over all rows."""
    found, _ = jax.eval_shape(unreduced, *arguments)
    assert [each.unreduced.shape for each in found] == [(4, *weight.shape) for weight in jax.tree.leaves(WEIGHTS)]
    program = jax.jit(lambda *arguments: unreduced(*arguments)).lower(*arguments).compile().as_text()
    reduced = [line.split(" all-reduce(")[0].split("=")[1] for line in program.splitlines() if " all-reduce(" in line]
    assert reduced
    for shapes in reduced:
        assert not any(shape in shapes for shape in ("[32,16]", "[16,24]", "[24]", "[3,24,24]", "[24,16]"))


def test_a_penalty_on_weights_is_no_sum_over_rows(unreduced, arguments):
    found, _ = jax.eval_shape(unreduced, *arguments)
    assert all(each.reduced is not None for each in found)


def test_each_dtype_is_that_of_the_sum(arguments):
    """The product is computed in bfloat16, and its gradient is cast to float32 afterwards."""

    def half(weights, tokens, targets):
        def value(up):
            return jnp.mean((targets.astype("bfloat16") @ up.astype("bfloat16")).astype("float32") ** 2)

        return [jax.grad(value)(weights["up"])], ()

    rows = [False] * len(WEIGHTS) + [True, True]
    unreduced = UnreducedGradients(half, arguments, rows, arguments[1].sharding.mesh, ("data",))
    assert unreduced.sum_dtypes == [jnp.bfloat16]
    ((gradient,), _) = jax.eval_shape(unreduced, *arguments)
    assert gradient.unreduced.dtype == jnp.float32


def test_a_sum_that_is_cast_has_the_dtype_of_the_cast(arguments):
    """The gradient of a lookup, added up in float32."""

    def cast(weights, tokens, targets):
        lookup = jax.linear_transpose(lambda table: table[tokens], weights["table"])
        return [lookup(targets)[0].astype("bfloat16").astype("float32"), lookup(targets)[0]], ()

    rows = [False] * len(WEIGHTS) + [True, True]
    mesh = arguments[1].sharding.mesh
    assert UnreducedGradients(cast, arguments, rows, mesh, ("data",)).sum_dtypes == [jnp.bfloat16, jnp.float32]
    kept = UnreducedGradients(cast, arguments, rows, mesh, ("data",), is_kept=[False, True])
    assert kept.sum_dtypes == [None, jnp.float32]
    first, second = jax.eval_shape(kept, *arguments)[0]
    assert first.unreduced is None
    assert second.reduced is None


def test_a_loop_of_its_own_is_reduced_at_once(arguments):
    def recurrent(weights, tokens, targets):
        def value(weights):
            def step(state, x):
                return jnp.tanh(state @ weights["up"][:, :16] + x), None

            state, _ = jax.lax.scan(step, targets[:, 0], targets.swapaxes(0, 1))
            return jnp.mean(state**2)

        found = jax.grad(value)(weights)
        return [found["up"]], value(weights)

    mesh = arguments[1].sharding.mesh
    rows = [False] * len(WEIGHTS) + [True, True]
    unreduced = UnreducedGradients(recurrent, arguments, rows, mesh, ("data",))
    assert unreduced.sum_dtypes == [None]
    found = jax.jit(lambda *arguments: total(unreduced(*arguments)[0][0]))(*arguments)
    np.testing.assert_allclose(found, recurrent(WEIGHTS, TOKENS, TARGETS)[0][0], rtol=0, atol=1e-6)


def test_lookups_in_each_row_are_no_sums_over_rows(arguments):
    picks = [
        lambda x: jnp.sort(x, axis=-1),
        lambda x: jax.lax.top_k(x, 3)[0],
        lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1)[:, :2], axis=1),
        jax.vmap(lambda row: row[jnp.argmax(row[:, 0])]),
        jax.vmap(lambda row: jax.lax.dynamic_slice_in_dim(row, jnp.argmax(row[:, 0]), 2)),
    ]

    def picked(weights, tokens, targets):
        def value(weights):
            return sum(jnp.mean(pick(targets @ weights["up"] + weights["bias"]) ** 2) for pick in picks)

        found = jax.grad(value)(weights)
        return [found["up"], found["bias"]], ()

    mesh, rows = arguments[1].sharding.mesh, [False] * len(WEIGHTS) + [True, True]
    unreduced = UnreducedGradients(picked, arguments, rows, mesh, ("data",))
    found = jax.jit(lambda *arguments: list(map(total, unreduced(*arguments)[0])))(*arguments)
    assert_same_numbers(found, jax.jit(picked)(WEIGHTS, TOKENS, TARGETS)[0], 1e-5)
    assert unreduced.sum_dtypes[0] == jnp.float32


def routed(accumulated):
    """Tokens are sent to experts by the best scores of a dense layer with a bias."""

    def route(scores):
        best, _ = ops.top_k(scores, 2)
        chosen = ops.take_along_axis(scores, ops.argsort(scores, axis=-1)[..., :2], axis=-1)
        return ops.concatenate([ops.softmax(best), ops.softmax(chosen), ops.sort(scores, axis=-1)], axis=-1)

    inputs = keras.Input((6, 16))
    model = keras.Model(inputs, layers.Dense(4)(layers.Lambda(route)(layers.Dense(8)(inputs))))
    model.compile(keras.optimizers.SGD(0.5, gradient_accumulation_steps=accumulated), "mse")
    return model


@functools.cache
def trained_router(distribution=None, accumulated=None):
    start_anew()
    with scope(distribution):
        model = routed(accumulated)
        losses = model.fit(TARGETS, TARGETS[..., :4], 16, 4, verbose=0, shuffle=False).history
        return losses, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options", "accumulated"),
    [
        (kd.DataParallel, {"microbatches": 2}, None),
        (fsdp, {"microbatches": 2}, None),
        (kd.DataParallel, {"reduce_dtype": "float32"}, None),
        (kd.DataParallel, {}, 2),
    ],
)
def test_a_router_has_the_numbers_of_one_device(make, options, accumulated):
    actual = trained_router(make(step_options=kd.StepOptions(**options)), accumulated)
    assert_same_numbers(actual, trained_router(accumulated=accumulated), 1e-5)

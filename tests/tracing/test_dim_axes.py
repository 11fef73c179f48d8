"""Dims of traced values are followed to the weights, constraints and arguments that decide how they are sharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_dist.tracing.dim_axes import axes_of_dim, without_repeats
from keras_dist.tracing.traced_values import root_of

B, T, D, N, H = 2, 6, 8, 4, 2
MESH = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "heads"))


class Program:
    """What `axes_of_dim` finds for dims of `function(x, kernel)`, `x` (B, T, D) and `kernel` (D, N, H).

    Args:
        function: the function.
        dims: dims of its output.
        differentiated: whether its inputs have gradients.
    """

    def __init__(self, function, *dims, differentiated):
        self.axes = []

        def step(x, kernel):
            layouts = {id(root_of(x)): ("data", "seq", None), id(root_of(kernel)): ("fsdp", ("model", "extra"), None)}
            output = function(x, kernel)
            self.axes = [axes_of_dim(output, dim, lambda value: layouts.get(id(value))) for dim in dims]
            return jnp.sum(output * 1.0)

        step = jax.grad(step, (0, 1)) if differentiated else step
        jax.eval_shape(step, jnp.ones((B, T, D)), jnp.ones((D, N, H)))


def query(x, kernel):
    return jnp.einsum("btd,dnh->btnh", x, kernel)


def rope(x, kernel):
    first, second = jnp.split(query(x, kernel), 2, axis=-1)
    positions = jnp.arange(T, dtype="float32")[None, :, None, None]
    rotated = jnp.concatenate([first * jnp.cos(positions), second * jnp.sin(positions)], axis=-1)
    return jnp.stack([rotated, rotated], axis=-1).reshape(B, T, N, 2 * H)


def constrained(spec, x, kernel):
    return with_sharding_constraint(query(x, kernel), NamedSharding(MESH, spec))


def sharded(x, kernel):
    rows, columns = PartitionSpec("data", "heads"), PartitionSpec("heads", "data")
    both = jax.shard_map(lambda x: (x, x.swapaxes(0, 1)), mesh=MESH, in_specs=rows, out_specs=(rows, columns))(x)
    return 2 * both[1]


BATCH, SEQUENCE, MODEL = ("data",), ("seq",), ("model", "extra")


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (query, (BATCH, SEQUENCE, MODEL, ())),
        (lambda x, kernel: jax.nn.relu(query(x, kernel).astype("bfloat16")) + 1, (BATCH, SEQUENCE, MODEL, ())),
        (lambda x, kernel: query(x, kernel).transpose(0, 2, 3, 1), (BATCH, MODEL, (), SEQUENCE)),
        (lambda x, kernel: (x @ kernel.reshape(D, N * H)).reshape(B, T, N, H), (BATCH, SEQUENCE, MODEL, None)),
        (lambda x, kernel: query(x, kernel).reshape(B * T, N * H), (BATCH, MODEL)),
        (rope, (BATCH, SEQUENCE, MODEL, None)),
        (lambda x, kernel: query(x, kernel)[:, 2:, :, None], (BATCH, None, MODEL, None, ())),
        (lambda x, kernel: jax.nn.softmax(query(x, kernel)).mean(1), (BATCH, MODEL, ())),
        (lambda x, kernel: jnp.cumsum(query(x, kernel), 1), (BATCH, None, MODEL, ())),
        (lambda x, kernel: jnp.repeat(query(x, kernel), 2, axis=2), (BATCH, SEQUENCE, MODEL, ())),
        (lambda x, kernel: kernel[(x[..., 0] * 2).astype(int)], (BATCH, SEQUENCE, None, None)),
        (
            lambda x, kernel: jnp.einsum("btnh,bsnh->bnts", query(x, kernel), query(x, kernel)),
            (BATCH, MODEL, SEQUENCE, SEQUENCE),
        ),
        (lambda x, kernel: jax.lax.map(jnp.sin, x), (None, None, None)),
        (lambda x, kernel: jnp.fft.fft(x).real, (BATCH, SEQUENCE, None)),
        (sharded, (("heads",), ("data",), ())),
        (lambda x, kernel: jax.checkpoint(query)(x, kernel), (BATCH, SEQUENCE, MODEL, ())),
        (lambda x, kernel: query(x, kernel) + jnp.zeros((N, H)), (BATCH, SEQUENCE, MODEL, ())),
        (functools.partial(constrained, PartitionSpec("data", None, "heads")), (BATCH, (), ("heads",), ())),
        (
            functools.partial(constrained, PartitionSpec(None, PartitionSpec.UNCONSTRAINED, "heads")),
            ((), SEQUENCE, ("heads",), ()),
        ),
        (lambda x, kernel: jax.random.normal(jax.random.key(0), (B, T)), (None, None)),
    ],
)
def test_axes(function, expected, differentiated):
    program = Program(function, *range(len(expected)), differentiated=differentiated)
    assert tuple(program.axes) == expected


def test_deep_programs_are_followed_in_linear_time():
    def deep(x, kernel):
        for _ in range(2000):
            x = x + jnp.tanh(x)
        return query(x, kernel)

    assert Program(deep, 0, 2, differentiated=False).axes == [BATCH, MODEL]


REPEATS = {
    "repeat": lambda x: jnp.repeat(x, 3, axis=2),
    "one head": lambda x: jnp.repeat(x[:, :, :1], 3, axis=2),
    "broadcast": lambda x: jnp.broadcast_to(x[:, :, :1], (B, T, 3, H)),
    "cast": lambda x: jnp.repeat(x, 3, axis=2).astype("bfloat16"),
    "in jit": jax.jit(lambda x: jnp.repeat(x, 3, axis=2)),
    "transposed": lambda x: jnp.repeat(x.transpose(0, 2, 1, 3), 3, axis=1).transpose(0, 2, 1, 3),
}


@pytest.mark.parametrize("repeat", REPEATS.values(), ids=REPEATS)
def test_without_repeats(repeat):
    x = jnp.arange(B * T * N * H, dtype="float32").reshape(B, T, N, H)
    weights = jnp.sin(jnp.arange(12.0)).reshape(12, 1)
    numbers = []

    def loss(x, removes):
        value = repeat(x)
        if removes:
            value, repeats = without_repeats(value, 2)
            numbers.append(repeats)
            value = jnp.repeat(value, repeats, axis=2)
        return jnp.sum(weights[: value.shape[2]] * value.astype("float32")), value

    (gradient, value), (expected_gradient, expected) = (
        jax.jit(jax.grad(functools.partial(loss, removes=removes), has_aux=True))(x) for removes in (True, False)
    )
    assert numbers == [3]
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-2 if value.dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: jnp.tile(x, (1, 1, 3, 1)),
        lambda x: jnp.repeat(x, 3, axis=1).reshape(B, 3 * T, N, H),
        lambda x: jnp.repeat(x, 3, axis=3),
        lambda x: jnp.repeat(x, 3, axis=2) + jnp.arange(3 * N)[:, None],
    ],
)
def test_values_without_repeats(function):
    def program(x):
        value = function(x)
        unrepeated, repeats = without_repeats(value, 2)
        assert unrepeated is value
        assert repeats == 1
        return value

    jax.eval_shape(program, jnp.ones((B, T, N, H)))


def test_the_forward_pass_does_not_repeat():
    def program(x):
        value, _ = without_repeats(jnp.repeat(x, 4, axis=2), 2)
        return value

    text = jax.jit(program).lower(jnp.ones((B, T, N, H))).compile().as_text()
    assert f"f32[{B},{T},{4 * N},{H}]" not in text
    assert f"f32[{B},{T},{N},4,{H}]" not in text

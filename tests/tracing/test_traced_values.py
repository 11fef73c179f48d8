"""The graph of traced values follows them through the functions that JAX traces separately."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_dist.tracing.traced_values import node_of, root_of


def traced(look, *arguments):
    """What `look` returns while it is traced with the arguments."""
    seen = []
    jax.jit(lambda *inner: seen.append(look(*inner)))(*arguments)
    return seen[0]


def primitives(value):
    """The primitives on the way from a value through its first operands, up to a leaf."""
    names, node = [], node_of(value)
    while node.primitive:
        names.append(node.primitive)
        node = next(iter(node.inputs), node_of(0))
    return names


X = jnp.arange(6.0).reshape(2, 3)


def test_operations():
    node = traced(lambda x: node_of(jnp.exp(x.T + 1)), X)
    assert (node.primitive, node.shape, node.dtype) == ("exp", (3, 2), jnp.float32)
    assert [operand.primitive for operand in node.inputs] == ["add"]
    x, one = node.inputs[0].inputs
    assert (x.primitive, x.params["permutation"], x.inputs[0].primitive) == ("transpose", (1, 0), "")
    assert one.constant == 1


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.nn.relu, jnp.tril])
def test_called_functions_are_looked_into(wrap):
    called = wrap if wrap in (jax.nn.relu, jnp.tril) else wrap(lambda x: jnp.maximum(jnp.sin(x), 0))
    expected = {jax.nn.relu: ["max", "neg"], jnp.tril: ["select_n", "ge", "add", "iota"]}.get(
        wrap, ["max", "sin", "neg"]
    )
    assert traced(lambda x: primitives(called(-x)), X) == expected


def test_values_inside_called_functions_are_computed_again():
    def program(x):
        node = node_of(jax.jit(lambda y: jnp.split(y * 2, 3, axis=1)[1] + 1)(x))
        (half, _) = node.inputs
        assert half.origin is None
        return half.value, half.value

    first, second = jax.jit(program)(X)
    np.testing.assert_array_equal(first, 2 * X[:, 1:2])
    np.testing.assert_array_equal(second, first)


def test_equal_values_are_one_node():
    node = traced(lambda x: node_of(jnp.sin(x) * jnp.sin(x)), X)
    first, second = node.inputs
    assert first is not second
    assert first.inputs[0] is second.inputs[0]


@pytest.mark.parametrize("differentiate", [jax.grad, jax.value_and_grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_differentiated_values(differentiate):
    seen = []

    def step(x):
        y = jnp.sin(x) * 2
        seen.append(primitives(y))
        seen.append(primitives(jax.checkpoint(lambda: seen.append(root_of(y) is node_of(y).root) or -y)()))
        return y.sum()

    jax.jit(differentiate(step))(X)
    assert seen[:2] == [["mul", "sin"], True]
    assert seen[2][-2:] == ["mul", "sin"]


def test_closures_of_inner_functions():
    def program(x):
        y = jnp.sin(x)
        seen = []

        @jax.checkpoint
        def inner(z):
            seen.append((primitives(y + z), root_of(y), root_of(x)))
            return y + z

        jax.lax.scan(lambda carry, _: (inner(carry), None), x, None, length=2)
        return seen[0][0], seen[0][1] is y, seen[0][2] is x

    assert traced(program, X) == (["add", "sin"], True, True)


def test_constants():
    def program(x):
        index = jnp.where(jnp.int32(-1) < 0, jnp.int32(-1) + x.shape[1], 5)
        return node_of(index).constant, node_of(jnp.ones(3)).constant, node_of(np.ones(3)).constant, node_of(x).constant

    index, ones, array, argument = traced(program, X)
    assert index == 2
    assert (ones, argument) == (None, None)
    np.testing.assert_array_equal(array, np.ones(3))


def test_what_is_not_known_is_a_leaf():
    def program(x):
        loop = jax.lax.fori_loop(0, 3, lambda _, y: y * 2, x)
        batched = jax.vmap(lambda row: jnp.full((), len(primitives(row * 2))))(x)
        return primitives(loop), batched

    names, batched = traced(program, X)
    assert names[0] in ("scan", "while")
    assert batched.shape == (2,)


def test_values_outside_of_traces():
    node = node_of(X)
    assert (node.primitive, node.shape, node.constant is X, node.value is X) == ("", (2, 3), True, True)

"""Tokens of flattened batches and positions, in an order in which each device has its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from passes.test_experts import assert_near

import keras_dist as kd
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.passes.flattened_tokens import flattened_per_device
from keras_dist.passes.step_program import StepProgram
from keras_dist.tracing.jaxpr_evaluation import as_function, inlined

SHAPE = ROWS, POSITIONS, WIDTH = 8, 6, 4
TOKENS = ROWS * POSITIONS
X = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
W = np.random.default_rng(1).normal(size=(WIDTH, 3)).astype("float32")


def flat(x):
    return x.reshape(TOKENS, *x.shape[2:])


def back(tokens):
    return tokens.reshape(ROWS, POSITIONS, *tokens.shape[1:])


def routed(x):
    weights, chosen = jax.lax.top_k(jax.nn.softmax(flat(x) @ W), 2)
    gates = (jax.nn.one_hot(chosen, 3) * weights[..., None]).sum(1)
    return back(jnp.einsum("te,td->ted", gates, flat(x)))


def balanced(x):
    scores = jax.nn.softmax(flat(x) @ W)
    return x * jnp.max(scores.mean(0) * (scores > 0.4).astype("float32").mean(0))


IN_ANY_ORDER = {
    "routed": routed,
    "balanced": balanced,
    "masked": lambda x: back(flat(x) * flat(x[..., 0] > 0)[:, None]),
    "summed products": lambda x: x @ (flat(x).T @ flat(jnp.sin(x))),
    "sorted in tokens": lambda x: back(jnp.sort(flat(x), axis=1)),
    "looked up": lambda x: back(jnp.take_along_axis(flat(x), jnp.argsort(flat(x), axis=1)[:, 1:3], axis=1)),
    "looked up in a table": lambda x: back(jnp.asarray(W)[jnp.argmax(flat(x), axis=1)]),
    "computed again": lambda x: back(jax.checkpoint(lambda tokens: jnp.sin(tokens * flat(x)))(flat(x))),
    "split in a part that is computed again": lambda x: jax.checkpoint(lambda tokens: jnp.sin(back(tokens)))(flat(x)),
    "in another layout": lambda x: back(flat(x).T.T),
    "with constants": lambda x: back(jnp.where(jnp.arange(WIDTH) < 2, flat(x), jnp.full((TOKENS, WIDTH), 3.0))),
}
IN_THEIR_ORDER = {
    "numbered": lambda x: back(flat(x) * jnp.arange(TOKENS, dtype="float32")[:, None]),
    "summed so far": lambda x: back(jnp.cumsum(flat(x), axis=0)),
    "summed so far in a part that is computed again": lambda x: back(
        jax.checkpoint(lambda tokens: jnp.cumsum(tokens, axis=0))(flat(x))
    ),
    "sorted": lambda x: back(jnp.sort(flat(x), axis=0)),
    "the place of the largest": lambda x: x + jnp.argmax(flat(x), axis=0),
    "looked up by tokens": lambda x: x + flat(x)[jnp.arange(6)].sum(),
    "the first": lambda x: x + flat(x)[:5].sum(),
    "shifted": lambda x: back(jnp.concatenate([flat(x)[1:], flat(x)[:1]])),
    "shifted by padding": lambda x: back(jax.lax.pad(flat(x), 0.0, [(1, -1, 0), (0, 0, 0)])),
    "compared with each other": lambda x: x + (flat(x) @ flat(x).T)[0, 1],
    "weighted by order": lambda x: x + jnp.arange(TOKENS, dtype="float32") @ flat(x),
    "in two orders": lambda x: back(flat(x) + x.swapaxes(0, 1).reshape(TOKENS, WIDTH)),
    "returned": lambda x: flat(x),
    "merged again": lambda x: flat(x).reshape(TOKENS * WIDTH),
}


def flattened(function):
    """The program of a function before and after its tokens are flattened on each device, and how to call it."""
    placer = BatchPlacer(kd.create_device_mesh("data:4,seq:2"), ["data"], ["seq"])
    traced = jax.make_jaxpr(function)(X)
    program = StepProgram(inlined(traced.jaxpr, traced.consts), placer, ("data",), [[("data",), ("seq",), ()]])
    jaxpr = program.jaxpr.jaxpr
    first = next(e for e in jaxpr.eqns if e.primitive.name == "reshape" and e.outvars[0].aval.shape == (TOKENS, WIDTH))
    changed = flattened_per_device(jaxpr, program, [first.outvars])
    assert (changed is jaxpr) == (program.token_dims == {})
    return jaxpr, changed, jax.jit(as_function(changed, program.jaxpr.consts)), program


@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_devices_flatten_their_tokens_if_order_makes_no_difference(name):
    function = IN_ANY_ORDER[name]
    jaxpr, changed, compute, program = flattened(function)
    assert changed is not jaxpr
    (expected,), (found,) = as_function(jaxpr, program.jaxpr.consts)(X), compute(X)
    assert_near(found, expected, 1e-6)
    gradient = jax.grad(lambda x: jnp.sum(compute(x)[0] ** 2))(X)
    assert_near(gradient, jax.grad(lambda x: jnp.sum(function(x) ** 2))(X), 5e-6)
    assert {axes for _, axes in program.token_dims.values()} == {("data", "seq")}


@pytest.mark.parametrize("name", IN_THEIR_ORDER)
def test_tokens_stay_in_their_order_if_it_makes_a_difference(name):
    jaxpr, changed, *_ = flattened(IN_THEIR_ORDER[name])
    assert changed is jaxpr


def test_tokens_are_flattened_without_a_collective():
    placer = BatchPlacer(kd.create_device_mesh("data:4,seq:2"), ["data"], ["seq"])
    sharding = jax.sharding.NamedSharding(placer.device_mesh.backend_mesh, jax.P("data", "seq"))
    x = jax.device_put(X, sharding)
    jaxpr, _, compute, program = flattened(lambda x: back(jnp.sin(flat(x))))
    as_written = jax.jit(as_function(jaxpr, program.jaxpr.consts), out_shardings=[sharding])
    assert "all-gather" in as_written.lower(x).compile().as_text()
    compiled = jax.jit(compute, out_shardings=[sharding]).lower(x).compile().as_text()
    assert not any(name in compiled for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))

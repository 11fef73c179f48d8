"""What is known of values for experts that tokens have not chosen: it holds, whatever the scores are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

from keras_dist.mixtures.choices import read_choices
from keras_dist.tracing.jaxpr_evaluation import inlined

TOKENS, EXPERTS, CHOSEN = 5, 7, 3


def one_hot(indices):
    return jax.nn.one_hot(indices, EXPERTS)


def is_chosen(indices):
    return (indices[..., None] == jnp.arange(EXPERTS)).any(-2)


# Functions of scores (T, E) and the best of them and their indices (T, k), with the number that their result is for
# experts that are not chosen, or None if nothing is known.
KNOWN = {
    "one-hot": (lambda scores, best, indices: one_hot(indices), 0),
    "gates": (lambda scores, best, indices: (one_hot(indices) * best[..., None]).sum(1), 0),
    "gates by einsum": (lambda scores, best, indices: jnp.einsum("tk,tke->te", best, one_hot(indices)), 0),
    "transposed": (lambda scores, best, indices: jnp.einsum("tk,tke->et", best, one_hot(indices)), 0),
    "largest": (lambda scores, best, indices: one_hot(indices).max(1) * scores, 0),
    "split tokens": (lambda scores, best, indices: one_hot(indices[:4]).reshape(2, 2, CHOSEN, EXPERTS), None),
    "masked scores": (lambda scores, best, indices: jnp.where(is_chosen(indices), scores, -jnp.inf), -jnp.inf),
    "softmax": (lambda scores, best, indices: jax.nn.softmax(jnp.where(is_chosen(indices), scores, -1e30)), 0),
    "renormalized": (lambda scores, best, indices: is_chosen(indices) / jnp.sum(is_chosen(indices), 1)[:, None], 0),
    "complement": (lambda scores, best, indices: 1.0 - is_chosen(indices), 1),
    "twice the complement": (lambda scores, best, indices: jnp.exp2(jnp.float32(2)) - one_hot(indices).sum(1), None),
    "truncated": (
        lambda scores, best, indices: (0.5 + 0 * one_hot(indices).sum(1)).astype(int) + is_chosen(indices),
        0,
    ),
    "threshold": (lambda scores, best, indices: jnp.where(scores >= best[:, -1:], scores, 0), None),
    "other offset": (lambda scores, best, indices: one_hot(indices + 1).sum(1), None),
    "other order": (lambda scores, best, indices: one_hot(indices).sum(1)[:, ::-1], None),
    "shifted tokens": (lambda scores, best, indices: jnp.roll(one_hot(indices).sum(1), 1, axis=0), None),
    "prefix": (lambda scores, best, indices: jnp.cumsum(one_hot(indices).sum(1), axis=1), None),
    "weakly masked": (lambda scores, best, indices: jnp.where(is_chosen(indices), scores, -10.0) + scores, None),
}


def program_of(function):
    def computed(scores):
        return function(scores, *jax.lax.top_k(scores, CHOSEN))

    traced = jax.make_jaxpr(computed)(jnp.ones((TOKENS, EXPERTS)))
    return inlined(traced.jaxpr, traced.consts)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_of_a_result(name):
    function, number = KNOWN[name]
    program = program_of(function)
    fact = read_choices(program.jaxpr, program.consts).get(program.jaxpr.outvars[0])
    assert (None if fact is None else fact.number) == number


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31))
def test_it_holds_for_all_values_of_a_program(name, seed):
    program = program_of(KNOWN[name][0])
    facts = read_choices(program.jaxpr, program.consts)
    scores = jax.random.randint(jax.random.key(seed), (TOKENS, EXPERTS), -3, 4).astype("float32")  # with ties
    chosen = np.asarray(is_chosen(jax.lax.top_k(scores, CHOSEN)[1]))
    known = {variable: fact for variable, fact in facts.items() if fact.tokens and len(fact.tokens) == 1}
    values = jaxpr_as_fun(program.replace(jaxpr=program.jaxpr.replace(outvars=[*known])))(scores)
    for value, fact in zip(values, known.values(), strict=True):
        rows = np.moveaxis(np.asarray(value), (fact.tokens[0], fact.expert), (0, 1))
        np.testing.assert_array_equal(rows[~chosen[: len(rows)]], fact.number)

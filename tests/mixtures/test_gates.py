"""Which products with weights of experts are passed their gates, so that no backward pass keeps them."""

import jax
import jax.numpy as jnp
import pytest

from keras_dist.mixtures.gates import gates_of_products
from keras_dist.mixtures.recognition import find_mixtures
from keras_dist.tracing.jaxpr_evaluation import inlined, live

TOKENS, EXPERTS, WIDTH, HIDDEN = 6, 4, 8, 16


def mixture_of(expert, combine):
    def function(x, scores, up, down):
        best, chosen = jax.lax.top_k(scores, 2)
        gates = (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(1)
        return combine(expert(x, up, down), gates)

    shapes = [(TOKENS, WIDTH), (TOKENS, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)]
    program = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    program = inlined(program.jaxpr, program.consts)
    [mixture], _ = find_mixtures(live(program.jaxpr), program.consts)
    return mixture


def by_product(outputs, gates):
    """Multiplies (E, T, D) by (T, E)."""
    return (outputs * gates.T[:, :, None]).sum(0)


def by_einsum(outputs, gates):
    return jnp.einsum("etd,te->td", outputs, gates)


def after_transposing(outputs, gates):
    return (gates[..., None] * outputs.transpose(1, 0, 2)).sum(1)


def in_bfloat16(outputs, gates):
    return (outputs.astype("bfloat16") * gates.astype("bfloat16").T[:, :, None]).sum(0)


@pytest.mark.parametrize("combine", [by_product, by_einsum, after_transposing])
def test_the_last_product_is_passed_the_gates(combine):
    mixture = mixture_of(lambda x, up, down: jnp.tanh(x @ up) @ down, combine)
    gates, _ = gates_of_products(mixture)
    *_, last = (equation for equation in mixture.equations if mixture.weight_of(equation) is not None)
    assert list(gates) == last.outvars
    assert next(iter(gates.values())).aval.size == TOKENS * EXPERTS


@pytest.mark.parametrize(
    ("expert", "combine"),
    [
        (lambda x, up, down: jnp.tanh(x @ up) @ down + 1, by_product),
        (lambda x, up, down: (out := jnp.tanh(x @ up) @ down) * jnp.exp(out), by_product),
        (lambda x, up, down: jnp.tanh(jnp.tanh(x @ up) @ down), by_einsum),
        (lambda x, up, down: jnp.tanh(x @ up) @ down, in_bfloat16),
    ],
)
def test_other_products_are_not(expert, combine):
    assert gates_of_products(mixture_of(expert, combine)) == ({}, set())

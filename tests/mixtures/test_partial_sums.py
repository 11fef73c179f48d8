"""Which products with weights of experts may be partial sums until the result of a mixture is added up."""

import jax
import jax.numpy as jnp
import pytest

from keras_dist.mixtures.partial_sums import partial_sums
from keras_dist.mixtures.recognition import find_mixtures
from keras_dist.tracing.jaxpr_evaluation import inlined, live

TOKENS, EXPERTS, WIDTH, HIDDEN = 6, 4, 8, 16


def mixture_of(expert):
    """The mixture of experts that a function computes of tokens, two weights (E, D, M) and one (E, M, D)."""

    def function(x, scores, gate, up, down):
        best, chosen = jax.lax.top_k(scores, 2)
        gates = (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(1)
        return jnp.einsum("etd,te->td", expert(x, gate, up, down), gates)

    shapes = [(TOKENS, WIDTH), (TOKENS, EXPERTS), *[(EXPERTS, WIDTH, HIDDEN)] * 2, (EXPERTS, HIDDEN, WIDTH)]
    program = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    program = inlined(program.jaxpr, program.consts)
    [mixture], _ = find_mixtures(live(program.jaxpr), program.consts)
    return mixture


EXPERTS_BY_NUMBER_OF_SUMS = [
    (lambda x, gate, up, down: jnp.tanh(x @ up) @ down, 1),
    (lambda x, gate, up, down: x @ up @ down, 2),
    (lambda x, gate, up, down: (jax.nn.silu(x @ gate) * (x @ up)) @ down, 2),  # all but the gate, which is activated
    (lambda x, gate, up, down: jnp.square(x @ up) @ down, 1),
    (lambda x, gate, up, down: ((hidden := x @ up) * hidden) @ down, 1),
    (lambda x, gate, up, down: 2 * (jnp.tanh(x @ up) @ down).astype("bfloat16").astype("float32") + 1, 1),
    (lambda x, gate, up, down: jnp.tanh(jnp.tanh(x @ up) @ down), 0),
    (lambda x, gate, up, down: 1 / (jnp.tanh(x @ up) @ down), 0),
    (lambda x, gate, up, down: (out := jnp.tanh(x @ up) @ down) / jnp.exp(out), 0),
]


@pytest.mark.parametrize(("expert", "count"), EXPERTS_BY_NUMBER_OF_SUMS)
def test_products_on_which_the_result_depends_linearly(expert, count):
    assert len(partial_sums(mixture_of(expert))) == count

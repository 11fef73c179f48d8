"""Computes a mixture of experts on a device: for all experts, those that it has, or by an exchange of rows.

Each device has its tokens, and the weights of all experts or of some. If devices with the other experts have the same
tokens, each computes the rows of its experts, and what they have for a token is summed afterwards. If they have other
tokens, rows are sent to the devices of their experts, and results back (`exchange.py`). In both cases their number
depends on the routing: there is memory for a quarter more than on average, and more take several rounds.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_dist.mixtures.exchange import computed_by_exchange
from keras_dist.mixtures.figures import capacity_rows
from keras_dist.mixtures.recognition import Mixture
from keras_dist.mixtures.rounds import summed_in_rounds
from keras_dist.mixtures.routing import Groups, Routing
from keras_dist.mixtures.rows import GroupedProduct, compute_rows
from keras_dist.mixtures.shards import Shards

_SPARE_ROWS = 1.25  # times the rows that a device with some of the experts has on average


def compute_mixture(
    mixture: Mixture,
    product: Callable[..., jax.Array],
    operands: Sequence[jax.Array],
    indices: jax.Array,
    shards: Shards,
    capacity: float | None = None,
) -> jax.Array:
    """Returns the sum over experts, for operands and with a result in their tokens-first form.

    With weights that are sharded, it is a summand or a shard of the result, as `shards` has it.

    Args:
        mixture: What to compute.
        product: Multiplies rows with the weights of their experts, as a `GroupedProduct` does. It is passed the
            fraction of the rows that routing fills on average, too.
        operands: Those of `mixture.operands`, each (tokens..., E, others...), as far as it has these dims.
        indices: The experts that each token chooses, (tokens..., k).
        shards: How weights are sharded.
        capacity: The most rows of an expert, in multiples of the mean of all experts; others are left out.
    """
    tokens = indices.shape[:-1]
    indices = indices.reshape(-1, indices.shape[-1])
    flat: list[Any] = []
    for variable, value in zip(mixture.operands, operands, strict=True):
        has_tokens = mixture.places[variable].tokens is not None
        flat.append(value.reshape(-1, *value.shape[len(tokens) :]) if has_tokens else value)
    num_experts, first, compute = mixture.choice.num_experts, None, _of_all_experts
    if shards.exchange:
        compute = _by_exchange
    elif shards.expert_axes:
        compute = _of_some_experts
        num_experts //= shards.num_expert_shards
        first = jax.lax.axis_index(shards.expert_axes) * num_experts
    routing = Routing.of(indices, num_experts, first)
    if capacity is not None:
        routing = routing.capped(capacity_rows(capacity, indices.size, mixture.choice.num_experts))
    sums = compute(mixture, product, flat, routing, shards)
    return sums.reshape(*tokens, *sums.shape[1:])


def _of_all_experts(mixture, product, operands, routing, shards):
    given = _with_rows(mixture, routing, operands)
    rows = compute_rows(mixture, _filled(product, 1.0), shards, routing.groups, given)
    return routing.summed(rows)


def _of_some_experts(mixture, product, operands, routing, shards):
    num_pairs = routing.indices.size
    mean = num_pairs / shards.num_expert_shards
    num_rows = min(math.ceil(_SPARE_ROWS * mean), num_pairs)

    def in_round(number, trained, others):
        *others, routing = others
        window = routing.window(number * num_rows, num_rows)
        given = _with_rows(mixture, window, (*trained, *others))
        return window.summed(compute_rows(mixture, _filled(product, mean / num_rows), shards, window.groups, given))

    trained = [value for value in operands if jnp.issubdtype(value.dtype, jnp.inexact)]  # those come first
    others = [*operands[len(trained) :], routing]
    if num_rows == num_pairs:
        return in_round(0, trained, others)
    num_rounds = jnp.maximum(-(-routing.groups.sizes.sum() // num_rows), 1)
    return summed_in_rounds(in_round, num_rounds, trained, others)


def _by_exchange(mixture, product, operands, routing, shards):
    is_row = [mixture.places[variable].tokens is not None for variable in mixture.operands]
    tokens, weights = (list(itertools.compress(operands, chosen)) for chosen in (is_row, map(operator.not_, is_row)))
    variables = list(itertools.compress(mixture.operands, is_row))

    def rows_of(tokens, routing):
        return [_rows_of(mixture, routing, *each) for each in zip(variables, tokens, strict=True)]

    def computed(rows, weights, sizes):
        rows_and_weights = iter(weights), iter(rows)
        received = [next(rows_and_weights[is_in]) for is_in in is_row]
        num_rows = rows[0].shape[0]
        filled = min(routing.indices.size / num_rows, 1.0)
        given = dict(zip(mixture.operands, received, strict=True))
        results = compute_rows(mixture, _filled(product, filled), shards, Groups.of(sizes, num_rows), given)
        return results.astype(mixture.summand_dtype)

    def collect(results, routing):
        return routing.summed(results.astype(mixture.output.aval.dtype))

    rows, collected = jax.tree_util.Partial(rows_of, tokens, routing), jax.tree_util.Partial(collect, routing=routing)
    sizes = routing.groups.sizes
    return computed_by_exchange(computed, rows, weights, sizes, shards.expert_axes, shards.exchange, collected)


def _filled(product: Callable[..., jax.Array], fraction: float) -> GroupedProduct:
    return lambda *operands: product(*operands, fraction)


def _with_rows(mixture: Mixture, routing: Routing, operands: Sequence[jax.Array]) -> Mapping[Any, jax.Array]:
    """Returns the operands, by variable, those with tokens as rows."""
    given = zip(mixture.operands, operands, strict=True)
    return {variable: _rows_of(mixture, routing, variable, value) for variable, value in given}


def _rows_of(mixture: Mixture, routing: Routing, variable: Any, value: jax.Array) -> jax.Array:
    """Returns an operand, with tokens as rows if it has tokens."""
    place = mixture.places[variable]
    if place.tokens is None:
        return value
    return routing.of_tokens(value) if place.expert is None else routing.of_pairs(value)

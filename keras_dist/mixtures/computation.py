"""Computes a mixture of experts on a device: for all experts, those that it has, or by an exchange of rows.

Each device has its tokens, and the weights of all experts or of some. If devices with the other experts have the same
tokens, each computes the rows of its experts, and what they have for a token is summed afterwards. If they have other
tokens, rows are sent to the devices of their experts, and results back (`exchange.py`). In both cases their number
depends on the routing: there is memory for a quarter more than on average, and more take several rounds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_dist.mixtures.exchange import computed_by_exchange
from keras_dist.mixtures.figures import capacity_rows
from keras_dist.mixtures.recognition import Mixture
from keras_dist.mixtures.rounds import summed_in_rounds
from keras_dist.mixtures.routing import Groups, Routing
from keras_dist.mixtures.rows import GroupedProduct, compute_one_token, compute_rows
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
    if mixture.num_tokens == 1:
        return compute_one_token(mixture, operands, indices)
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
    given, num_pairs = _with_rows(mixture, routing, operands), routing.indices.size
    is_row = {variable: mixture.places[variable].tokens is not None for variable in given}

    def computed(rows, weights, sizes):
        rows_or_weights = {True: iter(rows), False: iter(weights)}
        received = {variable: next(rows_or_weights[is_row[variable]]) for variable in given}
        num_rows = rows[0].shape[0]
        groups = Groups.of(sizes, num_rows)
        results = compute_rows(mixture, _filled(product, num_pairs / num_rows), shards, groups, received)
        return results.astype(mixture.summand_dtype)

    rows, weights = ([given[variable] for variable in given if is_row[variable] == is_in] for is_in in (True, False))
    results = computed_by_exchange(computed, rows, weights, routing.groups.sizes, shards.expert_axes, shards.exchange)
    return routing.summed(results.astype(mixture.output.aval.dtype))


def _filled(product: Callable[..., jax.Array], fraction: float) -> GroupedProduct:
    return lambda rows, weights, sizes: product(rows, weights, sizes, fraction)


def _with_rows(mixture: Mixture, routing: Routing, operands: Sequence[jax.Array]) -> Mapping[Any, jax.Array]:
    """Returns the operands, by variable, those with tokens as rows."""
    given = dict(zip(mixture.operands, operands, strict=True))
    for variable, value in given.items():
        place = mixture.places[variable]
        if place.tokens is not None:
            given[variable] = routing.of_tokens(value) if place.expert is None else routing.of_pairs(value)
    return given

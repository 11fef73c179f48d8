"""Puts the chosen pairs of tokens and experts into rows, sorted by expert, and adds up the rows of each token.

T tokens choose k of E experts each, so there are R = T k rows. Both directions only gather, as do their gradients:
scatters of rows are slow on all platforms.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

EXPERT_LOAD = "expert_load"
"""The name of the largest load among a step's logs."""


class Routing(NamedTuple):
    """Which row each pair of a token and a chosen expert has."""

    indices: jax.Array  # (T, k), the experts that each token chooses
    order: jax.Array  # (R,), of each row the number of its pair; pair t k + j is choice j of token t
    rows: jax.Array  # (R,), of each pair the number of its row
    sizes: jax.Array  # (E,), the number of rows of each expert
    experts: jax.Array  # (R,), of each row the expert

    @classmethod
    def of(cls, indices: jax.Array, num_experts: int) -> "Routing":
        """Sorts the pairs by expert. `indices` (T, k) has the experts that each token chooses."""
        flat = indices.reshape(-1)
        experts, order = jax.lax.sort_key_val(flat, jnp.arange(flat.size, dtype=flat.dtype))
        _, rows = jax.lax.sort_key_val(order, jnp.arange(flat.size, dtype=flat.dtype))
        ends = jnp.searchsorted(experts, jnp.arange(num_experts, dtype=flat.dtype), side="right").astype("int32")
        return cls(indices, order, rows, jnp.diff(ends, prepend=0), experts)

    def of_tokens(self, values: jax.Array) -> jax.Array:
        """Returns the row of each token, (T, ...), for each of its experts: (R, ...)."""
        return _tokens_to_rows(values, self.order, self.rows, self.indices.shape[1])

    def of_pairs(self, values: jax.Array) -> jax.Array:
        """Returns of values for all pairs, (T, E, ...), those of the chosen ones, (R, ...)."""
        chosen = _chosen_of_all(values, self.indices, values.shape[1])
        return _pairs_to_rows(chosen.reshape(-1, *chosen.shape[2:]), self.order, self.rows)

    def of_experts(self, values: jax.Array) -> jax.Array:
        """Returns for each row the value of its expert, of (E, ...): (R, ...)."""
        return _experts_to_rows(values, self.experts, values.shape[0])

    def summed(self, rows: jax.Array) -> jax.Array:
        """Returns the sum of the rows of each token, (T, ...), of (R, ...)."""
        return _rows_to_tokens(rows, self.order, self.rows, self.indices.shape[1])


def expert_load(indices: jax.Array, num_experts: int) -> jax.Array:
    """Returns how many times the mean of all experts the fullest one has. `indices` (..., k) are those of the chosen.

    >>> expert_load(jnp.array([[0, 1], [0, 2], [0, 3]]), 4)
    Array(2., dtype=float32)
    """
    is_chosen = indices[..., None] == jnp.arange(num_experts, dtype=indices.dtype)
    counts = jnp.sum(is_chosen, axis=range(indices.ndim), dtype="float32")
    return jnp.max(counts) * num_experts / indices.size


def _at(values: jax.Array, indices: jax.Array) -> jax.Array:
    return values.at[indices].get(mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _tokens_to_rows(values, order, places, num_chosen):
    return _at(values, order // num_chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rows_to_tokens(rows, order, places, num_chosen):
    pairs = _at(rows, places)
    return pairs.reshape(-1, num_chosen, *rows.shape[1:]).sum(1).astype(rows.dtype)


# The gradient of either is the other one.
for _function, _gradient in ((_tokens_to_rows, _rows_to_tokens), (_rows_to_tokens, _tokens_to_rows)):
    _function.defvjp(
        lambda values, *rest, function=_function: (function(values, *rest), rest[:2]),
        lambda num_chosen, saved, gradient, function=_gradient: (function(gradient, *saved, num_chosen), None, None),
    )


def _where_chosen(values: jax.Array, indices: jax.Array, num_experts: int, summed: int) -> jax.Array:
    """Returns the sum over a dim of values (T, k or 1, E or 1, ...) where expert e is choice j of token t."""
    is_chosen = indices[..., None] == jnp.arange(num_experts, dtype=indices.dtype)  # (T, k, E)
    is_chosen = is_chosen.reshape(*is_chosen.shape, *[1] * (values.ndim - 3))
    return jnp.where(is_chosen, values, 0).sum(summed).astype(values.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _chosen_of_all(values, indices, num_experts):
    return _where_chosen(values[:, None], indices, num_experts, 2)  # a sum of one number


_chosen_of_all.defvjp(
    lambda values, indices, num_experts: (_chosen_of_all(values, indices, num_experts), indices),
    lambda num_experts, indices, gradient: (_where_chosen(gradient[:, :, None], indices, num_experts, 1), None),
)


@jax.custom_vjp
def _pairs_to_rows(values, order, places):
    return _at(values, order)


_pairs_to_rows.defvjp(
    lambda values, order, places: (_at(values, order), places),
    lambda places, gradient: (_at(gradient, places), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _experts_to_rows(values, experts, num_experts):
    return _at(values, experts)


_experts_to_rows.defvjp(
    lambda values, experts, num_experts: (_at(values, experts), experts),
    lambda num_experts, experts, gradient: (
        jax.ops.segment_sum(gradient, experts, num_experts, indices_are_sorted=True),
        None,
    ),
)

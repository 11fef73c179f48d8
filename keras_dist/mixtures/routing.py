"""Puts the chosen pairs of tokens and experts into rows, sorted by expert, and adds up the rows of each token.

T tokens choose k of E experts each, so there are R = T k rows. Both directions only gather, as do their gradients:
scatters of rows are slow on all platforms.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

_ALL, _SOME = "promise_in_bounds", "fill"  # how rows are looked up: each has a pair, or there are some without


@functools.partial(jax.tree_util.register_dataclass, data_fields=["sizes", "experts"], meta_fields=["mode"])
@dataclass(frozen=True)
class Groups:
    """Rows that are sorted by expert. The last ones may be of none: what these have is zero, also as a gradient."""

    sizes: jax.Array  # (E,), the number of rows of each expert
    experts: jax.Array  # (R,), of each row the expert, or E
    mode: str = _ALL

    @classmethod
    def of(cls, sizes: jax.Array, num_rows: int) -> "Groups":
        """Returns the groups of `num_rows` rows, of which the first ones are those of experts with these sizes."""
        number = jnp.arange(num_rows, dtype=sizes.dtype)
        return cls(sizes, (number[:, None] >= jnp.cumsum(sizes)).sum(1, dtype=sizes.dtype), _SOME)

    def of_experts(self, values: jax.Array) -> jax.Array:
        """Returns for each row the value of its expert, of (E, ...): (R, ...)."""
        return _experts_to_rows(values, self.experts, values.shape[0], self.mode)

    def only_rows(self, rows: jax.Array) -> jax.Array:
        """Returns rows (R, ...), and zeros where they are of no expert."""
        if self.mode == _ALL:
            return rows
        is_row = self.experts < self.sizes.size
        return jnp.where(is_row.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["indices", "order", "rows", "groups"], meta_fields=[])
@dataclass(frozen=True)
class Routing:
    """Which row each pair of a token and a chosen expert has, if it has one."""

    indices: jax.Array  # (T, k), the experts that each token chooses
    order: jax.Array  # (R,), of each row the number of its pair, or T k; pair t k + j is choice j of token t
    rows: jax.Array  # (T k,), of each pair the number of its row, or R
    groups: Groups

    @classmethod
    def of(cls, indices: jax.Array, num_experts: int, first_expert: jax.Array | None = None) -> "Routing":
        """Sorts the pairs by expert.

        Args:
            indices: The experts that each token chooses, (T, k).
            num_experts: The number of experts.
            first_expert: The first one of them, if there are others. Pairs with others, and with none (-1, say), come
                last, and `window` returns the routing without them.
        """
        flat = indices.reshape(-1)
        if first_expert is not None:
            flat = flat - first_expert
        flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
        experts, order = jax.lax.sort_key_val(flat, jnp.arange(flat.size, dtype=flat.dtype))
        _, rows = jax.lax.sort_key_val(order, jnp.arange(flat.size, dtype=flat.dtype))
        sizes = (flat[:, None] == jnp.arange(num_experts, dtype=flat.dtype)).sum(0, dtype=jnp.int32)
        return cls(indices, order, rows, Groups(sizes, experts))

    def capped(self, capacity: int) -> "Routing":
        """Returns the routing of the first rows of each expert, at most `capacity` of each."""
        sizes, num_rows, num_experts = self.groups.sizes, self.order.size, self.groups.sizes.size
        groups = Groups.of(jnp.minimum(sizes, capacity), num_rows)
        begins, new_begins = (jnp.cumsum(each) - each for each in (sizes, groups.sizes))
        moved = begins - new_begins  # by how many rows those of an expert follow earlier ones
        number = jnp.arange(num_rows, dtype=sizes.dtype)
        old = number + moved.at[groups.experts].get(mode="clip")
        order = jnp.where(groups.experts < num_experts, self.order.at[old].get(mode="clip"), num_rows)
        expert = self.groups.experts[self.rows]  # of each pair
        is_kept = (expert < num_experts) & (self.rows - begins.at[expert].get(mode="clip") < capacity)
        rows = jnp.where(is_kept, self.rows - moved.at[expert].get(mode="clip"), num_rows)
        return replace(self, order=order, rows=rows.astype(self.rows.dtype), groups=groups)

    def window(self, start: jax.Array | int, size: int) -> "Routing":
        """Returns the routing of `size` rows from `start` on, as far as there are rows of experts."""
        ends = jnp.cumsum(self.groups.sizes)
        groups = Groups.of(jnp.diff(jnp.clip(ends - start, 0, size), prepend=0), size)
        order = self.order.at[start + jnp.arange(size)].get(mode="fill", fill_value=self.order.size)
        order = jnp.where(groups.experts < groups.sizes.size, order, self.order.size)
        is_here = (self.rows >= start) & (self.rows < jnp.minimum(start + size, ends[-1]))
        return replace(self, order=order, rows=jnp.where(is_here, self.rows - start, size), groups=groups)

    def of_tokens(self, values: jax.Array) -> jax.Array:
        """Returns the row of each token, (T, ...), for each of its experts: (R, ...)."""
        return _tokens_to_rows(values, self.order, self.rows, self.indices.shape[1], self.groups.mode)

    def of_pairs(self, values: jax.Array) -> jax.Array:
        """Returns of values for all pairs, (T, E, ...), those of the chosen ones, (R, ...)."""
        chosen: Any = _chosen_of_all(values, self.indices, values.shape[1])
        return _pairs_to_rows(chosen.reshape(-1, *chosen.shape[2:]), self.order, self.rows, self.groups.mode)

    def summed(self, rows: jax.Array) -> jax.Array:
        """Returns the sum of the rows of each token, (T, ...), of (R, ...)."""
        return _rows_to_tokens(rows, self.order, self.rows, self.indices.shape[1], self.groups.mode)


def _at(values: jax.Array, indices: jax.Array, mode: str) -> jax.Array:
    return values.at[indices].get(mode=mode, fill_value=None if mode == _ALL else 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _tokens_to_rows(values, order, places, num_chosen, mode):
    return _at(values, order // num_chosen, mode)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rows_to_tokens(rows, order, places, num_chosen, mode):
    # A gather for each choice. One for all of them takes four times the memory on TPUs: XLA gathers in float32, and
    # rearranges (T k, ...) to (T, k, ...).
    wide = jnp.promote_types(rows.dtype, "float32")
    choices = (_at(rows, each, mode).astype(wide) for each in places.reshape(-1, num_chosen).T)
    return functools.reduce(jnp.add, choices).astype(rows.dtype)


# The gradient of either is the other one.
for _function, _gradient in ((_tokens_to_rows, _rows_to_tokens), (_rows_to_tokens, _tokens_to_rows)):
    _function.defvjp(
        lambda values, order, places, *static, function=_function: (
            function(values, order, places, *static),
            (order, places),
        ),
        lambda num_chosen, mode, saved, gradient, function=_gradient: (
            function(gradient, *saved, num_chosen, mode),
            None,
            None,
        ),
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _pairs_to_rows(values, order, places, mode):
    return _at(values, order, mode)


_pairs_to_rows.defvjp(
    lambda values, order, places, mode: (_at(values, order, mode), places),
    lambda mode, places, gradient: (_at(gradient, places, mode), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _experts_to_rows(values, experts, num_experts, mode):
    return _at(values, experts, mode)


_experts_to_rows.defvjp(
    lambda values, experts, num_experts, mode: (_at(values, experts, mode), experts),
    lambda num_experts, mode, experts, gradient: (
        jax.ops.segment_sum(gradient, experts, num_experts, indices_are_sorted=True),
        None,
    ),
)

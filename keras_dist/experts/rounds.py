"""Grouped matrix products in plain XLA, for GPUs: rounds of one batched product of all experts.

A loop over blocks starts some kernels for each of hundreds of blocks, which takes longer than the blocks do on a GPU.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_ALIGNMENT, _ALIGNED = 8, 256  # tensor cores take multiples of 8; from so many rows on, these are few to spare
_MIN_ROWS = 32  # of an expert and a round: fewer take no less time, which is that to read the weights


def rows_per_round(num_rows: int, num_experts: int) -> int:
    """Returns how many rows of each expert a round multiplies: a quarter more than experts have on average.

    Example: 4 experts with 70, 0, 50 and 40 rows need two rounds of 50 rows each. The second one multiplies the last 20
    rows of the first expert, and rows that are not used.
    """
    wanted = max(-(-5 * num_rows // (4 * num_experts)), _MIN_ROWS)
    return min(wanted + (-wanted % _ALIGNMENT if wanted >= _ALIGNED else 0), num_rows)


def product_in_rounds(rows: jax.Array, weights: jax.Array, sizes: jax.Array, is_transposed: bool) -> jax.Array:
    """Multiplies each row (R, K) with the weights (E, K, N) of its expert, or with their transposes (E, N, K)."""
    num_rows, num_experts = rows.shape[0], weights.shape[0]
    expert, position = _experts_and_positions(sizes, num_rows)
    if num_rows < num_experts:
        # XLA:GPU reads the weights where they are, and sums.
        pattern = "rk,rnk->rn" if is_transposed else "rk,rkn->rn"
        return jnp.einsum(pattern, rows, jnp.take(weights, expert, axis=0))
    capacity = rows_per_round(num_rows, num_experts)
    round_of_row, index = position // capacity, expert * capacity + position % capacity

    def multiply(state):
        number, output = state
        buffers, _ = _buffers(rows, sizes, number, capacity)
        products = jnp.einsum("eck,enk->ecn" if is_transposed else "eck,ekn->ecn", buffers, weights)
        found = jnp.take(products.reshape(-1, output.shape[1]), index, axis=0)
        return number + 1, jnp.where((round_of_row == number)[:, None], found, output)

    output = jnp.zeros((num_rows, weights.shape[1 if is_transposed else 2]), rows.dtype)
    return _all_rounds(multiply, output, sizes, capacity)


def weight_gradient_in_rounds(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the sum of the products of rows (R, K) and the gradient of outputs (R, N) of each expert, (E, K, N)."""
    num_experts = sizes.shape[0]
    capacity = rows_per_round(rows.shape[0], num_experts)

    def add(state):
        number, total = state
        own_rows, is_own = _buffers(rows, sizes, number, capacity)
        own_gradient, _ = _buffers(gradient, sizes, number, capacity)
        own_rows, own_gradient = (jnp.where(is_own[..., None], each, 0) for each in (own_rows, own_gradient))
        products = jnp.einsum("eck,ecn->ekn", own_rows, own_gradient, preferred_element_type=jnp.float32)
        return number + 1, total + products

    total = jnp.zeros((num_experts, rows.shape[1], gradient.shape[1]), jnp.float32)
    return _all_rounds(add, total, sizes, capacity).astype(rows.dtype)


def _all_rounds(body: Callable, initial: jax.Array, sizes: jax.Array, capacity: int) -> jax.Array:
    num_rounds = -(-sizes.max() // capacity)
    return jax.lax.while_loop(lambda state: state[0] < num_rounds, body, (jnp.int32(0), initial))[1]


def _experts_and_positions(sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the expert of each row, and the number of the row among those of its expert."""
    ends = jnp.cumsum(sizes)
    number = jnp.arange(num_rows, dtype=sizes.dtype)
    expert = jnp.minimum((number[:, None] >= ends).sum(axis=1, dtype=sizes.dtype), sizes.shape[0] - 1)
    return expert, number - (ends - sizes)[expert]


def _buffers(rows: jax.Array, sizes: jax.Array, number: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of each expert (E, C, K) in a round, and which of them are its own, (E, C)."""
    starts = jnp.cumsum(sizes) - sizes
    position = number * capacity + jnp.arange(capacity, dtype=sizes.dtype)
    is_own = position < sizes[:, None]
    index = jnp.where(is_own, starts[:, None] + position, 0)
    return jnp.take(rows, index, axis=0), is_own

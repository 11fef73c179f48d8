"""Grouped matrix products in plain XLA, for GPUs and TPUs: one batched product of all experts, then the rest in blocks.

A loop over blocks starts several kernels for each of hundreds of blocks, which take longer than the blocks on a GPU.
Here the first rows of every expert are multiplied at once, a quarter more than experts have on average. Blocks have
only the rows that are left of experts with more, and the loop ends after these.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_ALIGNMENT, _ALIGNED = 8, 256  # tensor cores take multiples of 8; from so many rows on, these are few to spare
MIN_ROWS = 32  # of an expert: fewer take no less time, which is that to read the weights


def rows_at_once(num_rows: int, num_experts: int) -> int:
    """Returns how many rows of each expert are multiplied at once."""
    wanted = max(-(-5 * num_rows // (4 * num_experts)), MIN_ROWS)
    return min(wanted + (-wanted % _ALIGNMENT if wanted >= _ALIGNED else 0), num_rows)


def rows_of_blocks(num_rows: int, num_experts: int) -> int:
    """Returns how many rows a block of the rest has: a quarter of those that an expert has on average."""
    return max(num_rows // max(4 * num_experts, 32), 1)


def product_batched(rows: jax.Array, weights: jax.Array, sizes: jax.Array, is_transposed: bool) -> jax.Array:
    """Multiplies each row (R, K) with the weights (E, K, N) of its expert, or with their transposes (E, N, K)."""
    num_rows, num_experts = rows.shape[0], weights.shape[0]
    ends = jnp.cumsum(sizes)
    number = jnp.arange(num_rows, dtype=sizes.dtype)
    expert = jnp.minimum((number[:, None] >= ends).sum(axis=1, dtype=sizes.dtype), num_experts - 1)
    if num_rows < num_experts:
        # XLA:GPU reads the weights where they are, and sums.
        return jnp.einsum(
            "rk,rnk->rn" if is_transposed else "rk,rkn->rn", rows, jnp.take(weights, expert, axis=0, mode="clip")
        )
    capacity = rows_at_once(num_rows, num_experts)
    buffers, _ = _first_rows(rows, sizes, capacity)
    products = jnp.einsum("eck,enk->ecn" if is_transposed else "eck,ekn->ecn", buffers, weights)
    position = jnp.minimum(number - (ends - sizes)[expert], capacity - 1)
    output = jnp.take(products.reshape(-1, products.shape[-1]), expert * capacity + position, axis=0, mode="clip")

    def multiply(output, expert, start, is_own):
        matrix = jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        computed = _slice(rows, start, is_own) @ (matrix.T if is_transposed else matrix)
        computed = jnp.where(is_own[:, None], computed, _slice(output, start, is_own))
        return jax.lax.dynamic_update_slice_in_dim(output, computed, start, 0)

    return _rest_in_blocks(multiply, output, sizes, num_rows, capacity)


def weight_gradient_batched(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the sum of the products of rows (R, K) and the gradient of outputs (R, N) of each expert, (E, K, N)."""
    num_rows, num_experts = rows.shape[0], sizes.shape[0]
    capacity = rows_at_once(num_rows, num_experts)
    first = (jnp.where(is_own[..., None], each, 0) for each, is_own in (
        _first_rows(each, sizes, capacity) for each in (rows, gradient)
    ))  # fmt: skip
    total = jnp.einsum("eck,ecn->ekn", *first, preferred_element_type=jnp.float32)

    def add(total, expert, start, is_own):
        own_rows, own_gradient = (
            jnp.where(is_own[:, None], _slice(each, start, is_own), 0) for each in (rows, gradient)
        )
        added = jnp.dot(own_rows.T, own_gradient, preferred_element_type=jnp.float32)
        added += jax.lax.dynamic_index_in_dim(total, expert, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, added, expert, 0)

    return _rest_in_blocks(add, total, sizes, num_rows, capacity).astype(rows.dtype)


def _first_rows(rows: jax.Array, sizes: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first rows of each expert (E, C, K), and which of them are its own, (E, C)."""
    position = jnp.arange(capacity, dtype=sizes.dtype)
    is_own = position < sizes[:, None]
    index = jnp.where(is_own, (jnp.cumsum(sizes) - sizes)[:, None] + position, 0)
    return jnp.take(rows, index, axis=0, mode="clip"), is_own


def _rest_in_blocks(body: Callable, value: jax.Array, sizes: jax.Array, num_rows: int, capacity: int) -> jax.Array:
    """Calls a function with a value, and the expert and rows of each block of the rest; it returns the next value.

    The rows are the first one, and which of the block's are of the expert. A block does not reach beyond the last row:
    there it starts earlier instead.

    Example: of 70 rows of an expert 50 were multiplied at once. In blocks of 16 rows, the rest takes 2 blocks, of which
    the second one has 4 rows that are of the expert.
    """
    size = min(rows_of_blocks(num_rows, sizes.shape[0]), num_rows)
    ends = jnp.cumsum(sizes)
    blocks = -(-jnp.maximum(sizes - capacity, 0) // size)
    block_ends = jnp.cumsum(blocks)

    def step(state):
        number, value = state
        expert = (number >= block_ends).sum(dtype=sizes.dtype)
        start = (ends - sizes)[expert] + capacity + (number - (block_ends - blocks)[expert]) * size
        first = jnp.minimum(start, num_rows - size)
        index = first + jnp.arange(size, dtype=sizes.dtype)
        return number + 1, body(value, expert, first, (index >= start) & (index < ends[expert]))

    return jax.lax.while_loop(lambda state: state[0] < block_ends[-1], step, (jnp.zeros((), sizes.dtype), value))[1]


def _slice(array: jax.Array, start: jax.Array, is_own: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, start, is_own.shape[0])

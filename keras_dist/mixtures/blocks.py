"""Grouped matrix products in plain XLA: a loop over blocks of rows, each of one expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_MAX_BLOCK_ROWS = 128


class _Blocks(NamedTuple):
    """Blocks of b rows. Those of one expert follow each other, and its last one may reach into rows of the next.

    Example: 3 experts with 3, 0 and 2 of 5 rows, in blocks of 2 rows, of which there are 3 under any routing:

        expert   0  0  2
        start    0  2  3
        rows     2  1  2

    The second block reads row 3, too, which is of expert 2. What it computes there is overwritten by the third block.
    """

    expert: jax.Array  # of each block
    start: jax.Array  # its first row; for blocks that this routing does not need, the number of rows
    num_rows: jax.Array  # its rows that are of its expert, 0 for blocks that this routing does not need
    is_first: jax.Array  # whether it is the first of its expert


def block_rows(num_rows: int, num_experts: int) -> int:
    """Returns the number of rows of a block: a power of two of at most a quarter of the rows that an expert has.

    So the blocks have at most a quarter more rows than there are, under any routing.
    """
    wanted = max(min(num_rows // (4 * num_experts), _MAX_BLOCK_ROWS), 1)
    return 1 << (wanted.bit_length() - 1)


def num_blocks(num_rows: int, num_experts: int) -> int:
    """Returns how many blocks the rows need in the worst case: each expert but one has one row in its last block."""
    used = min(num_rows, num_experts)
    return (num_rows - used) // block_rows(num_rows, num_experts) + used


def product_in_blocks(rows: jax.Array, weights: jax.Array, sizes: jax.Array, is_transposed: bool) -> jax.Array:
    """Multiplies each row (R, K) with the weights (E, K, N) of its expert, or with their transposes (E, N, K)."""
    num_rows, num_experts = rows.shape[0], weights.shape[0]
    size = block_rows(num_rows, num_experts)
    width = weights.shape[1 if is_transposed else 2]
    padded = jnp.pad(rows, ((0, size), (0, 0)))

    def add_block(output, block):
        def product():
            matrix = jax.lax.dynamic_index_in_dim(weights, block.expert, keepdims=False)
            return _rows_at(padded, block, size) @ (matrix.T if is_transposed else matrix)

        computed = jax.lax.cond(block.num_rows > 0, product, lambda: jnp.zeros((size, width), rows.dtype))
        return jax.lax.dynamic_update_slice_in_dim(output, computed, block.start, 0), None

    output = jnp.zeros((num_rows + size, width), rows.dtype)
    return jax.lax.scan(add_block, output, _blocks_of(sizes, num_rows))[0][:num_rows]


def weight_gradient_in_blocks(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the sum of the products of rows (R, K) and the gradient of outputs (R, N) of each expert, (E, K, N)."""
    num_rows, num_experts = rows.shape[0], sizes.shape[0]
    size = block_rows(num_rows, num_experts)
    shape = rows.shape[1], gradient.shape[1]
    rows, gradient = (jnp.pad(each, ((0, size), (0, 0))) for each in (rows, gradient))

    def add_block(carry, block):
        total, output = carry

        def product():
            is_own = jnp.arange(size) < block.num_rows
            own_rows, own_gradient = (
                jnp.where(is_own[:, None], _rows_at(each, block, size), 0) for each in (rows, gradient)
            )
            return jnp.dot(own_rows.T, own_gradient, preferred_element_type=jnp.float32)

        total = jnp.where(block.is_first, 0, total)
        total += jax.lax.cond(block.num_rows > 0, product, lambda: jnp.zeros(shape, jnp.float32))
        return (total, output.at[block.expert].set(total.astype(output.dtype))), None

    carry = jnp.zeros(shape, jnp.float32), jnp.zeros((num_experts, *shape), rows.dtype)
    return jax.lax.scan(add_block, carry, _blocks_of(sizes, num_rows))[0][1]


def _rows_at(padded: jax.Array, block: _Blocks, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(padded, block.start, size)


def _blocks_of(sizes: jax.Array, num_rows: int) -> _Blocks:
    """Returns the blocks of experts with these numbers of rows."""
    size = block_rows(num_rows, sizes.shape[0])
    ends, needed = jnp.cumsum(sizes), -(-sizes // size)
    block_ends = jnp.cumsum(needed)
    number = jnp.arange(num_blocks(num_rows, sizes.shape[0]), dtype=sizes.dtype)
    # Blocks that are not needed are of the last expert with rows, so that they change no other one.
    last_expert = jnp.argmax(jnp.where(sizes > 0, jnp.arange(sizes.shape[0]), -1))
    expert = jnp.minimum((number[:, None] >= block_ends).sum(axis=1), last_expert).astype(sizes.dtype)
    position = number - (block_ends - needed)[expert]
    start = (ends - sizes)[expert] + position * size
    count = jnp.clip(ends[expert] - start, 0, size)
    return _Blocks(expert, jnp.where(count > 0, start, num_rows), count, position == 0)

"""JAX's random numbers drawn in one pass over memory: the same bits as JAX's default generator, several times sooner.

On CPU JAX compiles its generator as a loop over whole arrays, to compile sooner. The arithmetic below has no loop, is
fused with what uses it, and compiles sooner still.
"""

import math
from typing import Any

import jax
import jax.extend.random as random_impls
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_THREEFRY = random_impls.threefry_prng_impl


def fused_key(seed: jax.Array) -> jax.Array:
    """Returns a key that draws the numbers of JAX's default generator in one pass.

    Args:
        seed: the data of a threefry key, uint32 of shape (2,).

    Returns:
        A typed key, for the functions of `jax.random`.
    """
    config: Any = jax.config
    if config.jax_default_prng_impl != "threefry2x32" or not config.jax_threefry_partitionable:
        return seed
    return jax.random.wrap_key_data(seed, impl=_FUSED)


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    if bit_width != 32 or not 0 < size <= np.iinfo(np.uint32).max:
        return _THREEFRY.random_bits(key, bit_width, shape)
    first, second = _threefry(key, _positions(shape))
    return first ^ second


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """The position of each element in memory. A sum over dims is sharded as they are, without a division."""
    strides = [np.uint32(math.prod(shape[dim + 1 :])) for dim in range(len(shape))]
    return sum((lax.broadcasted_iota(np.uint32, shape, dim) * strides[dim] for dim in range(len(shape))), jnp.uint32(0))


def _threefry(key: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds. Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"."""
    keys = key[0], key[1], key[0] ^ key[1] ^ _PARITY
    first, second = keys[0], positions + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            first = first + second
            rotated = lax.shift_left(second, np.uint32(distance))
            second = first ^ (rotated | lax.shift_right_logical(second, np.uint32(32 - distance)))
        first = first + keys[(group + 1) % 3]
        second = second + (keys[(group + 2) % 3] + np.uint32(group + 1))
        if group % 2:
            # No number is less than how many of its bits are set. This cuts the chain of additions, whose length the
            # vectorizer of JAX 0.12's CPU compiler takes exponential time for: all 20 rounds at once 100 ms.
            first = lax.max(first, lax.population_count(first))
    return first, second


_FUSED = random_impls.define_prng_impl(
    key_shape=_THREEFRY.key_shape,
    seed=_THREEFRY.seed,
    split=_THREEFRY.split,
    random_bits=_random_bits,
    fold_in=_THREEFRY.fold_in,
    name="keras_dist_fused_threefry2x32",
    tag="kdfry",
)

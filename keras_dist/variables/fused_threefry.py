"""JAX's default random bits, computed in one fused pass over memory.

XLA:CPU compiles JAX's own threefry as a loop over whole arrays. The unrolled version below draws the same bits and
fuses with the initializer that uses them. Without it `materialize` takes 2.6 times as long
(`benchmarks/materialize.py`).
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
    """Returns a key of threefry data (uint32, shape (2,)) that draws JAX's default random bits in one pass.

    If JAX is configured to use another generator, `seed` itself is returned.
    """
    config: Any = jax.config
    if config.jax_default_prng_impl != "threefry2x32" or not config.jax_threefry_partitionable:
        return seed
    return jax.random.wrap_key_data(seed, impl=_FUSED)


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    if bit_width != 32 or not 0 < size <= np.iinfo(np.uint32).max:
        return _THREEFRY.random_bits(key, bit_width, shape)
    first, second = _threefry(key, _row_major_index(shape))
    return first ^ second


def _row_major_index(shape: tuple[int, ...]) -> jax.Array:
    """The row-major index of each element. As a sum over dims it can be sharded along any of them."""
    strides = [np.uint32(math.prod(shape[dim + 1 :])) for dim in range(len(shape))]
    return sum((lax.broadcasted_iota(np.uint32, shape, dim) * strides[dim] for dim in range(len(shape))), jnp.uint32(0))


def _threefry(key: jax.Array, counter: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds. Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"."""
    keys = key[0], key[1], key[0] ^ key[1] ^ _PARITY
    first, second = keys[0], counter + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            first = first + second
            rotated = lax.shift_left(second, np.uint32(distance))
            second = first ^ (rotated | lax.shift_right_logical(second, np.uint32(32 - distance)))
        first = first + keys[(group + 1) % 3]
        second = second + (keys[(group + 2) % 3] + np.uint32(group + 1))
        if group % 2:
            # max(x, popcount(x)) is x. It splits the long chain of additions that the vectorizer of JAX 0.12's CPU
            # compiler is slow at: a program compiles in 0.11 s of CPU time instead of 0.17 s.
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

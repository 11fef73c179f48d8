"""Pads operands of attention."""

import jax
import jax.numpy as jnp


def pad_dim(array: jax.Array, dim: int, size: int) -> jax.Array:
    """Pads a dim with zeros at its end, up to a size."""
    missing = size - array.shape[dim]
    if not missing:
        return array
    return jnp.pad(array, [(0, missing if number == dim % array.ndim else 0) for number in range(array.ndim)])

"""Exchanges operands of attention among devices that hold shards of the same sequences (context parallelism).

A device holds some positions of all its heads. Its attention kernel gets the rest by one of two exchanges:

* all-to-all (Ulysses): all positions of some of the heads, for which the device gives away the other heads. All devices
  have the same work, also under a causal mask. The output is sent back.
* all-gather: all keys and values. The device keeps its queries and its output.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023; Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from keras_dist.strategies.attention_mask import AttentionMask

ALL_TO_ALL, ALL_GATHER = "all-to-all", "all-gather"


def cheapest_exchange(query: Any, key: Any, value: Any, heads: int, key_heads: int, devices: int) -> str:
    """Returns the exchange that sends fewer bytes in a forward pass.

    Args:
        query: The queries (B, T, N, H), with the shape that they have on all devices together; so `key` and `value`.
        heads: Number of query heads of one device.
        key_heads: Number of its key and value heads.
        devices: Number of devices that share a sequence.
    """
    if heads % devices or key_heads % devices:
        return ALL_GATHER
    queries, keys = query.shape[1] * heads, key.shape[1] * key_heads
    sizes = query.shape[-1] + value.shape[-1]
    to_all = (queries * sizes + keys * sizes) / devices
    return ALL_TO_ALL if to_all <= keys * sizes else ALL_GATHER


def scatter_heads(tensor: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Exchanges some positions (dim 1) of all heads (dim 2) for all positions of some heads."""
    return jax.lax.all_to_all(tensor, axes, split_axis=2, concat_axis=1, tiled=True)


def gather_heads(tensor: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Undoes `scatter_heads`."""
    return jax.lax.all_to_all(tensor, axes, split_axis=1, concat_axis=2, tiled=True)


def gather_positions(tensor: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Gathers all positions (dim 1). The gradient is reduce-scattered."""
    return jax.lax.all_gather(tensor, axes, axis=1, tiled=True)


def padded(tensor: Any, dim: int, devices: int, value: Any = 0) -> Any:
    """Pads a dim to a multiple of the number of devices; one of size 1 is the same for all positions."""
    missing = -tensor.shape[dim] % devices
    if not missing or tensor.shape[dim] == 1:
        return tensor
    widths = [(0, missing if number == dim else 0) for number in range(tensor.ndim)]
    return jnp.pad(tensor, widths, constant_values=value)


def padded_mask(mask: AttentionMask, num_queries: int, num_keys: int, devices: int) -> AttentionMask:
    """Extends a mask to padded queries and keys. No query sees a padded key."""
    key_valid, segments = mask.key_valid, mask.segments
    hides_padded_keys = mask.upper is not None and num_queries - 1 + mask.upper < num_keys
    if key_valid is None and num_keys % devices and not hides_padded_keys:
        key_valid = jnp.ones((1, num_keys), bool)
    if segments is not None:
        queries, keys = segments
        of_queries = padded(queries, 1, devices)
        segments = of_queries, of_queries if keys is queries else padded(keys, 1, devices)
    return replace(
        mask,
        query_valid=None if mask.query_valid is None else padded(mask.query_valid, 1, devices, True),
        key_valid=None if key_valid is None else padded(key_valid, 1, devices, False),
        segments=segments,
        dense=None if mask.dense is None else padded(padded(mask.dense, 2, devices), 3, devices),
    )

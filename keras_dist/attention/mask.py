"""Which keys each query of attention sees."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_dist.sharding.per_device import pad_dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which keys each query sees: those for which all of these conditions hold.

    Attributes:
        lower: Key position - query position is at least this (a window to the left: a negative number); None: no limit.
        upper: Key position - query position is at most this (causal: 0; a prompt in a cache from index c: c).
        query_valid: Booleans (B or 1, T), or None.
        key_valid: Booleans (B or 1, S), or None.
        segments: Integers (B or 1, T) and (B or 1, S) of packed sequences: query and key have the same; or None. One
            array if the ids of queries and keys are the same.
        dense: Booleans (B or 1, N or 1, T, S): the conditions that were not recognized; or None.
    """

    lower: int | None = field(default=None, metadata={"static": True})
    upper: int | None = field(default=None, metadata={"static": True})
    query_valid: Any | None = None
    key_valid: Any | None = None
    segments: tuple[Any, Any] | None = None
    dense: Any | None = None

    @property
    def has_band(self) -> bool:
        """Whether the position of a query limits which keys it sees."""
        return self.lower is not None or self.upper is not None

    def to_dense(self, num_queries: int, num_keys: int) -> jax.Array:
        """Returns the mask as booleans (B or 1, N or 1, T, S)."""
        return self.visible_keys(jnp.arange(num_queries), num_keys)

    def with_queries(self, length: int) -> "AttentionMask":
        """Returns the mask of more queries, all of them valid, of which those that are added may see any keys."""
        return replace(
            self,
            query_valid=None,
            segments=self.segments and (pad_queries(self.segments[0], 1, length), self.segments[1]),
            dense=pad_queries(self.dense, 2, length),
        )

    def at(self, queries: jax.Array) -> "AttentionMask":
        """Returns the mask of some queries; its band, and arrays with a value for each pair, stay as they are."""
        return replace(self, segments=self.segments and (self.segments[0][:, queries], self.segments[1]))

    def visible_keys(self, queries: jax.Array, num_keys: int, positions: jax.Array | None = None) -> jax.Array:
        """Returns which keys some queries see, as booleans (B or 1, N or 1, queries, S).

        `positions` are those of the queries if the mask is not of all queries.
        """
        distances = jnp.arange(num_keys) - (queries if positions is None else positions)[:, None]
        visible = jnp.ones((1, 1, *distances.shape), bool)
        if self.lower is not None:
            visible &= distances >= self.lower
        if self.upper is not None:
            visible &= distances <= self.upper
        if self.query_valid is not None:
            visible &= self.query_valid[:, None, queries, None]
        if self.key_valid is not None:
            visible &= self.key_valid[:, None, None, :]
        if self.segments is not None:
            query_ids, key_ids = self.segments
            visible &= query_ids[:, None, queries, None] == key_ids[:, None, None, :]
        return visible if self.dense is None else visible & self.dense[:, :, queries]

    def sees_a_key(self, num_queries: int, num_keys: int) -> Any:
        """Returns whether each query sees a key, as booleans (B or 1, T); None if all do.

        `dense` is not considered: kernels that take it give the mean of all values where it hides all keys.
        """
        first, end = self._band_of_queries(num_queries, num_keys, np)
        own = np.arange(num_queries)  # a query in a segment sees the key of its own position
        is_same = self.segments is not None and num_queries == num_keys and self.segments[0] is self.segments[1]
        is_in_band = (first <= own) & (own < end) if is_same else end > first
        is_simple = self.key_valid is None and (self.segments is None or is_same) and is_in_band.all()
        if is_simple and self.query_valid is None:
            return None
        first, end = self._band_of_queries(num_queries, num_keys, jnp)  # computed by the step, not part of the program
        seen: Any = (end > first)[None]
        if self.segments is not None and not is_simple:
            seen = _has_key_of_its_segment(*self.segments, self.key_valid, first, end)
        elif self.key_valid is not None:
            counts = jnp.pad(jnp.cumsum(self.key_valid, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
            seen = seen & (counts[:, jnp.maximum(end, first)] > counts[:, first])
        return seen if self.query_valid is None else seen & self.query_valid

    def visible_fraction(self, num_queries: int, num_keys: int) -> float:
        """Returns the fraction of (query, key) pairs inside the band."""
        first, end = self._band_of_queries(num_queries, num_keys, np)
        return math.fsum(np.maximum(end - first, 0)) / (num_queries * num_keys)

    def _band_of_queries(self, num_queries: int, num_keys: int, numpy: Any) -> tuple[Any, Any]:
        """Returns the first key in the band of each query, and the one after the last, by NumPy or JAX."""
        rows = numpy.arange(num_queries)
        first = numpy.zeros_like(rows) if self.lower is None else numpy.clip(rows + self.lower, 0, num_keys)
        end = numpy.full_like(rows, num_keys) if self.upper is None else numpy.clip(rows + self.upper + 1, 0, num_keys)
        return first, end


def pad_queries(array: Any, dim: int, length: int) -> Any:
    """Pads a dim that has a value for each query, or one for all; None stays None."""
    return array if array is None or array.shape[dim] == 1 else pad_dim(array, dim, length)


def _has_key_of_its_segment(query_ids: Any, key_ids: Any, key_valid: Any, first: Any, end: Any) -> jax.Array:
    """Returns whether each query sees a valid key of its segment, from its first position to the one before its end.

    Queries, at their first positions, and keys are sorted by segment and position. The next key after a query is then
    the first one that it may see. So no pairs of queries and keys are looked at.
    """
    valid = jnp.ones(key_ids.shape, bool) if key_valid is None else key_valid
    rows = max(each.shape[0] for each in (query_ids, key_ids, valid))
    num_queries, num_keys = query_ids.shape[1], key_ids.shape[1]

    def joined(query_part: Any, key_part: Any) -> jax.Array:
        parts = ((query_part, num_queries), (key_part, num_keys))
        return jnp.concatenate([jnp.broadcast_to(each, (rows, length)) for each, length in parts], axis=1)

    order = jnp.arange(num_queries + num_keys)
    ids, positions = joined(query_ids, key_ids), joined(first, jnp.arange(num_keys))
    is_key, ends, order = joined(False, valid), joined(end, 0), jnp.broadcast_to(order, ids.shape)
    ids, positions, is_key, ends, places = jax.lax.sort((ids, positions, is_key, ends, order), num_keys=3)
    following = jax.lax.cummin(jnp.where(is_key, order, order.shape[1] - 1), axis=1, reverse=True)
    key = [jnp.take_along_axis(each, following, axis=1) for each in (is_key, ids, positions)]
    seen = key[0] & (key[1] == ids) & (key[2] < ends)
    return jax.lax.sort((places, seen), num_keys=1)[1][:, :num_queries]  # in the order of the queries again

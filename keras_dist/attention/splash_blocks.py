"""Which blocks of keys each block of queries sees: the tables that splash attention reads.

JAX's own functions make them from masks, by looking at every block of T x S, which takes minutes for long sequences.
Here they follow from the limits of a band. They also serve queries that are not consecutive, and differ by device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class QueryRuns:
    """The positions of a device's queries, which are runs of consecutive ones."""

    starts: np.ndarray  # where the runs of each group of devices begin, (groups, runs), ascending in each group
    length: int  # number of positions of a run
    group: Any  # that of this device

    def positions(self) -> jax.Array:
        starts = jnp.asarray(self.starts, jnp.int32)[self.group]
        return (starts[:, None] + jnp.arange(self.length, dtype=jnp.int32)).reshape(-1)


def block_tables(
    lower: int | None, upper: int | None, runs: QueryRuns, num_keys: int, block_q: int, block_kv: int
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns the tables of a band: a query sees the keys at distances from `lower` to `upper` of its position.

    They are the block of keys that each block of queries takes at each step of the kernel's grid, and whether it takes
    one, both (1, query blocks, steps); and the same of queries for each block of keys, (1, steps, key blocks).

    Example: 4 queries and keys in blocks of 2, causal. Query block 0 takes key block 0, query block 1 takes 0 and 1.

    >>> (keys, has_keys), (queries, has_queries) = block_tables(None, 0, QueryRuns(np.array([[0]]), 4, 0), 4, 2, 2)
    >>> keys[0].tolist(), has_keys[0].tolist()
    ([[0, 0], [0, 1]], [[1, 0], [1, 1]])
    >>> queries[0].tolist(), has_queries[0].tolist()
    ([[0, 1], [1, 1]], [[1, 1], [1, 0]])
    """

    def seen_blocks(starts: Any, numpy: Any) -> Any:
        """Returns which query blocks see which key blocks, (groups, query blocks, key blocks)."""
        first = (starts[:, :, None] + numpy.arange(0, runs.length, block_q)).reshape(len(starts), -1)
        begin = first * 0 if lower is None else numpy.clip(first + lower, 0, num_keys) // block_kv
        last_key = first * 0 + num_keys - 1
        last_key = last_key if upper is None else numpy.minimum(first + block_q - 1 + upper, last_key)
        end = last_key // block_kv + 1  # 0 or less where no key is seen
        blocks = numpy.arange(num_keys // block_kv)
        return (begin[..., None] <= blocks) & (blocks < end[..., None])

    numpy, seen = np, seen_blocks(runs.starts, np)
    key_steps, query_steps = (max(1, seen.sum(dim).max()) for dim in (2, 1))  # the same in all groups
    if len(runs.starts) > 1:
        # Computed in the step: tables of all groups would be megabytes of the program, for each call of attention.
        numpy, seen = jnp, seen_blocks(jnp.asarray(runs.starts)[runs.group][None], jnp)
    queries, has_queries = _steps(seen.swapaxes(1, 2), query_steps, numpy)
    return _steps(seen, key_steps, numpy), (queries.swapaxes(1, 2), has_queries.swapaxes(1, 2))


def _steps(seen: Any, num_steps: int, numpy: Any) -> tuple[Any, Any]:
    """Returns the block of each step, the last one repeated where there are no more, and whether there is one."""
    small = next(kind for kind in (np.int8, np.int16, np.int32) if seen.shape[2] - 1 <= np.iinfo(kind).max)
    first, count, steps = seen.argmax(2)[..., None], seen.sum(2)[..., None], np.arange(num_steps)
    blocks = first + numpy.clip(steps, 0, numpy.maximum(count - 1, 0))
    return blocks.astype(small), (steps < count).astype(np.int8)


@functools.lru_cache
def band_function(lower: int | None, upper: int | None) -> Callable:
    """Returns the function that a kernel computes the mask of a block with; the same one for equal limits."""

    def sees(queries, keys):
        seen = None if lower is None else queries + lower <= keys
        if upper is None:
            return seen
        below = keys <= queries + upper
        return below if seen is None else seen & below

    return sees

"""How many rows `generate()` has memory for, from plans of two numbers of rows."""

from collections.abc import Callable
from typing import Any

import jax

from keras_dist.planning.reports.plan_report import Plan
from keras_dist.strategies.derived.input_shapes import is_shape, is_spec


def num_rows(batch: Any) -> int:
    """Returns the number of rows of a batch, as `plan` takes it."""
    leaf = jax.tree.leaves(batch, is_leaf=is_spec)[0]
    return leaf if isinstance(leaf, int) else (leaf if is_shape(leaf) else leaf.shape)[0]


def with_rows(batch: Any, rows: int) -> Any:
    """Returns a batch, as `plan` takes it, with another number of rows.

    >>> with_rows({"token_ids": (8, 64)}, 16)
    {'token_ids': (16, 64)}
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, int):
            return rows
        return (rows, *leaf[1:]) if is_shape(leaf) else jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(changed, batch, is_leaf=is_spec)


def largest_batch(plan: Plan, rows: int, shards: int, plan_of: Callable[[int], Plan]) -> int | None:
    """Returns the most rows that fit, a multiple of the number of shards; None if that is not known.

    Memory grows linearly with the rows of a device. What does not grow, such as gathered weights, is found by planning
    another number of rows: the one that would fit if all but the variables grew, so that it is near the largest, but at
    most 16 times as many, since compilers may take long for small models on many rows. A hundredth of the memory is
    left free, since compilers pad some numbers of rows. Memory of a CPU is that of the host, which others use, too.
    """
    memory = plan.memory
    if memory.capacity is None or plan.target == "cpu":
        return None
    here, used = -(-rows // shards), memory.total - memory.state - memory.program  # rows of a device, and their bytes
    other = max(1, min(16 * here, (memory.capacity - memory.state - memory.program) * here // max(used, 1)))
    other += other == here
    per_row = (plan_of(other * shards).memory.total - memory.total) / (other - here)
    if per_row <= 0:
        return None
    return max(0, here + int((0.99 * memory.capacity - memory.total) // per_row)) * shards

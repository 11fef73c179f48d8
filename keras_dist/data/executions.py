"""The batches of one execution of Keras's `steps_per_execution` steps: stacks, which a compiled loop takes, or single.

Batches are stacked on the host, so that they are one transfer and one call of a compiled program. Three batches of 8
rows and 4 features are a stack of shape (3, 8, 4), and the loop computes a step for each index of dim 0.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist._keras.data_adapters import STACK_BATCHES, PartialBatchList
from keras_dist.data.batch_placement import is_global, is_sparse


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class StackedBatches:
    """Several batches of equal structure, shapes and dtypes. Dim 0 of each array counts them."""

    arrays: Any

    @property
    def count(self) -> int:
        return jax.tree.leaves(self.arrays)[0].shape[0]

    def spec(self) -> Any:
        """Returns the shapes, dtypes and shardings of one of the batches."""

        def spec_of(stack: Any) -> jax.ShapeDtypeStruct:
            sharding: Any = getattr(stack, "sharding", None)  # a host array has none
            if sharding is not None:
                sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
            return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)

        return jax.tree.map(spec_of, self.arrays)

    def unstacked(self) -> list[Any]:
        return [jax.tree.map(lambda array, index=index: array[index], self.arrays) for index in range(self.count)]


def batches_of_execution(items: Iterator, count: int, is_compiled: bool = True) -> Iterator:
    """Returns an iterator from which Keras's function of a step takes what it needs for one execution of some steps.

    `items` has batches and `StackedBatches`, of which only compiled steps take the latter. Where Keras's own adapters
    stack batches, the function takes one item: a list of those that it computes one after the other.
    """
    if count == 1:
        return items
    taken = _taken(items, count, is_compiled)
    if not STACK_BATCHES:
        return taken
    found = PartialBatchList(taken)
    return iter([found] if found else [])


def _taken(items: Iterator, count: int, is_compiled: bool) -> Iterator:
    while count > 0:
        item = next(items, None)
        if item is None:
            return
        is_stack = isinstance(item, StackedBatches)
        count -= item.count if is_stack else 1
        if is_stack and not is_compiled:
            yield from item.unstacked()
        else:
            yield item


def num_stacked(batches: Sequence[tuple[Any, Any]]) -> int:
    """Returns how many of the first batches of an execution to stack, 0 for none; each is given with its rows.

    All of them, or all but the last, which may have fewer rows. Where shapes change otherwise, the lengths of runs of
    equal batches change as well, and each length would be another program to compile.
    """
    if len(batches) < 2:
        return 0
    keys = [_key(*pair) for pair in batches]
    if keys[0] is None:
        return 0
    equal = sum(1 for _ in itertools.takewhile(lambda key: key == keys[0], keys))
    return equal if equal >= max(2, len(keys) - 1) else 0


def _key(batch: Any, rows: Any) -> tuple | None:
    """Returns what batches of one stack have in common; None for a batch that cannot be in a stack."""
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
    arrays = [_array_key(leaf) for leaf in leaves]
    return None if not arrays or None in arrays else (structure, rows, arrays)


def _array_key(leaf: Any) -> tuple | None:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return None if leaf.dtype.hasobject else (leaf.shape, leaf.dtype)
    # Python numbers, and arrays made of them, have no dtype of their own in JAX.
    if not isinstance(leaf, jax.Array) or leaf.aval.weak_type or is_global(leaf):
        return None
    is_known = isinstance(leaf.sharding, jax.sharding.NamedSharding) or leaf.sharding.is_fully_replicated
    return (leaf.shape, leaf.dtype, leaf.sharding) if is_known else None

"""How many rows and tokens a batch has, by the shapes of its arrays."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class BatchShape(NamedTuple):
    """Shapes and dtypes of a batch; the first ones are those of the inputs.

    Two batches of equal shapes are equal, so that what is counted for one holds for the other.
    """

    arrays: tuple[tuple[tuple[int, ...], Any], ...]
    inputs: int  # number of arrays that are inputs of the model

    @property
    def rows(self) -> int | None:
        """Number of rows, which is the first dim of the first array that has dims; None if none has."""
        return next((shape[0] for shape, _ in self.arrays if shape), None)

    @property
    def tokens(self) -> int | None:
        """Number of tokens, padding included; None if no input has tokens.

        Inputs of integers with two dims, rows and positions, are token ids. Of several (ids of segments, masks, an
        encoder and a decoder), the one with the most elements counts.
        """
        pairs = [(shape, dtype) for shape, dtype in self.arrays[: self.inputs] if len(shape) == 2 and dtype is not None]
        return max((math.prod(shape) for shape, dtype in pairs if jnp.issubdtype(dtype, np.integer)), default=None)

    def with_rows(self, rows: int) -> "BatchShape":
        arrays = [((rows, *shape[1:]) if shape[:1] == (self.rows,) else shape, dtype) for shape, dtype in self.arrays]
        return BatchShape(tuple(arrays), self.inputs)


def batch_shape(batch: Any) -> BatchShape:
    """Returns the shapes and dtypes of a batch as the train function takes it: `x`, `(x, y)` or with sample weights."""
    leaves = jax.tree.leaves(batch)
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    inputs = 1 if isinstance(x, (np.ndarray, jax.Array)) else len(jax.tree.leaves(x))
    return BatchShape(tuple((np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves), inputs)

"""Sums and assignments by index, among them the gradients of lookups and sorts: with their indices in equal shards.

XLA pads indices of shards of unequal sizes. What is summed gets the padding, and where the indices are not int32, XLA
makes the padding in the wrong dtype and ends the process. JAX's gradients of sorts have indices in uint32, and with
`jax_enable_x64` most indices are int64.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint

from keras_dist.passes.step_program import StepProgram
from keras_dist.sharding.resharding import unsharded_along

_INT32 = np.iinfo("int32")


def scatters(equation: Any, program: StepProgram) -> Callable | None:
    """Casts the indices of scatters to int32, and gathers indices that may be in unequal shards."""
    if not equation.primitive.name.startswith("scatter"):
        return None
    operand, indices = (variable.aval for variable in equation.invars[:2])
    is_other = indices.dtype != "int32" and max(operand.shape, default=0) <= _INT32.max
    dims, mesh = _unequal_dims(equation, program), program.partitioned_mesh(equation)
    if mesh is None or not dims:
        return _with_int32 if is_other else None
    index_dims, update_dims = zip(*dims, strict=True)

    def scatter_unsharded(scatter: Callable, operand: Any, indices: Any, updates: Any) -> Any:
        indices = with_sharding_constraint(indices, unsharded_along(index_dims, indices.ndim, mesh))
        updates = with_sharding_constraint(updates, unsharded_along(update_dims, updates.ndim, mesh))
        return _with_int32(scatter, operand, indices, updates) if is_other else scatter(operand, indices, updates)

    return scatter_unsharded


def _unequal_dims(equation: Any, program: StepProgram) -> list[tuple[int, int]]:
    """Returns the dims of indices, with those of updates, that are summed over and may have unequal shards."""
    numbers, (_, indices, updates) = equation.params["dimension_numbers"], (v.aval for v in equation.invars)
    update_dims = [dim for dim in range(updates.ndim) if dim not in numbers.update_window_dims]
    dims = [pair for pair in enumerate(update_dims) if pair[0] not in numbers.scatter_indices_batching_dims]
    # One dim may have rows and positions in one, and XLA may split it over any axes.
    shards = program.mesh.size if len(dims) == 1 else program.placer.num_sequence_shards
    return [pair for pair in dims if indices.shape[pair[0]] % shards]


def _with_int32(scatter: Callable, operand: Any, indices: Any, updates: Any) -> Any:
    own = np.iinfo(indices.dtype)
    # What is beyond int32 is out of bounds, and stays so.
    indices = jnp.clip(indices, max(own.min, _INT32.min), min(own.max, _INT32.max)).astype("int32")
    return scatter(operand, indices, updates)

"""Sums and assignments by index, among them the gradients of lookups and sorts: with their indices in equal shards.

XLA pads indices of shards of unequal sizes. What is summed gets the padding, and where the indices are not int32, XLA
makes the padding in the wrong dtype and ends the process. JAX's gradients of sorts have indices in uint32, and with
`jax_enable_x64` most indices are int64.

XLA also ends the process for a sum in a `jax.shard_map` over rows whose positions and columns are sharded: the gradient
of a lookup that is reduced later. There each device sums for its positions and columns.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec

from keras_dist.passes.step_program import StepProgram
from keras_dist.sharding.per_device import free_axes, on_devices
from keras_dist.sharding.resharding import unsharded_along

_INT32 = np.iinfo("int32")


def scatters(equation: Any, program: StepProgram) -> Callable | None:
    """Casts the indices of scatters to int32, and gathers indices that may be in unequal shards."""
    if not equation.primitive.name.startswith("scatter"):
        return None
    operand, indices = (variable.aval for variable in equation.invars[:2])
    is_other = indices.dtype != "int32" and max(operand.shape, default=0) <= _INT32.max
    dims, mesh = _unequal_dims(equation, program), program.partitioned_mesh(equation)
    sum_of = None if mesh is None or mesh is program.mesh else _sum_per_device(equation, program, mesh)
    if mesh is None or not (dims or sum_of):
        return _with_int32 if is_other else None

    def in_equal_shards(scatter: Callable, operand: Any, indices: Any, updates: Any) -> Any:
        if dims:
            index_dims, update_dims = zip(*dims, strict=True)
            indices = with_sharding_constraint(indices, unsharded_along(index_dims, indices.ndim, mesh))
            updates = with_sharding_constraint(updates, unsharded_along(update_dims, updates.ndim, mesh))
        scatter = partial(_with_int32, scatter) if is_other else scatter
        return sum_of(scatter, operand, indices, updates) if sum_of else scatter(operand, indices, updates)

    return in_equal_shards


def _unequal_dims(equation: Any, program: StepProgram) -> list[tuple[int, int]]:
    """Returns the dims of indices, with those of updates, that are summed over and may have unequal shards."""
    dims, shape, sequence_axes = _index_dims(equation), equation.invars[1].aval.shape, program.placer.sequence_axes
    if len(dims) == 1:  # it may have rows and positions in one, and XLA may split it over any axes
        return [pair for pair in dims if shape[pair[0]] % program.mesh.size]

    def has_rows(dim: int) -> bool:
        axes = program.axes_of(equation.invars[1])[dim]
        return bool(axes) and not {*axes}.intersection(sequence_axes)

    unequal = [pair for pair in dims if shape[pair[0]] % program.placer.num_sequence_shards]
    return [pair for pair in unequal if not has_rows(pair[0])]


def _index_dims(equation: Any) -> list[tuple[int, int]]:
    """Returns the dims of indices, with those of updates, that are summed over."""
    numbers, rank = equation.params["dimension_numbers"], equation.invars[2].aval.ndim
    update_dims = [dim for dim in range(rank) if dim not in numbers.update_window_dims]
    return [pair for pair in enumerate(update_dims) if pair[0] not in numbers.scatter_indices_batching_dims]


def _sum_per_device(equation: Any, program: StepProgram, mesh: Any) -> Callable | None:
    """Returns what sums on each device, for its positions and columns, where rows are shards already."""
    free = {name for name in free_axes(mesh) if mesh.shape[name] > 1}
    if equation.primitive.name != "scatter-add" or len(free) < 2:
        return None
    numbers, (operand, indices, updates) = equation.params["dimension_numbers"], (v.aval for v in equation.invars)
    axes_of_indices, axes_of_updates = map(program.axes_of, equation.invars[1:])
    specs: list[list] = [[()] * each.ndim for each in (operand, indices, updates)]
    of_operand, of_indices, of_updates = specs

    def taken(axes: Sequence[str], size: int) -> tuple[str, ...]:
        axes = tuple(name for name in axes if name in free)
        axes = () if size % math.prod(mesh.shape[name] for name in axes) else axes
        free.difference_update(axes)  # an axis shards one dim
        return axes

    for dim, update_dim in _index_dims(equation):
        of_indices[dim] = of_updates[update_dim] = taken(axes_of_indices[dim], indices.shape[dim])
    removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = (dim for dim in range(operand.ndim) if dim not in removed)
    for dim, update_dim in zip(kept, numbers.update_window_dims, strict=True):
        if (size := operand.shape[dim]) == updates.shape[update_dim]:
            of_operand[dim] = of_updates[update_dim] = taken(axes_of_updates[update_dim], size)
    in_specs, summed = tuple(PartitionSpec(*spec) for spec in specs), tuple(itertools.chain.from_iterable(of_indices))

    def sum_of(scatter: Callable, operand: Any, indices: Any, updates: Any) -> Any:
        def on_device(*shards: Any) -> Any:
            return scatter(*shards)[None]

        sums = on_devices(on_device, mesh, in_specs, PartitionSpec(summed, *of_operand))
        return operand + jax.lax.reduce_sum(sums(jnp.zeros_like(operand), indices, updates), (0,))

    return sum_of


def _with_int32(scatter: Callable, operand: Any, indices: Any, updates: Any) -> Any:
    own = np.iinfo(indices.dtype)
    # What is beyond int32 is out of bounds, and stays so.
    indices = jnp.clip(indices, max(own.min, _INT32.min), min(own.max, _INT32.max)).astype("int32")
    return scatter(operand, indices, updates)

"""Lookups in embedding tables: what devices send of a table and its gradient, in the dtype of the rows.

Keras looks up rows of a float32 table and casts them. Cast first, a table is gathered in fewer bytes, and the rows are
the same. The gradient is a sum over the lookups of each row. Each device computes it in float32 for its shard of the
batch, and casts it; the sums of all devices are then reduced in the dtype of the rows, like the gradients of kernels.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.layout.tensor_layout import axis_names
from keras_dist.strategies.resharding import reduce_summands, to_compute_layout
from keras_dist.strategies.weight_layouts import WeightLayouts


def is_cast_first(
    table_dtype: str, dtype: str, layouts: WeightLayouts, indices_shape: Sequence[int], placer: BatchPlacer
) -> bool:
    """Returns whether a table is cast before rows of it are looked up.

    That is done for tables that are not sharded where layers compute with them, where dim 0 of the indices is sharded.
    """
    return (
        jnp.dtype(dtype).itemsize < jnp.dtype(table_dtype).itemsize
        and len(indices_shape) > 1
        and bool(placer.axes_for(indices_shape[0]))
        and not placer.sequence_axes
        and not axis_names(layouts.compute.axes)
        and not jax.sharding.get_abstract_mesh().manual_axes
    )


def look_up(value: Any, indices: Any, layouts: WeightLayouts, placer: BatchPlacer, is_reduced_later: bool) -> Any:
    """Returns rows of a table.

    Args:
        value: The table, in its stored layout and in the dtype of the rows.
        indices: The rows to return, (rows of a batch, positions, ...).
        layouts: Those of the table.
        placer: How the batch is sharded.
        is_reduced_later: Whether the gradient stays a sum over the rows of the batch, which is reduced elsewhere.
    """
    mesh, axes = placer.device_mesh.backend_mesh, placer.axes_for(indices.shape[0])

    @jax.custom_vjp
    def rows_of(value, indices):
        return jnp.take(value, indices, axis=0)

    def sums(indices, gradient):
        table = jax.ShapeDtypeStruct(value.shape, jnp.promote_types(value.dtype, jnp.float32))
        (added,) = jax.linear_transpose(lambda table: jnp.take(table, indices, axis=0), table)(
            gradient.astype(table.dtype)
        )
        return added.astype(value.dtype)

    def backward(indices, gradient):
        if is_reduced_later:
            return sums(indices, gradient), None
        summands = jax.shard_map(
            lambda *shards: sums(*shards)[None],
            mesh=mesh,
            in_specs=PartitionSpec(axes),
            out_specs=PartitionSpec(axes),
            axis_names=set(axes),
            check_vma=False,
        )(indices, gradient)
        return reduce_summands(summands, axes, layouts.compute, layouts.update), None

    rows_of.defvjp(lambda value, indices: (rows_of(value, indices), indices), backward)
    return rows_of(to_compute_layout(value, layouts.stored, layouts.compute, None, ()), indices)

"""Lookups in embedding tables, with no more data sent than they need.

Keras looks up rows of a float32 table and casts them. Cast first, a table is gathered in fewer bytes, and the rows are
the same. The gradient is a sum over the lookups of each row. Each device computes it in float32 for its shard of the
batch, and casts it; the sums of all devices are then reduced in the dtype of the rows, like the gradients of kernels.

A table that FSDP shards along its columns is not gathered at all, if it has more rows than a device looks up. Devices
exchange rows instead. Example: 4 devices, a table (32000, 512), 16 rows of a batch with 100 positions.

    indices (4, 100) of each device  -> all-gather, (16, 100) on each device
    its columns of all rows          -> (16, 100, 128)
    all-to-all                       -> (4, 100, 512): all columns for its rows of the batch

In the backward pass the gradient of the rows goes back in an all-to-all, and each device adds it to its columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.layout.tensor_layout import axis_names, axis_tuple
from keras_dist.sharding.per_device import in_shard_map, on_devices
from keras_dist.sharding.resharding import WeightLayouts, reduce_summands, to_compute_layout


@dataclass(frozen=True)
class Lookup:
    """A lookup in a table while a step is traced."""

    table_shape: Sequence[int]  # rows and columns
    indices_shape: Sequence[int]  # (rows of a batch, positions, ...)
    layouts: WeightLayouts  # those of the table
    placer: BatchPlacer  # shards the batch
    is_gathered_anyway: bool  # whether layers read the whole table in the same step
    reduces_later: bool  # whether the gradient stays a sum over the rows of the batch, which is reduced elsewhere

    @property
    def has_sharded_rows(self) -> bool:
        """Whether devices look up the rows of a sharded batch in a table that they compute with unsharded."""
        return (
            len(self.indices_shape) > 1
            and all(isinstance(size, int) for size in self.indices_shape)
            and bool(self._row_axes)
            and not self.placer.sequence_axes
            and not axis_names(self.layouts.compute.axes)
            and not in_shard_map()
        )

    @property
    def exchanges_rows(self) -> bool:
        """Whether devices send each other the rows that they look up, and not the table."""
        stored, row_axes, column_axes = self.layouts.stored, self._row_axes, self._column_axes
        if self.is_gathered_anyway or not column_axes or stored.axes[0] or stored.axes != self.layouts.update.axes:
            return False
        # Gradients of replicas of a table would be reduced for each microbatch.
        may_reduce = set(column_axes) == set(row_axes) or not self.reduces_later
        shards = math.prod(self.placer.device_mesh.axis_sizes[name] for name in row_axes)
        looked_up = math.prod(self.indices_shape) // shards
        return may_reduce and set(column_axes) <= set(row_axes) and looked_up < self.table_shape[0]

    @property
    def takes_stored_table(self) -> bool:
        """Whether it is called with the table in its stored layout, and not in that of compute."""
        return self.exchanges_rows or not self.reduces_later

    @property
    def _row_axes(self) -> tuple[str, ...]:
        return self.placer.axes_for(self.indices_shape[0])

    @property
    def _column_axes(self) -> tuple[str, ...]:
        return axis_tuple(next(iter(self.layouts.stored.axes[1:]), None))

    def __call__(self, table: Any, indices: Any) -> Any:
        """Returns the rows of a traced table, in their dtype, at some indices."""
        forward, backward = self._exchange() if self.exchanges_rows else self._gather()
        rows = jax.custom_vjp(forward)
        rows.defvjp(lambda table, indices: (forward(table, indices), indices), lambda *each: (backward(*each), None))
        return rows(table, indices)

    def _gather(self) -> tuple[Any, Any]:
        """Returns the lookup in a gathered table, and its gradient from indices and the gradient of the rows."""
        axes, layouts = self._row_axes, self.layouts

        def forward(table, indices):
            if self.takes_stored_table:
                table = to_compute_layout(table, layouts.stored, layouts.compute, None, ())
            return jnp.take(table, indices, axis=0)

        def sums(indices, gradient):
            return sums_of_rows(indices, gradient, self.table_shape, self.is_gathered_anyway)

        def backward(indices, gradient):
            if self.reduces_later:
                return sums(indices, gradient)
            rows = PartitionSpec(axes)
            sums_on_devices = self._on_devices(lambda *shards: sums(*shards)[None], (rows, rows), rows)
            return reduce_summands(sums_on_devices(indices, gradient), axes, layouts.compute, layouts.update)

        return forward, backward

    def _exchange(self) -> tuple[Any, Any]:
        """Returns the same for a table that stays sharded along its columns."""
        axes, shard_axes = self._row_axes, self._column_axes
        replica_axes = tuple(name for name in axes if name not in shard_axes)
        rows, columns = PartitionSpec(axes), PartitionSpec(None, shard_axes)
        gather = partial(jax.lax.all_gather, axis_name=shard_axes, axis=0, tiled=True)
        exchange = partial(jax.lax.all_to_all, axis_name=shard_axes, tiled=True)
        last = len(self.indices_shape)

        def forward(table, indices):
            return exchange(jnp.take(table, gather(indices), axis=0), split_axis=0, concat_axis=last)

        def sums(indices, gradient):
            gradient = exchange(gradient, split_axis=last, concat_axis=0)
            shape = self.table_shape[0], gradient.shape[-1]
            return sums_of_rows(gather(indices), gradient, shape)[None]

        sums_on_devices = self._on_devices(sums, (rows, rows), PartitionSpec(replica_axes, *columns))

        def backward(indices, gradient):
            stored = self.layouts.stored
            return reduce_summands(sums_on_devices(indices, gradient), replica_axes, stored, stored)

        return self._on_devices(forward, (columns, rows), rows), backward

    def _on_devices(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return on_devices(function, self.placer.device_mesh.backend_mesh, in_specs, out_specs, self._row_axes)


def sums_of_rows(indices: Any, gradient: Any, table_shape: Sequence[int], has_others: bool = False) -> Any:
    """Returns the gradient of a table in the dtype of the rows that were looked up, summed in at least float32.

    If there are few lookups, their sums are computed without a float32 table, unless the table has other gradients, to
    which XLA adds one of float32 without storing more. Those of a row are added up in the place
    of its first one. Example: the lookups of rows 7, 2, 7 have the places 0, 1, 0; rows 7 and 2 get the sums in places
    0 and 1.
    """
    num_rows, dtype = table_shape[0], jnp.promote_types(gradient.dtype, jnp.float32)
    indices, gradient = indices.reshape(-1).astype("int32"), gradient.reshape(-1, table_shape[-1])
    if has_others or dtype == gradient.dtype or 8 * indices.size > num_rows:
        table = jnp.zeros(table_shape, dtype)
        return table.at[indices].add(gradient.astype(dtype), mode="drop").astype(gradient.dtype)
    own_place, none = jnp.arange(indices.size), indices.size
    first = jnp.full(num_rows, none).at[indices].min(own_place, mode="drop")
    place = first.at[indices].get(mode="fill", fill_value=none)
    sums = jnp.zeros(gradient.shape, dtype).at[place].add(gradient.astype(dtype), mode="drop").astype(gradient.dtype)
    rows = jnp.where(place == own_place, indices, num_rows + own_place)  # of other places: none
    return jnp.zeros(table_shape, gradient.dtype).at[rows].set(sums, mode="drop", unique_indices=True)

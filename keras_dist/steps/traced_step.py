"""Splits the rows of a batch over all devices in a step, also where the batch axes do not divide them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist.data.batch_placement import BatchPlacer, is_sparse
from keras_dist.passes.xla_workarounds import with_workarounds
from keras_dist.sharding.rows import rows_are_split
from keras_dist.steps.options import StepOptions


@dataclass(frozen=True)
class RowSharding:
    """How the steps of a distribution split rows over devices.

    JAX places arrays in equal shards only: 13 rows on 8 devices are replicated, and each device would compute all 13.
    A compiled step may have unequal shards. So the step begins with a constraint that splits the rows, here into
    shards of 2, 2, 2, 2, 2, 2, 1 and 0 rows, each padded to 2 by XLA, and what leaves the step is placed as batches
    are.

    Attributes:
        placer: how batches are placed.
        options: how train steps are computed.
    """

    placer: BatchPlacer
    options: StepOptions

    def axes_in_step(self, step: str, rows: int) -> tuple[str, ...]:
        """Returns the batch axes over which a step splits a number of rows."""
        return self.placer.batch_axes if self._splits(step, rows) else self.placer.axes_for(rows)

    def rows_of_device(self, step: str, rows: int) -> int:
        """Returns how many rows the devices with most of them compute in a step."""
        sizes = self.placer.device_mesh.axis_sizes
        return -(-rows // math.prod(sizes[name] for name in self.axes_in_step(step, rows)))

    def warning_for(self, step: str | None, rows: int) -> str | None:
        """Returns, once, a warning if train steps on batches of a number of rows leave devices idle or repeat rows."""
        return self.placer.warning_for(rows, self.axes_in_step(step, rows)) if step == "train" else None

    def compute(self, step: str, function: Callable, state: Any, batch: Any) -> tuple[Any, Any]:
        """Returns `function(state, batch)`, outputs and new state of a step that is being traced.

        The function is traced to a program, which then runs on the rows that are split, with what XLA cannot partition
        in another form. XLA may choose unequal shards, of a slice for example, where those of the rows are equal.
        """
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        is_traced = all(isinstance(leaf, Tracer) for leaf in leaves)  # a batch of `run_eagerly` or with sparse arrays
        mesh = self.placer.device_mesh.backend_mesh
        if not is_traced or rows_are_split.value is not None or mesh.size == 1:
            return function(state, batch)
        rows = next((leaf.shape[0] for leaf in leaves if leaf.ndim), 0)
        splits = self._splits(step, rows)
        with rows_are_split.set_to(splits):
            program, shapes = jax.make_jaxpr(function, return_shape=True)(state, batch)
        if splits:
            batch = structure.unflatten([self._split(leaf, rows) for leaf in leaves])
        program = with_workarounds(program, mesh)
        outputs = jaxpr_as_fun(program)(*jax.tree.leaves((state, batch)))
        outputs, state = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        return jax.tree.map(self._joined, outputs) if splits else outputs, state

    def _splits(self, step: str, rows: int) -> bool:
        is_in_parts = step == "train" and self.options.splits_gradients  # each device computes gradients of its rows
        return self.placer.can_split_unequally(rows) and not is_in_parts

    def _split(self, leaf: Any, rows: int) -> Any:
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            return leaf
        spec = PartitionSpec(self.placer.batch_axes, *[PartitionSpec.UNCONSTRAINED] * (leaf.ndim - 1))
        return with_sharding_constraint(leaf, NamedSharding(self.placer.device_mesh.backend_mesh, spec))

    def _joined(self, output: Any) -> Any:
        # Logs may be Python numbers, which have no shape.
        return with_sharding_constraint(jnp.asarray(output), self.placer.sharding(np.shape(output)))

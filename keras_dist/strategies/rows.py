"""Splits the rows of a batch over all devices in a step, also where the batch axes do not divide them."""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist._keras.thread_value import ThreadValue
from keras_dist.data.batch_placement import BatchPlacer, is_sparse
from keras_dist.strategies.attention import record_attention, recorded_attention
from keras_dist.strategies.jaxpr_evaluation import inner_jaxprs
from keras_dist.strategies.step_options import StepOptions

_are_split: ThreadValue[bool] = ThreadValue(False)  # whether the step that is being traced has unequal shards of rows


def axes_for_rows(placer: BatchPlacer, rows: int) -> tuple[str, ...]:
    """Returns the batch axes over which the step that is being traced splits a number of rows."""
    is_split = _are_split.value and placer.can_split_unequally(rows)
    return placer.batch_axes if is_split else placer.axes_for(rows)


@dataclass(frozen=True)
class RowSharding:
    """How the steps of a distribution split rows over devices.

    JAX places arrays in equal shards only: 13 rows on 8 devices are replicated, and each device would compute all 13.
    A compiled step may have unequal shards. So the step begins with a constraint that splits the rows, here into
    shards of 2, 2, 2, 2, 2, 2, 1 and 0 rows, each padded to 2 by XLA, and what leaves the step is placed as batches
    are.

    Attributes:
        placer: How batches are placed.
        options: How train steps are computed.
    """

    placer: BatchPlacer
    options: StepOptions

    def axes_in_step(self, step: str, rows: int) -> tuple[str, ...]:
        """Returns the batch axes over which a step splits a number of rows, unless it sorts."""
        return self.placer.batch_axes if self._splits(step, rows) else self.placer.axes_for(rows)

    def rows_of_device(self, step: str, rows: int) -> int:
        """Returns how many rows the devices with most of them compute in a step, unless it sorts."""
        sizes = self.placer.device_mesh.axis_sizes
        return -(-rows // math.prod(sizes[name] for name in self.axes_in_step(step, rows)))

    def warning_for(self, step: str | None, rows: int) -> str | None:
        """Returns, once, a warning if train steps on batches of a number of rows leave devices idle or repeat rows."""
        return self.placer.warning_for(rows, self.axes_in_step(step, rows)) if step == "train" else None

    def compute(self, step: str, function: Callable, state: Any, batch: Any) -> tuple[Any, Any]:
        """Returns `function(state, batch)`, outputs and new state of a step that is being traced.

        The function is traced to a program, which then runs on the rows that are split. XLA ends the process where it
        partitions the gradient of a sort in unequal shards, so a train step that sorts is computed in equal ones.
        """
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        rows = next((leaf.shape[0] for leaf in leaves if leaf.ndim), 0)
        is_traced = all(isinstance(leaf, Tracer) for leaf in leaves)  # a batch of `run_eagerly` or with sparse arrays
        if not is_traced or _are_split.value or not self._splits(step, rows):
            return function(state, batch)
        with _are_split.set_to(True), recorded_attention() as calls:
            program, shapes = jax.make_jaxpr(function, return_shape=True)(state, batch)
        if step == "train" and any(name == "sort" for name in _primitives(program.jaxpr)):
            self._warn_of_sort(rows)
            return function(state, batch)
        record_attention(calls)
        batch = structure.unflatten([self._split(leaf, rows) for leaf in leaves])
        outputs = jaxpr_as_fun(program)(*jax.tree.leaves((state, batch)))
        outputs, state = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        return jax.tree.map(self._joined, outputs), state

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

    def _warn_of_sort(self, rows: int) -> None:
        reason = ", because the train step sorts, and XLA cannot partition the gradient of a sort in unequal shards"
        message = self.placer.warning_for(rows, self.placer.axes_for(rows), reason)
        if message is not None:
            warnings.warn(message, stacklevel=2)


def _primitives(jaxpr: Any) -> Iterator[str]:
    """Returns the names of the operations of a traced program, with those of its inner programs."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in inner_jaxprs(equation.params):
            yield from _primitives(inner)

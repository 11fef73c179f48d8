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

from keras_dist._keras.internals import get_mask, set_mask
from keras_dist.data.batch_placement import BatchPlacer, is_sparse
from keras_dist.layout.tensor_layout import TensorLayout, axis_tuple
from keras_dist.passes.registry import PASSES
from keras_dist.passes.rewriting import Pass, rewritten, rewritten_with_gradients
from keras_dist.passes.step_program import Axes, StepProgram, batch_axes
from keras_dist.sharding.rows import rows_are_split
from keras_dist.steps.options import StepOptions
from keras_dist.tracing.traced_values import root_of


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
        layout_of: returns the layout in which layers compute with a weight.
    """

    placer: BatchPlacer
    options: StepOptions
    layout_of: Callable[[Any], TensorLayout]

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

    def compute(self, step: str, model: Any, function: Callable, state: Any, batch: Any) -> tuple[Any, Any]:
        """Returns `function(state, batch)`, outputs and new state of a step that is being traced.

        The function is traced to a program, which then runs on the rows that are split, with what XLA cannot partition
        in another form. XLA may choose unequal shards, of a slice for example, where those of the rows are equal. A
        step that is not compiled has no program, so each device computes the whole batch.
        """
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        mesh = self.placer.device_mesh.backend_mesh
        if rows_are_split.value is not None or mesh.size == 1 or any(map(is_sparse, leaves)):
            return function(state, batch)
        if not all(isinstance(leaf, Tracer) for leaf in leaves):
            return function(state, self.placer.replicate(batch))
        rows = next((leaf.shape[0] for leaf in leaves if leaf.ndim), 0)
        splits = self._splits(step, rows)
        with rows_are_split.set_to(splits):
            program, shapes = jax.make_jaxpr(function, return_shape=True)(state, batch)
        if splits:
            batch = structure.unflatten([self._split(leaf, rows) for leaf in leaves])
        row_axes = self.axes_in_step(step, rows)
        axes = [*self._axes_of_state(model, state), *(batch_axes(leaf, rows, row_axes, self.placer) for leaf in leaves)]
        program = rewritten(StepProgram(program, self.placer, row_axes, axes), self._passes)
        outputs = jaxpr_as_fun(program)(*jax.tree.leaves((state, batch)))
        outputs, state = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        return jax.tree.map(self._joined, outputs) if splits else outputs, state

    def compute_call(self, model: Any, function: Callable, state: Any, inputs: Any) -> Any:
        """Returns `function(state, inputs)`, a call of a model in a function that users compile themselves.

        It is changed as steps are, but before it is differentiated: passes are asked about the gradients of single
        operations. If they change nothing, the function itself is called.

        Args:
            model: the model, or a layer.
            function: returns nested arrays.
            state: values of its trainable and of its other variables, in lists.
            inputs: nested arguments; what is no array stays as it is.
        """
        leaves, structure = jax.tree.flatten(inputs)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
        arrays = [leaves[index] for index in places]
        # Arguments that are differentiated without `jax.jit` are tracers of known arrays.
        is_compiled = arrays and all(isinstance(root_of(each), Tracer) for each in arrays)
        if not is_compiled or rows_are_split.value is not None or self.placer.device_mesh.backend_mesh.size == 1:
            return function(state, inputs)
        masks: list = []

        def traced(state: Any, arrays: list) -> Any:
            replaced = dict(zip(places, arrays, strict=True))
            outputs = function(state, structure.unflatten([replaced.get(i, leaf) for i, leaf in enumerate(leaves)]))
            masks.extend(map(get_mask, jax.tree.leaves(outputs)))  # attributes of tracers
            return outputs, [mask for mask in masks if mask is not None]

        program, shapes = jax.make_jaxpr(traced, return_shape=True)(state, arrays)
        rows = next((array.shape[0] for array in arrays if array.ndim), 0)
        row_axes = self.placer.axes_for(rows)
        axes = [*self._axes_of_state(model, state), *(batch_axes(each, rows, row_axes, self.placer) for each in arrays)]
        changed = rewritten_with_gradients(StepProgram(program, self.placer, row_axes, axes), self._passes)
        if changed is program:
            return function(state, inputs)
        results = jax.tree.unflatten(
            jax.tree.structure(shapes), jaxpr_as_fun(changed)(*jax.tree.leaves((state, arrays)))
        )
        outputs, kept_masks = results
        kept = iter(kept_masks)
        for leaf, mask in zip(jax.tree.leaves(outputs), masks, strict=True):
            if mask is not None:
                set_mask(leaf, next(kept))
        return outputs

    def _axes_of_state(self, model: Any, state: Any) -> list[Axes]:
        """Returns the axes of the dims of each array of a step's state; only those of weights are known."""
        axes: list[Axes] = []
        for variables, values in zip((model.trainable_variables, model.non_trainable_variables), state, strict=False):
            axes += [tuple(map(axis_tuple, self.layout_of(variable).axes)) for variable in variables]
            assert len(jax.tree.leaves(values)) == len(variables)
        return axes + [()] * (len(jax.tree.leaves(state)) - len(axes))

    @property
    def _passes(self) -> list[Pass]:
        return [each for name, each in PASSES.items() if name not in self.options.without_passes]

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

"""The gradients of a train step over microbatches: of one part of a batch after the other.

Losses and gradients are those of the undivided batch, to rounding: Keras's means over rows, over unmasked elements and
over sample weights are put together as means over the whole batch. Layers see the rows of one part at a time, so a
batch normalization has the statistics of each part, and random generators are used once for each.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters.partial_eval import dce_jaxpr
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist._keras.internals import is_read_in_compute_dtype
from keras_dist._keras.model_structure import all_layers, compute_dtypes
from keras_dist._keras.train_step import Improve, TrainState, compute_gradients, compute_loss
from keras_dist.data.batch_placement import BatchPlacer, is_sparse
from keras_dist.layout.tensor_layout import axis_names
from keras_dist.sharding.resharding import WeightLayouts, sharding_of_summands, to_compute_layout
from keras_dist.steps.loss_parts import LossParts, TotalsNeededError
from keras_dist.steps.options import StepOptions
from keras_dist.steps.step_gradients import StepGradients
from keras_dist.steps.step_state import changed
from keras_dist.steps.unreduced_gradients import Summands, UnreducedGradients
from keras_dist.tracing.jaxpr_evaluation import as_function


class Microbatches:
    """A train step before the update, while it is traced; see `compute_gradients`. 0-d arrays are not split."""

    def __init__(
        self,
        model: Any,
        state: TrainState,
        batch: Any,
        options: StepOptions,
        placer: BatchPlacer,
        layouts: Sequence[WeightLayouts],  # of the weights that are trained
        improve: Improve,
    ):
        self._model, self._state, self._batch, self._options, self._layouts = model, state, batch, options, layouts
        self._improve = improve
        if options.microbatches > 1:
            _refuse_stateful_layers(model, options.microbatches)
        self._leaves, self._structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        self._rows = _rows(self._leaves, options.microbatches)
        self._mesh, self._placer, self._axes = placer.device_mesh.backend_mesh, placer, placer.axes_for(self._rows)
        self._shards = math.prod(self._mesh.shape[name] for name in self._axes)
        self._totals: list = []  # see `LossParts`
        self._sum_dtypes: list = [None] * len(layouts)  # see `UnreducedGradients`

    def gradients(self) -> StepGradients:
        rows = self._rows // self._shards  # of each device
        size = -(-rows // self._options.microbatches)
        count, rest = divmod(rows, size)
        weights = self._state.weights
        gathered = self._gathered(weights) if self._options.gather_weights == "update" else weights
        state, sums, logs = self._accumulate(self._state._replace(weights=gathered), None, 0, size, count)
        if rest:
            state, sums, logs = self._accumulate(state, sums, count * size, rest, 1)
        return StepGradients(sums, self._sum_dtypes, self._axes, logs, state._replace(weights=weights))

    def _gathered(self, weights: Sequence[Any]) -> list[Any]:
        dtypes = compute_dtypes(self._model)

        def gathered(variable: Any, weight: Any, layouts: WeightLayouts) -> Any:
            if layouts.stored.axes == layouts.compute.axes:
                return weight
            if is_read_in_compute_dtype(variable):
                weight = weight.astype(dtypes.get(id(variable), weight.dtype))
            return to_compute_layout(weight, layouts.stored, layouts.compute, None, ())

        return list(map(gathered, self._model.trainable_variables, weights, self._layouts))

    def _accumulate(
        self, state: TrainState, sums: list[Summands] | None, start: int, size: int, count: int
    ) -> tuple[TrainState, list[Summands], dict]:
        """Adds the gradients of `count` parts to `sums`; each has `size` rows of each device, the first from `start`.

        Returns the state with new values of all but weights and optimizer, the sums, and the logs of the last part.
        """
        parts = [self._split(leaf, start, size, count) for leaf in self._leaves]
        compute = self._gradients_of_part(state, parts, size * self._shards / self._rows)
        if sums is None:
            shapes, _ = jax.eval_shape(compute, state, [part[0] for part in parts])
            # Gradients are added up in float32 at least.
            zeros = jax.tree.map(lambda each: jnp.zeros(each.shape, jnp.promote_types(each.dtype, "float32")), shapes)
            sums = list(map(self._constrained, zeros, self._layouts))

        def add_part(carry, part):
            others, metrics, sums = carry
            gradients, (logs, others, metrics) = compute(state._replace(others=others, metrics=metrics), part)
            parts = zip(self._model.trainable_variables, sums, gradients, self._layouts, strict=True)
            return (others, metrics, [self._with_part(*each) for each in parts]), logs

        carry = state.others, state.metrics, sums
        if count == 1:
            carry, logs = add_part(carry, [part[0] for part in parts])
        else:
            carry, logs = jax.lax.scan(add_part, carry, parts)
            logs = jax.tree.map(lambda log: log[-1], logs)
        others, metrics, sums = carry
        return state._replace(others=others, metrics=metrics), sums, logs

    def _gradients_of_part(self, state: TrainState, parts: list, fraction: float) -> Callable:
        """Returns a function of state and arrays of one part, to gradients as `Summands` and the other outputs."""
        is_reduced_later = self._options.reduce_gradients == "update" and self._shards > 1
        kept = set(map(id, self._model.trainable_variables)) if is_reduced_later else ()
        is_gathered = self._options.gather_weights == "update"

        def compute(state, totals, arrays):
            batch, losses = jax.tree.unflatten(self._structure, arrays), LossParts(fraction, totals)
            with changed(losses=losses, kept_gradients=kept, are_weights_gathered=is_gathered):
                return compute_gradients(self._model, state, batch, fraction, self._improve)

        def compute_reduced(state, totals, arrays):
            gradients, others = compute(state, totals, arrays)
            return [Summands(None, gradient) for gradient in gradients], others

        def rewritten() -> Callable:
            if not is_reduced_later:
                traced, shapes = jax.make_jaxpr(compute_reduced, return_shape=True)(state, self._totals, first)
                function, structure = jaxpr_as_fun(traced), jax.tree.structure(shapes)
                return lambda *arguments: jax.tree.unflatten(structure, function(*jax.tree.leaves(arguments)))
            has_rows = [False] * len(jax.tree.leaves((state, self._totals))) + [bool(array.ndim) for array in first]
            unreduced = UnreducedGradients(compute, (state, self._totals, first), has_rows, self._mesh, self._axes)
            self._sum_dtypes = unreduced.sum_dtypes
            return unreduced

        first = [part[0] for part in parts]
        try:
            function = rewritten()
        except TotalsNeededError:
            self._totals = _totals(self._model, self._state, self._batch)
            function = rewritten()
        return lambda state, arrays: function(state, self._totals, arrays)

    def _split(self, leaf: Any, start: int, size: int, count: int) -> Any:
        """Returns an array (parts, rows of a part, ...): of each shard of the batch, rows from `start` on."""
        if not leaf.ndim:
            return jnp.broadcast_to(leaf, (count,))
        shape = leaf.shape[1:]
        rows = leaf.reshape(self._shards, self._rows // self._shards, *shape)[:, start : start + count * size]
        parts = jnp.swapaxes(rows.reshape(self._shards, count, size, *shape), 0, 1)
        parts = parts.reshape(count, self._shards * size, *shape)
        spec = self._placer.sharding(parts.shape[1:]).spec
        return with_sharding_constraint(parts, NamedSharding(self._mesh, PartitionSpec(None, *spec)))

    def _with_part(self, variable: Any, sums: Summands, part: Summands, layouts: WeightLayouts) -> Summands:
        if variable.overwrite_with_gradient:
            # Gradients of float8's scales and largest values are their new ones: those of a part are the same or less.
            total = Summands(None, jnp.maximum(sums.reduced, part.reduced.astype(sums.reduced.dtype)))
        else:
            total = sums.plus(self._apart(part, layouts))
        return self._constrained(total, layouts)

    def _apart(self, gradient: Summands, layouts: WeightLayouts) -> Summands:
        """Returns a gradient of which the compiler reduces what is to be reduced before it is added to the sum.

        Otherwise XLA adds rows of a table's gradient directly to the sum: on one device, and on the others to zeros.
        libtpu before 0.0.50 then moves the reduction out of the loop, where each iteration but the last loses what the
        other devices have added (https://github.com/openxla/xla/issues/49143). It leaves a reduce-scatter where it is.
        """
        is_scattered = set(self._axes).intersection(axis_names(layouts.update.axes))
        if gradient.reduced is None or gradient.reduced.ndim < 2 or is_scattered:
            return gradient
        reduced = with_sharding_constraint(gradient.reduced, layouts.update.backend_layout)
        return gradient._replace(reduced=jax.lax.optimization_barrier(reduced))

    def _constrained(self, sums: Summands, layouts: WeightLayouts) -> Summands:
        shardings = sharding_of_summands(layouts.compute, self._axes), layouts.update.backend_layout
        each = zip(sums, shardings, strict=True)
        return Summands(*(None if value is None else with_sharding_constraint(value, to) for value, to in each))


def _refuse_stateful_layers(model: Any, microbatches: int) -> None:
    """Raises ValueError for recurrent layers that keep a state for each row of a batch."""
    layer = next((each for each in all_layers(model) if getattr(each, "stateful", False)), None)
    if layer is not None:
        raise ValueError(
            f"microbatches={microbatches} calls the model on a part of the rows of a batch at a time, but "
            f"{layer.name!r} has stateful=True: its states are those of all rows. Leave microbatches out, or create "
            "the layer with stateful=False."
        )


def _rows(leaves: Sequence[Any], microbatches: int) -> int:
    """Returns the number of rows of a batch. Raises ValueError if its arrays do not have one number, or are sparse."""
    if any(map(is_sparse, leaves)):
        raise ValueError(
            f"microbatches={microbatches} splits every array of a batch along its rows, which a sparse array does not "
            "store one after another. Pass dense arrays, or leave microbatches out."
        )
    shapes = [tuple(leaf.shape) for leaf in leaves if leaf.ndim]
    if len({shape[0] for shape in shapes}) != 1:
        raise ValueError(
            f"microbatches={microbatches} splits every array of a batch along dim 0, the rows, so all must have the "
            f"same number of rows. Got the shapes {shapes}. Pass arrays with one entry per row, or 0-d arrays, which "
            "are not split."
        )
    if not shapes[0][0]:
        raise ValueError(f"microbatches={microbatches} splits the rows of a batch, but this one has none: {shapes}.")
    return shapes[0][0]


def _totals(model: Any, state: TrainState, batch: Any) -> list:
    """Returns the divisors of the losses of a batch. Of the model, only what its masks depend on is computed."""

    def divisors(state, batch):
        losses = LossParts()
        with changed(losses=losses):
            compute_loss(model, state, batch)
        return losses.divisors

    traced, shapes = jax.make_jaxpr(divisors, return_shape=True)(state, batch)
    jaxpr, is_used = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    arguments = [leaf for leaf, used in zip(jax.tree.leaves((state, batch)), is_used, strict=True) if used]
    return jax.tree.unflatten(jax.tree.structure(shapes), as_function(jaxpr, traced.consts)(*arguments))

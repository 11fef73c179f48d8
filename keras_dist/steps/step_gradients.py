"""The gradients of a train step before they are reduced, and what else the step computes.

XLA reduces each term of a gradient where it is computed. A gradient that is kept as one summand for each shard of the
batch can have further terms added to it on each device, and is then reduced once: the other use of a tied embedding
table, or further microbatches and batches.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from keras_dist._keras.train_step import Improve, TrainState, compute_gradients
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.sharding.resharding import WeightLayouts
from keras_dist.steps.step_state import changed
from keras_dist.steps.unreduced_gradients import Summands, UnreducedGradients, reduced


class StepGradients(NamedTuple):
    """What a train step has computed before it updates the weights."""

    summands: Sequence[Summands]  # the gradient of each weight that is trained
    sum_dtypes: Sequence[Any]  # for each, the dtype in which it is sent; None where it is reduced already
    axes: tuple[str, ...]  # of the mesh, over which there are summands
    logs: dict
    state: TrainState  # with new values of all but weights and optimizer

    def reduced(self, layouts: Sequence[WeightLayouts], dtype: Any = None) -> list[Any]:
        """Returns the gradients in the layouts of the updates, sent in `dtype` where it is given."""
        each = zip(self.summands, self.sum_dtypes, self.state.weights, layouts, strict=True)
        return [reduced(s, dtype or own or w.dtype, self.axes, layout).astype(w.dtype) for s, own, w, layout in each]


def gradients_of_batch(
    model: Any, state: TrainState, batch: Any, placer: BatchPlacer, kept: Collection[int], improve: Improve
) -> StepGradients:
    """Computes what a train step does before the update, for a batch as a whole; see `compute_gradients`.

    `kept` has the ids of the weights whose gradients are wanted as one summand for each shard of the batch.
    """
    axes = row_axes(batch, placer)

    def compute(state: TrainState, batch: Any) -> tuple[list, Any]:
        with changed(kept_gradients=kept):
            return compute_gradients(model, state, batch, 1.0, improve)

    has_rows = [False] * len(jax.tree.leaves(state)) + [bool(leaf.ndim) for leaf in jax.tree.leaves(batch)]
    is_kept = [id(variable) in kept for variable in model.trainable_variables]
    gradients = UnreducedGradients(compute, (state, batch), has_rows, placer.device_mesh.backend_mesh, axes, is_kept)
    summands, (logs, others, metrics) = gradients(state, batch)
    return StepGradients(summands, gradients.sum_dtypes, axes, logs, state._replace(others=others, metrics=metrics))


def row_axes(batch: Any, placer: BatchPlacer) -> tuple[str, ...]:
    """Returns the axes that dim 0 of all arrays of a batch is sharded over; `()` if the batch is not traced."""
    leaves = jax.tree.leaves(batch)
    if not all(isinstance(leaf, Tracer) for leaf in leaves):
        return ()
    return placer.axes_for(math.gcd(*(leaf.shape[0] for leaf in leaves if leaf.ndim)))

"""A train step that reduces the gradient of a tied embedding table once.

A table that is looked up, and multiplied with for the logits, has a gradient of two terms. Both are sums over the rows
of a batch, and XLA reduces each before it adds them. Here each device adds its own summands of the two, and their sum
is reduced. All else of the step is what Keras computes.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.core import Tracer

from keras_dist._keras import internals
from keras_dist._keras.thread_value import ThreadValue
from keras_dist._keras.train_step import TrainState, apply_gradients, compute_gradients
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.strategies.unreduced_gradients import UnreducedGradients, reduced
from keras_dist.strategies.weight_layouts import WeightLayouts

tables_reduced_later: ThreadValue[Collection[int]] = ThreadValue(())
"""The ids of the tables whose gradients are not reduced in the trace that runs in this thread."""


def are_reduced_once(model: Any, batch: Any, placer: BatchPlacer) -> bool:
    """Returns whether `train_step` computes a step: a traced one that trains tied tables with a sharded batch.

    Not under context parallelism, where XLA ends the process when it partitions sums over the batch axes alone.
    """
    if placer.sequence_axes:
        return False
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch))
    return is_traced and any(_are_tied(model)) and bool(_row_axes(batch, placer))


def train_step(
    model: Any, state: TrainState, batch: Any, placer: BatchPlacer, layouts: Sequence[WeightLayouts]
) -> tuple[dict, TrainState]:
    """Returns the logs and the new state of a model after one update.

    Args:
        model: The model.
        state: The traced state.
        batch: The traced arrays of x, y and sample weights.
        placer: How batches are sharded.
        layouts: Those of each weight that is trained.
    """
    tables = internals.tied_tables(model)

    def compute(state: TrainState, batch: Any) -> tuple[list, Any]:
        with tables_reduced_later.set_to(tables):
            return compute_gradients(model, state, batch, scale=1.0)

    mesh, axes = placer.device_mesh.backend_mesh, _row_axes(batch, placer)
    has_rows = [False] * len(jax.tree.leaves(state)) + [bool(leaf.ndim) for leaf in jax.tree.leaves(batch)]
    unreduced = UnreducedGradients(compute, (state, batch), has_rows, mesh, axes, _are_tied(model))
    summands, (logs, others, metrics) = unreduced(state, batch)
    each = zip(summands, unreduced.sum_dtypes, layouts, strict=True)
    gradients = [reduced(sums, dtype, axes, weight_layouts) for sums, dtype, weight_layouts in each]
    state = state._replace(others=others, metrics=metrics)
    weights, optimizer = apply_gradients(model, state, gradients)
    return logs, state._replace(weights=weights, optimizer=optimizer)


def _are_tied(model: Any) -> list[bool]:
    tables = internals.tied_tables(model)
    return [id(variable) in tables for variable in model.trainable_variables]


def _row_axes(batch: Any, placer: BatchPlacer) -> tuple[str, ...]:
    """Returns the axes that dim 0 of all arrays of a batch is sharded over."""
    return placer.axes_for(math.gcd(*(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim)))

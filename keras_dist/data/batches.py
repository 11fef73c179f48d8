"""The batches of a distribution: how `fit`, `train_on_batch` and `model(x)` get them onto the mesh."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_dist._keras import internals
from keras_dist.data.batch_placement import BatchPlacer, assemble, is_global
from keras_dist.data.consistency import BatchComparison
from keras_dist.data.input_pipeline import BatchProducer, InputPipeline, LocalRows, local_rows, select_local_rows
from keras_dist.mesh.devices import is_on_mesh


class Batches:
    """How a distribution places batches."""

    def __init__(self, distribution: Any, placer: BatchPlacer, comparisons: dict[bool, BatchComparison]):
        self._distribution, self._placer = distribution, placer
        self._comparisons = comparisons  # of single batches so far, by whether each process passes the global batch

    def place(self, batch: Any) -> tuple[Any, list[LocalRows | None]]:
        """Returns the arrays of a host batch as global arrays, and which rows of the global batch this process passed.

        The rows are None where every process passed the global batch.
        """
        is_global_batch, rows = self._distribution.auto_shard_dataset, None
        if self._distribution.is_multi_process:
            is_first = is_global_batch not in self._comparisons
            comparison = self._comparisons.setdefault(
                is_global_batch, BatchComparison("single batches", is_global_batch, "one batch")
            )
            if is_first or not is_global_batch:
                rows = comparison.compare_batch(batch)
        if rows is None or is_global_batch:
            return self._placer.place(batch), [None]
        return assemble(self._placer.place_local(batch, rows)), [local_rows(rows)]

    def pipeline(
        self,
        batches: Callable[[], Iterator],
        step: str | None,
        steps_per_epoch: int | None,
        position_of: Callable[[Iterator], Any] | None,
    ) -> InputPipeline:
        """Returns a pipeline of global batches, made from this process's host batches."""
        warning_for = functools.partial(self._distribution.steps.warning_for, step)
        settings = self._distribution.auto_shard_dataset, step, steps_per_epoch, position_of, warning_for
        return InputPipeline(BatchProducer(batches, self._placer, *settings))

    def outputs_of_process(self, outputs: Any, rows: list) -> Any:
        """Returns the rows of a prediction that this process passed, as arrays that it can read."""
        outputs = self._placer.replicate(outputs)
        if not rows or None in rows:
            return outputs
        return select_local_rows(jax.tree.map(np.asarray, outputs), rows)

    def place_arguments(self, model: keras.Model, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns the arguments of an eager `model(...)` with its arrays sharded like a batch."""
        weights = model.weights if model.built else []
        mesh = self._placer.device_mesh.backend_mesh
        if not weights or not is_on_mesh(internals.variable_value(weights[0]), mesh):
            return args, kwargs
        return jax.tree.map(self._place_argument, (args, kwargs))

    def _place_argument(self, leaf: Any) -> Any:
        is_concrete = isinstance(leaf, (np.ndarray, jax.Array)) and not isinstance(leaf, Tracer)
        if not is_concrete or leaf.ndim == 0 or internals.has_mask(leaf) or is_global(leaf):
            return leaf
        return self.place(leaf)[0]

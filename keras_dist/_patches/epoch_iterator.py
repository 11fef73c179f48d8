"""The iterator over the batches of `fit`, `evaluate` and `predict`, in place of Keras's own.

Keras reads a batch, moves it and runs the step, one after the other, and with several processes it accepts only
tf.data. Here Keras's adapters read every source that Keras accepts, and an `InputPipeline` prepares the batches.
Training can start in the middle of an epoch.
"""

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras

from keras_dist._keras.active_distribution import (
    INSTALLED,
    active_distribution,
    distribution_of_model,
    no_distribution_in_this_thread,
)
from keras_dist._keras.data_adapters import (
    COUNT_EPOCHS,
    data_adapters,
    finished_epochs,
    makes_arrays,
    set_finished_epochs,
)
from keras_dist._keras.internals import compiles_steps, trainer
from keras_dist._keras.training_state import NothingLeft, put_values_back, state_variables
from keras_dist._patches.resumable_iterator import (
    ResumableIterator,
    begin_finished_epoch,
    draw_orders,
    no_batches_error,
)
from keras_dist.data import position
from keras_dist.data.batch_placement import require_numbers
from keras_dist.data.batches import InputPipeline, copied
from keras_dist.data.position import DataPosition
from keras_dist.multihost import messaging

_newest_iterator: ContextVar[Callable[[], Any]] = ContextVar("newest_iterator", default=lambda: None)


@INSTALLED.patch(trainer, "JAXEpochIterator")
def _epoch_iterator(original, distribution, x, y=None, sample_weight=None, *args, **kwargs):
    """Without it, several processes accept tf.data only, batches are not prefetched, and no epoch can be resumed."""
    for leaf in keras.tree.flatten((x, y, sample_weight)):
        require_numbers(leaf)
    if isinstance(x, types.GeneratorType):
        # Keras's adapter reads two batches: without the distribution, and the second one perhaps into the same arrays.
        x = _from_the_first(x, [copied(batch) for batch in itertools.islice(x, 2)])
    # Keras's adapters must read all data; the pipeline decides which process uses which rows. Since Keras 3.16 they
    # leave out batches of other processes where they find a distribution.
    with no_distribution_in_this_thread():
        try:
            iterator = EpochIterator(distribution, x, y, sample_weight, *args, **kwargs)
        except ValueError:
            if data_adapters.is_grain_dataset(x) and next(iter(x), None) is None:
                raise no_batches_error(data_adapters.GrainDatasetAdapter) from None
            raise
    _newest_iterator.set(weakref.ref(iterator))
    return iterator


def _from_the_first(generator: Iterator, read: list[Any]) -> Iterator:
    """Yields batches that were read from a generator, and goes on with it."""
    first = (read.pop(0) for _ in range(len(read)))  # and no longer stored
    yield from itertools.chain(first, generator)  # a chain is not closed, since the generator is the user's


class EpochIterator(trainer.JAXEpochIterator):
    _current_iterator: Any

    def __init__(self, distribution, *args, **kwargs):
        self._distribution = distribution
        self._step: str | None = None  # what the batches are for, once that is known
        self._is_compiled = False  # whether that step is
        self._model: Callable[[], Any] = lambda: None  # the model that they are for
        self._pipeline: InputPipeline | None = None
        self._start = self._delivered_before = 0
        self._is_in_epoch = self._has_begun = False
        super().__init__(*args, **kwargs)

    def _get_iterator(self, start=0, data_position=None):
        adapter, must_have_batches, self._has_begun = self.data_adapter, not self._has_begun, True
        return self._distribution.batches.pipeline(
            lambda: ResumableIterator(adapter, start, data_position, must_have_batches),
            self._step,
            self.steps_per_epoch,
            ResumableIterator.position if position.is_tracked(self) else None,
            self.steps_per_execution,
            self._is_compiled,
            makes_arrays(adapter),
        )

    def _moved_to(self) -> Any:
        """Returns the active distribution if a callback has moved the model to it, None if it has not."""
        active, model = active_distribution(), self._model()
        is_moved = active is not self._distribution and model is not None and distribution_of_model(model) is active
        return active if is_moved else None

    def _require_same_devices(self) -> None:
        """Raises ValueError if a callback has moved the model to other devices than those of the next batches."""
        if (moved_to := self._moved_to()) is None:
            return
        before, now = (set(each.device_mesh.backend_mesh.devices.flat) for each in (self._distribution, moved_to))
        if before != now:
            raise ValueError(
                f"{self._model().name!r} was moved from {self._distribution} to {moved_to} while the next batches were "
                "placed on the devices of the first. Move a model to other devices at the start or the end of an "
                "epoch, and without steps_per_epoch, or between two calls of fit."
            )

    def _enumerate_iterator(self) -> Any:
        if self.steps_per_epoch is None:  # else a pass through the data goes on
            self._distribution = self._moved_to() or self._distribution
        start = position.begin_tracking(self, self._model()) if self._step == "train" else None
        steps: Any = super()._enumerate_iterator() if start is None else self._enumerate_from(*start)
        self._is_in_epoch = False
        try:
            for first, last, pipeline in steps:
                if not self._is_in_epoch:
                    self._is_in_epoch = True
                    self._check_values_agree("the start of an epoch")
                    begun = self._current_iterator if isinstance(pipeline, NothingLeft) else pipeline
                    self._begin_epoch(begun, 0 if start is None else start.batches)
                self._require_same_devices()
                yield first, last, pipeline
        except GeneratorExit:
            # A callback has stopped the run. Other processes may not prepare the next batch, so do not wait for it.
            if self._pipeline is not None:
                self._pipeline.close()
            raise
        if self._pipeline is not None and self.steps_per_epoch is None and self._distribution.is_multi_process:
            self._pipeline.is_exhausted()  # other processes may have more batches, or fewer
        self._end_epoch()

    @contextlib.contextmanager
    def catch_stop_iteration(self):
        """Ends the epoch also where a source, in this process or in another one, has fewer batches than it said."""
        is_over = False
        with super().catch_stop_iteration():
            try:
                yield
            except StopIteration:
                is_over = True
                raise
        if is_over:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._is_in_epoch = False
        self._check_values_agree("the end of an epoch")  # before callbacks save them

    def _check_values_agree(self, place: str) -> None:
        if self._step == "train":
            check_values_agree(self._model(), place)

    def _begin_epoch(self, pipeline: InputPipeline, start: int) -> None:
        self._pipeline, self._start, self._delivered_before = pipeline, start, pipeline.delivered
        if self._step is not None and self.steps_per_epoch:
            size = self.steps_per_execution
            pipeline.allow(-(-self.steps_per_epoch // size) * size - start)

    def _enumerate_from(self, start: int, data_position: DataPosition | None, epochs: int, logs: dict[str, float]):
        """Does what Keras's `_enumerate_iterator` does, from a batch on, after epochs of an earlier run."""
        if data_position is not None:
            self._require_rows(data_position)
            set_finished_epochs(self.data_adapter, data_position.epochs_now)
        size, limit = self.steps_per_execution, self.steps_per_epoch or self._num_batches
        is_finished = limit is not None and 0 < start >= limit
        draw_orders(self.data_adapter, self._finished_passes(start, epochs, is_finished))
        if is_finished:
            begin_finished_epoch(self.data_adapter)
        else:
            self.data_adapter.on_epoch_begin()
        if self._current_iterator is None or self.steps_per_epoch is None or data_position is not None:
            self._current_iterator = self._get_iterator(start, data_position)
            self._steps_seen = start if data_position is None else data_position.batches
        pipeline = self._current_iterator
        if is_finished or (start > 0 and limit is None and pipeline.is_exhausted()):
            yield start, start - 1, NothingLeft(logs)
        else:
            for step in itertools.count(start, size) if limit is None else range(start, limit, size):
                if self._num_batches and self._steps_seen >= self._num_batches:
                    if self.steps_per_epoch:
                        self._interrupted_warning()
                    break
                self._steps_seen += size
                yield step, step + size - 1, pipeline
        if limit and self._num_batches and self._steps_seen >= self._num_batches:
            self._current_iterator, self._steps_seen = None, 0
        self.data_adapter.on_epoch_end()

    def _finished_passes(self, start: int, epochs: int, is_finished: bool) -> int:
        """Returns how many passes through the data are over where an epoch resumes, whose batches may be done, too."""
        if self.steps_per_epoch is None:
            return epochs + is_finished
        return (epochs * self.steps_per_epoch + start) // self._num_batches if self._num_batches else 0

    def _global_rows(self) -> int | None:
        """Returns the number of rows of a global batch of a Grain dataset, if it is known."""
        adapter, is_global = self.data_adapter, self._distribution.auto_shard_dataset
        rows = adapter.batch_size if isinstance(adapter, data_adapters.GrainDatasetAdapter) else None
        return rows if rows is None or is_global else rows * messaging.process_count()

    def _require_rows(self, data_position: DataPosition) -> None:
        """Raises ValueError if the state of a Grain iterator counts batches of another number of rows."""
        before, rows = data_position.rows, self._global_rows()
        if data_position.source is None or before is None or rows == before:
            return
        is_global = self._distribution.auto_shard_dataset
        own = "" if is_global else f", {before} / {messaging.process_count()} in each process"
        raise ValueError(
            f"The checkpoint has the state of a Grain iterator over global batches of {before} rows, but a global "
            f"batch of this fit has {'different numbers of' if rows is None else rows} rows, so the state would be "
            f"that of other rows. Pass batches of {before} rows in all{own}."
        )

    def reset(self):
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        super().reset()

    def position(self) -> tuple[int, DataPosition | None]:
        """Returns the batches delivered in this epoch and the position in the data, as `data.position` describes."""
        pipeline = self._pipeline
        if pipeline is None:
            return 0, None
        batches, found = 0, None
        if self._is_in_epoch:
            batches, found = self._start + pipeline.delivered - self._delivered_before, pipeline.position
        elif self.steps_per_epoch is not None and self._current_iterator is pipeline:
            found = pipeline.position
        elif COUNT_EPOCHS:
            found = DataPosition.at_beginning()
        if found is None:
            return batches, None
        return batches, found._replace(epochs_now=finished_epochs(self.data_adapter), rows=self._global_rows())


def announce_step(step: str, model: keras.Model) -> None:
    """Tells the newest iterator in this thread what its batches are for."""
    newest = _newest_iterator.get()()
    if newest is not None and newest._step is None:
        newest._step, newest._model, newest._is_compiled = step, weakref.ref(model), compiles_steps(model)


def check_values_agree(model: keras.Model | None, place: str) -> None:
    """Raises ValueError where what several processes hold of a model's weights and optimizer state differs."""
    distribution = active_distribution()
    if model is not None and distribution is not None and distribution.is_multi_process:
        put_values_back(model)
        trainable, others, optimizer, _ = state_variables(model, "train")
        distribution.check_values_agree(model, [*trainable, *others, *optimizer], place)

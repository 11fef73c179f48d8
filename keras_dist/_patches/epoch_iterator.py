"""The iterator over the batches of `fit`, `evaluate` and `predict`, in the place of Keras's own.

Keras reads a batch, moves it, and runs the step, one after the other, and among several processes it takes tf.data
only. Here every source that Keras takes is read by Keras's own adapter, and goes through a `Feed`. Training can begin
in the middle of an epoch.
"""

import itertools
import threading
import weakref
from typing import Any

from keras_dist._keras.active_distribution import INSTALLED, active_distribution, no_distribution_in_this_thread
from keras_dist._keras.internals import trainer
from keras_dist._keras.training_state import NOTHING_LEFT
from keras_dist._patches.resumable_iterator import SourceState, iterator_from, state_of
from keras_dist.data.input_pipeline import Feed

# latest: the iterator that was made last. resume: where the next epoch of training begins. followed: the iterator that
# began there.
_this_thread = threading.local()


@INSTALLED.patch(
    trainer,
    "JAXEpochIterator",
    reason="several processes accept tf.data only, batches are not prefetched, and training cannot resume in an epoch",
)
class EpochIterator(trainer.JAXEpochIterator):
    """Keras's iterator over the batches of an epoch, with batches from a `Feed`."""

    _current_iterator: Any

    def __init__(
        self,
        x,
        y=None,
        sample_weight=None,
        batch_size=None,
        steps_per_epoch=None,
        shuffle=False,
        class_weight=None,
        steps_per_execution=1,
    ):
        self._ours: Any = active_distribution()
        self._step: str | None = None  # what the batches are for, once that is known
        self._feed: Feed | None = None
        self._start = self._delivered_before = 0
        self._is_in_epoch = False
        arguments = (x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight, steps_per_execution)
        if self._ours is None:
            super().__init__(*arguments)
            return
        with (
            no_distribution_in_this_thread()
        ):  # Keras's adapters are to read all there is; who takes what is decided here
            super().__init__(*arguments)
        _this_thread.latest = weakref.ref(self)

    def _get_iterator(self, start=0, state=None):
        if self._ours is None:
            return super()._get_iterator()
        adapter = self.data_adapter
        remember = state_of if _followed() is self else None
        return self._ours.feed(lambda: iterator_from(adapter, start, state), self._step, self.steps_per_epoch, remember)

    def _enumerate_iterator(self) -> Any:
        if self._ours is None:
            yield from super()._enumerate_iterator()
            return
        resume = None
        if self._step == "train":
            resume, _this_thread.resume = getattr(_this_thread, "resume", None), None
        steps: Any
        if resume is None:
            steps = super()._enumerate_iterator()
        else:
            _this_thread.followed = weakref.ref(self)
            steps = self._enumerate_from(*resume)
        is_first = True
        try:
            for first, last, feed in steps:
                if is_first:
                    is_first, self._is_in_epoch = False, True
                    self._begin_epoch(
                        self._current_iterator if feed is NOTHING_LEFT else feed, 0 if resume is None else resume[0]
                    )
                yield first, last, feed
        except (
            GeneratorExit
        ):  # a callback has stopped this: nobody asks for the next batch, which the others may not make
            if self._feed is not None:
                self._feed.close()
            raise
        self._is_in_epoch = False
        if self._feed is not None and self.steps_per_epoch is None and self._ours.is_multi_process:
            self._feed.is_over()  # the others may have more, or less

    def _begin_epoch(self, feed: Feed, start: int) -> None:
        self._feed, self._start, self._delivered_before = feed, start, feed.delivered
        if self._step is not None and self.steps_per_epoch:
            size = self.steps_per_execution
            feed.allow(-(-self.steps_per_epoch // size) * size - start)

    def _enumerate_from(self, start: int, state: SourceState | None):
        """As Keras's own, from a batch on."""
        self.data_adapter.on_epoch_begin()
        size, limit = self.steps_per_execution, self.steps_per_epoch or self._num_batches
        if self._current_iterator is None or self.steps_per_epoch is None or state is not None:
            self._current_iterator = self._get_iterator(start, state)
            self._steps_seen = start if state is None else state.batches
        feed = self._current_iterator
        if start > 0 and (feed.is_over() if limit is None else start >= limit):
            yield start, start - 1, NOTHING_LEFT
        else:
            for step in itertools.count(start, size) if limit is None else range(start, limit, size):
                if self._num_batches and self._steps_seen >= self._num_batches:
                    if self.steps_per_epoch:
                        self._interrupted_warning()
                    break
                self._steps_seen += size
                yield step, step + size - 1, feed
        if limit and self._num_batches and self._steps_seen >= self._num_batches:
            self._current_iterator, self._steps_seen = None, 0
        self.data_adapter.on_epoch_end()

    def reset(self):
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        super().reset()

    def position(self) -> tuple[int, SourceState | None]:
        """Returns what `current_position` does, of this iterator."""
        feed = self._feed
        if feed is None:
            return 0, None
        if self._is_in_epoch:
            return self._start + feed.delivered - self._delivered_before, feed.source_state
        goes_on = self.steps_per_epoch is not None and self._current_iterator is feed
        return 0, feed.source_state if goes_on else None


def announce(step: str) -> None:
    """Says what the iterator that was made last is going to be used for."""
    latest = getattr(_this_thread, "latest", lambda: None)()
    if latest is not None and latest._step is None:
        latest._step = step


def resume_next_epoch(batches: int, source_state: SourceState | None = None) -> None:
    """Makes the next epoch of training in this thread begin in its middle, and follows it.

    Args:
        batches: how many batches of the epoch are done.
        source_state: where its data stand, from `current_position`.
    """
    _this_thread.resume = (batches, source_state)


def current_position() -> tuple[int, SourceState | None]:
    """Returns where the iterator stands that `resume_next_epoch` was called for.

    Returns:
        How many batches of the epoch it has delivered, and the state of its data after the last of these. When the
        epoch has ended, 0, and the state if the next epoch goes on in the same pass through the data, else None. Where
        there is no such iterator, 0 and None.
    """
    iterator = _followed()
    return (0, None) if iterator is None else iterator.position()


def _followed() -> EpochIterator | None:
    return getattr(_this_thread, "followed", lambda: None)()


def require_ours(who: str) -> None:
    """Says so where Keras's own iterator is in place, which cannot begin in the middle of an epoch.

    Raises:
        ValueError: no distribution of ours is installed.
    """
    if active_distribution() is None:
        raise ValueError(
            f"{who} needs a distribution of keras_dist. Received: none is installed in this thread. Call "
            "keras_dist.set_distribution(keras_dist.DataParallel()) before the model is made; it may have one device."
        )

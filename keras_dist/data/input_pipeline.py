"""Batches on their way from a source to the steps: read, agreed on among processes, placed, ahead of time."""

import contextlib
import heapq
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_dist.data.batch_placement import BatchPlacer, join_parts
from keras_dist.data.consistency import BatchAgreement
from keras_dist.data.prefetch import LookAhead
from keras_dist.multihost import messaging

# Numbers of feeds that several processes have begun, in the same order on all of them. That of a feed whose end all
# have seen is used again, so that no messages are left behind.
_numbers = itertools.count()
_free_numbers: list[int] = []


class OwnRows(NamedTuple):
    """Which rows of a global batch this process has passed.

    Attributes:
        start: the first.
        rows: how many.
        total: how many the batch has.
    """

    start: int
    rows: int
    total: int


class Feed(Iterator):
    """The batches of a source as global arrays, each made while the step before it runs.

    Args:
        batches: makes the iterator over host batches, when the first batch is asked for.
        placer: lays them over the mesh.
        is_whole: with several processes, whether each reads the whole batches, and not its own part of them.
        step: what the batches are for, as `"train"`; None where only their shapes are looked at.
        steps_per_epoch: how many batches make an epoch, if that was said; more than are allowed are not read ahead.
        state_of: the state of the iterator over host batches, to begin there again; None where nobody asks for it.
    """

    def __init__(
        self,
        batches: Callable[[], Iterable],
        placer: BatchPlacer,
        is_whole: bool,
        step: str | None = None,
        steps_per_epoch: int | None = None,
        state_of: Callable[[Any], Any] | None = None,
    ):
        is_bounded = step is None or steps_per_epoch is not None
        self._source = _Source(batches, placer, is_whole, step, steps_per_epoch, state_of)
        self._ahead = LookAhead(iter(self._source), 0 if is_bounded else None)
        self._end = weakref.finalize(self, self._source.close)
        self._used: list[OwnRows | None] = []
        self.delivered = 0
        self.source_state: Any = None
        self._has_begun = False
        self._next: _Made | None = None

    def allow(self, batches: int) -> None:
        """Lets so many further batches be read ahead."""
        self._ahead.allow(batches)

    def is_over(self) -> bool:
        """Waits for the next batch; returns whether there is none."""
        try:
            self._next = self._take()
        except StopIteration:
            return True
        return False

    def _take(self) -> "_Made":
        if not self._has_begun:
            self._has_begun = True
            self._source.begin()
        made, self._next = next(self._ahead) if self._next is None else self._next, None
        for words in made.warnings:
            warnings.warn(words, stacklevel=3)
        if made.batch is _NONE:
            self._source.end()
            self.close()
            raise StopIteration
        return made

    def __next__(self) -> Any:
        made = self._take()
        self._used.append(made.own_rows)
        self.source_state = made.source_state
        self.delivered += 1
        return join_parts(made.batch)

    def take_own_rows(self) -> list[OwnRows | None]:
        """Returns which rows of the batches since the last call are this process's own, None where all are."""
        used, self._used = self._used, []
        return used

    def close(self) -> None:
        """Ends the reading ahead. A batch that was made and not used is lost."""
        self._end()
        self._ahead.close()


_NONE = object()


class _Made(NamedTuple):
    batch: Any
    own_rows: OwnRows | None = None
    source_state: Any = None
    warnings: tuple[str, ...] = ()


class _Source:
    """What a feed's thread runs. It does not know its feed, which can go while the thread waits."""

    def __init__(self, batches, placer, is_whole, step, steps, state_of):
        self._batches, self._placer, self._is_whole, self._state_of = batches, placer, is_whole, state_of
        self._step, self._steps = step, steps
        self._agreement: BatchAgreement | None = None
        self._number = 0
        self._is_closed = False

    def close(self) -> None:
        """Lets the thread give up to wait for other processes."""
        self._is_closed = True

    def begin(self) -> None:
        """Called before the first batch, in the order in which all processes begin their feeds."""
        if messaging.are_several():
            self._number = heapq.heappop(_free_numbers) if _free_numbers else next(_numbers)
            self._agreement = BatchAgreement(
                f"data {self._number}", self._is_whole, self._step, self._steps, lambda: self._is_closed
            )

    def end(self) -> None:
        """Called when the end that all processes have agreed on has come."""
        heapq.heappush(_free_numbers, self._number)

    def __iter__(self) -> Iterator[_Made]:
        try:
            iterator = iter(self._batches())
            while True:
                batch = next(iterator, _NONE)
                if batch is _NONE:
                    break
                made = self._made(batch, iterator)
                yield made
                if made.batch is _NONE:
                    return
        except Exception as error:
            if self._agreement is not None and not self._agreement.has_ended:
                # Where the others do not hear of it, this process fails all the same, for its own reason.
                with contextlib.suppress(messaging.ProcessFailure):
                    self._agreement.on_error(error)
            raise
        if self._agreement is not None:
            self._agreement.on_end()
            yield _Made(_NONE, warnings=self._agreement.take_warnings())

    def _made(self, batch: Any, iterator: Iterator) -> _Made:
        state = None if self._state_of is None else self._state_of(iterator)
        if self._agreement is None:
            return _Made(self._placer.place(batch), source_state=state)
        rows = self._agreement.on_batch(batch)
        warned = self._agreement.take_warnings()
        if rows is None:
            return _Made(_NONE, warnings=warned)
        if self._is_whole:
            return _Made(self._placer.place(batch), None, state, warned)
        return _Made(self._placer.place_parts(batch, rows), own_rows(rows), state, warned)


def own_rows(rows: list[list[int]]) -> OwnRows:
    """Returns which rows of a batch this process has passed.

    Args:
        rows: for each array of the batch, how many rows each process brings. The first array with rows counts.
    """
    of_first = next((of_leaf for of_leaf in rows if sum(of_leaf)), [0] * messaging.count())
    me = messaging.index()
    return OwnRows(sum(of_first[:me]), of_first[me], sum(of_first))


def own_rows_of(outputs: Any, rows: list[OwnRows]) -> Any:
    """Takes the rows of outputs that belong to what this process has passed.

    Args:
        outputs: host arrays, with the rows of one batch or of several, one after the other.
        rows: those of the batches.

    Returns:
        The same structure; an array with another number of rows than the batches stays as it is.
    """
    starts = itertools.accumulate((of_batch.total for of_batch in rows), initial=0)
    parts = [
        slice(start + of_batch.start, start + of_batch.start + of_batch.rows)
        for start, of_batch in zip(starts, rows, strict=False)
    ]
    total = sum(of_batch.total for of_batch in rows)

    def own(output):
        if np.ndim(output) == 0 or len(output) != total:
            return output
        return np.concatenate([output[part] for part in parts])

    return jax.tree.map(own, outputs)

"""The batches of a distribution: how `fit`, `train_on_batch` and `model(x)` get them onto the mesh."""

import collections
import dataclasses
import functools
import heapq
import itertools
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_dist._keras import internals
from keras_dist._report.user_warnings import warn
from keras_dist.data.batch_placement import BatchPlacer, assemble, is_global
from keras_dist.data.consistency import BatchComparison
from keras_dist.data.executions import StackedBatches, num_stacked
from keras_dist.data.position import DataPosition
from keras_dist.data.prefetch import Prefetcher
from keras_dist.mesh.devices import is_on_mesh
from keras_dist.multihost import messaging

# Several processes number their pipelines in the order in which they start them. The number of a pipeline that all
# have read to its end is used again, so that no messages are left behind.
_numbers = itertools.count()
_free_numbers: list[int] = []


class LocalRows(NamedTuple):
    """The rows of a global batch that this process passed."""

    start: int  # index of the first row
    rows: int
    total: int  # rows of the global batch


class _Read(NamedTuple):
    """A batch that was read from the source."""

    batch: Any
    rows: list[list[int]] | None = None  # of each process, by array; None with one process
    position: DataPosition | None = None
    compared: tuple[float, float] | None = None
    warnings: tuple[str, ...] = ()


class _Prepared(NamedTuple):
    """The batches of one execution."""

    batches: list[Any]  # each a batch or `StackedBatches`; none after the last execution
    local_rows: Sequence[LocalRows | None] = ()
    position: DataPosition | None = None
    compared: tuple[float, float] | None = None
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass
class BatchProducer:
    """What the thread of an `InputPipeline` runs. It has no reference to that, which can be deleted while it waits."""

    batches: Callable[[], Iterable]  # called in the thread, when the first batch is requested
    placer: BatchPlacer
    auto_shard_dataset: bool
    step: str | None = None  # None if only the shapes of batches are used
    steps_per_epoch: int | None = None
    position_of: Callable[[Any], DataPosition] | None = None  # of the iterator over host batches
    warning_for: Callable[[int], str | None] = lambda rows: None  # given the number of rows of the first batch
    steps_per_execution: int = 1
    is_compiled: bool = False  # whether the steps are
    makes_arrays: bool = False  # whether the source makes new arrays for each batch, of equal structure and dtypes
    is_closed: threading.Event = dataclasses.field(default_factory=threading.Event)  # no more batches are wanted
    number: int = 0

    def __iter__(self) -> Iterator[_Prepared]:
        if not messaging.is_multi_process():
            return self._prepare_all(None)
        self.number = heapq.heappop(_free_numbers) if _free_numbers else next(_numbers)
        settings = (self.auto_shard_dataset, self.step, self.steps_per_epoch)
        return self._prepare_all(BatchComparison(f"data {self.number}", *settings, self.is_closed.is_set))

    @property
    def batches_per_item(self) -> int:
        """The most batches that are prepared as one item: those of an execution if a compiled loop takes them."""
        return self.steps_per_execution if self.is_compiled else 1

    def _prepare_all(self, comparison: BatchComparison | None) -> Iterator[_Prepared]:
        try:
            batches, is_first = self._read_all(comparison), True
            while read := list(itertools.islice(batches, self.batches_per_item)):
                prepared = self._prepared(read, is_first)
                if not self.makes_arrays and not self._copies:
                    jax.block_until_ready(prepared.batches)  # before the source writes into the arrays that are sent
                yield prepared
                is_first = False
        except Exception as error:
            if comparison is not None:
                comparison.report_error(error)
            raise
        if comparison is not None:
            comparison.report_end()
            yield _Prepared([], warnings=comparison.take_warnings())

    def _read_all(self, comparison: BatchComparison | None) -> Iterator[_Read]:
        iterator = iter(self.batches())
        for batch in map(self._own, iterator):
            position = None if self.position_of is None else self.position_of(iterator)
            rows, compared, found = None, None, ()
            if comparison is not None:
                begin = time.perf_counter()
                rows = comparison.compare_batch(batch)
                if rows is None:
                    return
                compared, found = (begin, time.perf_counter()), comparison.take_warnings()
            yield _Read(batch, rows, position, compared, found)

    def read_here(self, source: Iterator) -> Iterator[tuple[Any, int]]:
        """Yields batches or stacks for compiled steps on one CPU, read when they are requested.

        The first of an execution comes with the number of its batches, the others with 0.
        """
        size, stay = self.batches_per_item, False
        for first in source:
            if stay:  # all batches are like the first one, which is passed on as it is
                yield first, 1
                continue
            batches = itertools.chain([first], itertools.islice(source, size - 1))
            read = [_Read(self._own(batch)) for batch in batches]
            placed = self._placed(read)
            stay = size == 1 and self.makes_arrays and all(map(operator.is_, *map(jax.tree.leaves, (first, placed[0]))))
            yield from zip(placed, [len(read), *[0] * (len(placed) - 1)], strict=True)

    def _own(self, batch: Any) -> Any:
        """Returns a batch that stays as it is when the source reads the next one, maybe into the same arrays."""
        if self.makes_arrays or not self._copies:
            return batch
        return copied(batch)

    @property
    def _copies(self) -> bool:
        """Whether arrays must outlive the next read: CPU devices use their memory, an execution stacks its batches."""
        return self.placer.is_on_cpu or self.batches_per_item > 1

    def _prepared(self, read: list[_Read], is_first: bool) -> _Prepared:
        last, found = read[-1], tuple(itertools.chain.from_iterable(each.warnings for each in read))
        own = [None if each.rows is None or self.auto_shard_dataset else local_rows(each.rows) for each in read]
        if is_first:  # the last batch of an epoch may be small
            first_rows = (np.shape(leaf)[0] for leaf in jax.tree.leaves(read[0].batch) if np.ndim(leaf))
            message = self.warning_for(next(first_rows, 0) if own[0] is None else own[0].total)
            found += () if message is None else (message,)
        compared = last.compared
        if compared is not None and len(read) > 1:  # what was read in between is no comparison
            seconds = sum(end - begin for begin, end in (each.compared or (0.0, 0.0) for each in read))
            compared = compared[1] - seconds, compared[1]
        return _Prepared(self._placed(read), own, last.position, compared, found)

    def _placed(self, read: list[_Read]) -> list[Any]:
        count, stack = num_stacked([(each.batch, each.rows) for each in read]), None
        if count:
            rows = None if self.auto_shard_dataset else read[0].rows
            stack = self.placer.place_stacked([each.batch for each in read[:count]], rows)
        if stack is None:
            return list(map(self._placed_alone, read))
        return [StackedBatches(stack), *map(self._placed_alone, read[count:])]

    def _placed_alone(self, read: _Read) -> Any:
        if read.rows is not None and not self.auto_shard_dataset:
            return self.placer.place_local(read.batch, read.rows)
        return self.placer.place(read.batch, self.is_compiled)


def copied(batch: Any) -> Any:
    """Returns a batch with copies of host arrays."""
    return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)


class InputPipeline(Prefetcher):
    """Iterates over the batches of a source as global arrays; each is prepared while the step before it runs.

    If only the shapes of batches are used, and with `steps_per_epoch`, no more batches than allowed are prefetched.
    """

    def __init__(self, producer: BatchProducer):
        is_limited = producer.step is None or producer.steps_per_epoch is not None
        ahead = 2 if producer.batches_per_item == 1 else 1  # an execution of several batches takes longer
        super().__init__(producer, 0 if is_limited else None, producer.is_closed, ahead)
        self._here: Iterator[tuple[Any, int]] | None = None  # batches that are read in this thread
        if producer.is_compiled and producer.placer.is_one_cpu:
            # JAX computes while the host reads, and to change threads takes longer than a small step.
            self._source = iter(producer.batches())
            self._here = producer.read_here(self._source)
        self._producer = producer
        self._local_rows: list[LocalRows | None] = []
        self.delivered = 0
        self.position: DataPosition | None = None  # after the last batch that was delivered
        # When that batch was compared with those of other processes: begin and end by `time.perf_counter`.
        self.compared: tuple[float, float] | None = None
        self._peeked: _Prepared | None = None
        self._rest: collections.deque[Any] = collections.deque()  # batches of an execution that has begun

    def allow(self, items: int) -> None:
        """Allows so many more batches to be prepared before they are requested, if there is a limit."""
        super().allow(-(-items // self._producer.batches_per_item))

    def close(self) -> None:
        self._here = None
        super().close()

    def is_exhausted(self) -> bool:
        """Waits for the next batch and returns whether there is none."""
        try:
            if self._here is None:
                self._peeked = self._take()
            else:
                self._here = itertools.chain([next(self._here)], self._here)
        except StopIteration:
            return True
        return False

    def _take(self) -> _Prepared:
        if self._peeked is not None:
            prepared, self._peeked = self._peeked, None
            return prepared
        prepared = super().__next__()
        for message in prepared.warnings:
            warn(message)
        if not prepared.batches:
            heapq.heappush(_free_numbers, self._producer.number)
            self.close()
            raise StopIteration
        return prepared

    def __next__(self) -> Any:
        if self._here is not None:
            batch, num_read = next(self._here)
            self.delivered += num_read
            if num_read and self._producer.position_of is not None:
                self.position = self._producer.position_of(self._source)
            return batch
        if not self._rest:
            prepared = self._take()
            self._rest.extend(prepared.batches)
            if self._producer.step == "predict":
                self._local_rows += prepared.local_rows
            self.delivered += len(prepared.local_rows)
            self.position, self.compared = prepared.position, prepared.compared
        batch = self._rest.popleft()
        return batch if self._producer.auto_shard_dataset else assemble(batch)

    def take_local_rows(self) -> list[LocalRows | None]:
        """Returns this process's rows of each batch since the last call; None for a batch that all processes passed."""
        rows, self._local_rows = self._local_rows, []
        return rows


def local_rows(rows: list[list[int]]) -> LocalRows:
    """Returns which rows of a global batch this process passed, by the first of its arrays that has rows."""
    counts = next((counts for counts in rows if sum(counts)), [0] * messaging.process_count())
    me = messaging.process_index()
    return LocalRows(sum(counts[:me]), counts[me], sum(counts))


def select_local_rows(outputs: Any, batches: list[LocalRows]) -> Any:
    """Returns this process's rows of outputs of concatenated batches; arrays of another length are unchanged."""
    ends = np.cumsum([batch.total for batch in batches])

    def select(output):
        if np.ndim(output) == 0 or len(output) != ends[-1]:
            return output
        parts = zip(np.split(output, ends[:-1]), batches, strict=True)
        return np.concatenate([part[batch.start : batch.start + batch.rows] for part, batch in parts])

    return jax.tree.map(select, outputs)


class Batches:
    def __init__(self, distribution: Any, placer: BatchPlacer, comparisons: dict[bool, BatchComparison]):
        self._distribution, self._placer = distribution, placer
        self._comparisons = comparisons  # of single batches so far, by whether each process passes the global batch

    def place(self, batch: Any) -> tuple[Any, list[LocalRows | None]]:
        """Returns the arrays of a host batch as global arrays, and which rows of the global batch this process passed.

        The rows are None where every process passed the global batch.
        """
        is_global_batch, rows = self._distribution.auto_shard_dataset, None
        if self._distribution.is_multi_process:
            comparison = self._comparisons.setdefault(
                is_global_batch, BatchComparison("single batches", is_global_batch, "one batch")
            )
            if is_global_batch:
                comparison.compare_some(batch)
            else:
                rows = comparison.compare_batch(batch)
        if rows is None:
            return self._placer.place(batch), [None]
        return assemble(self._placer.place_local(batch, rows)), [local_rows(rows)]

    def pipeline(
        self,
        batches: Callable[[], Iterator],
        step: str | None,
        steps_per_epoch: int | None,
        position_of: Callable[[Iterator], Any] | None,
        steps_per_execution: int,
        is_compiled: bool,
        makes_arrays: bool,
    ) -> InputPipeline:
        """Returns a pipeline of global batches, made from this process's host batches."""
        warning_for = functools.partial(self._distribution.steps.warning_for, step)
        settings = self._distribution.auto_shard_dataset, step, steps_per_epoch, position_of, warning_for
        execution = steps_per_execution, is_compiled, makes_arrays
        return InputPipeline(BatchProducer(batches, self._placer, *settings, *execution))

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

    def readable(self, outputs: Any) -> Any:
        """Returns what an eager `model(...)` returned, replicated where rows of it are on other processes only."""
        return jax.tree.map(self._readable, outputs) if self._distribution.is_multi_process else outputs

    def _readable(self, leaf: Any) -> Any:
        is_concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        if not is_concrete or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        replicated = self._placer.replicate(leaf)
        internals.set_keras_masks([replicated], [self._readable(internals.get_keras_mask(leaf))])
        return replicated

    def _place_argument(self, leaf: Any) -> Any:
        is_concrete = isinstance(leaf, (np.ndarray, jax.Array)) and not isinstance(leaf, Tracer)
        if not is_concrete or leaf.ndim == 0 or internals.get_keras_mask(leaf) is not None or is_global(leaf):
            return leaf
        return self.place(leaf)[0]

"""Where in its data an iterator of Keras stands, and iterators that begin there.

A pass through the data of `fit` begins anew at each epoch, or, with `steps_per_epoch`, goes on through several. What
is shuffled is drawn when the pass begins, from the global random generators; so these belong to the position.
"""

import collections
import itertools
import json
import queue
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_dist._keras.active_distribution import INSTALLED
from keras_dist._keras.internals import array_slicing, data_adapter_utils, data_adapters, py_dataset_adapter


class RandomState(NamedTuple):
    """The global random generators of Python and numpy."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> "RandomState":
        """Returns them as they are."""
        return cls(random.getstate(), np.random.get_state())

    def set(self) -> None:
        """Makes them what they were."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def as_json(self) -> list:
        """Returns them as JSON can hold them."""
        name, keys, *rest = self.numpy
        return [self.python, [name, np.asarray(keys).tolist(), *rest]]

    @classmethod
    def from_json(cls, found: list) -> "RandomState":
        """Returns what `as_json` was given."""
        (version, keys, gauss), (name, *numbers) = found
        return cls((version, tuple(keys), gauss), (name, np.array(numbers[0], np.uint32), *numbers[1:]))


class SourceState(NamedTuple):
    """Where a pass through data stands.

    Attributes:
        batches: how many have been taken since the pass began.
        began: the random generators before it began.
        now: those after the last batch was taken.
        source: the state of a grain iterator, None of others.
    """

    batches: int
    began: RandomState
    now: RandomState
    source: str | None

    def as_json(self) -> dict:
        """Returns it as JSON can hold it."""
        return {
            "batches": self.batches,
            "began": self.began.as_json(),
            "now": self.now.as_json(),
            "source": self.source,
        }

    @classmethod
    def from_json(cls, found: dict) -> "SourceState":
        """Returns what `as_json` was given."""
        began, now = RandomState.from_json(found["began"]), RandomState.from_json(found["now"])
        return cls(found["batches"], began, now, found["source"])


def iterator_from(adapter: Any, start: int = 0, state: SourceState | None = None) -> Iterator:
    """Returns an iterator over the batches of an adapter, from a batch on.

    Arrays, `keras.utils.PyDataset` and grain begin there without reading what comes before; all others read it and
    drop it.

    Args:
        adapter: Keras's adapter of the data; its epoch has begun.
        start: the number of the first batch, if there is no state.
        state: what `state_of` has returned for an iterator of the same data. The random generators then become what
            they were.

    Returns:
        The iterator. Its batches are as from `adapter.get_jax_iterator()`.
    """
    return _Positioned(adapter, start, state)


def state_of(iterator: Iterator) -> SourceState:
    """Returns where an iterator stands that `iterator_from` has returned, after the batch that was taken last.

    It is called by the thread that takes the batches.
    """
    assert isinstance(iterator, _Positioned)
    return iterator.state()


class _Positioned:
    """An iterator that counts, and remembers what random numbers its pass began with."""

    def __init__(self, adapter, start: int, state: SourceState | None):
        self._adapter, self._batches = adapter, start if state is None else state.batches
        self._state = state
        self._began = None if state is None else state.began
        self._iterator: Any = None  # of the batches, once the first is wanted
        self._source: Any = None  # of a grain iterator: itself

    def __iter__(self):
        return self

    def __next__(self):
        if self._iterator is None:
            self._iterator = self._begin()
            if isinstance(self._adapter, data_adapters.GrainDatasetAdapter):
                self._source = self._iterator
        batch = next(self._iterator)
        self._batches += 1
        return batch

    def state(self) -> SourceState:
        began = self._began or _before_epoch(self._adapter) or RandomState.now()
        if self._source is not None:
            source = _as_text(self._source.get_state())
        else:
            source = None if self._iterator is not None or self._state is None else self._state.source
        return SourceState(self._batches, began, RandomState.now(), source)

    def _begin(self) -> Any:
        """Begins when the first batch is wanted, in the thread that wants it, as Keras's generators do."""
        adapter, state, start = self._adapter, self._state, self._batches
        if start == 0 and (state is None or state.source is None):
            self._began = _before_epoch(adapter) or RandomState.now()
            return iter(adapter.get_jax_iterator())
        if _has_workers(adapter):
            _stop(adapter.enqueuer)  # it has begun to draw and read
        if state is not None:
            state.began.set()
        self._began = RandomState.now()
        iterator = _skipping(adapter, start, None if state is None else state.source)
        if state is not None:
            state.now.set()
        return iterator


def _skipping(adapter: Any, start: int, source: str | None) -> Iterator:
    """Returns an iterator that begins at a batch; what is shuffled has been drawn when it returns."""
    if isinstance(adapter, data_adapters.ArrayDataAdapter):
        return _array_batches(adapter, start)
    if isinstance(adapter, data_adapters.PyDatasetAdapter):
        if adapter.py_dataset.num_batches is not None:
            batches = _dataset_batches(adapter, start)
            return data_adapter_utils.get_jax_iterator(map(adapter._standardize_batch, batches))
        if adapter.enqueuer is None:
            batches = (adapter.py_dataset[index] for index in itertools.count(start))
            return data_adapter_utils.get_jax_iterator(map(adapter._standardize_batch, batches))
    iterator: Any = iter(adapter.get_jax_iterator())
    if source is not None:
        iterator.set_state(_from_text(source))
    else:
        collections.deque(itertools.islice(iterator, start), maxlen=0)
    return iterator


def _array_batches(adapter: Any, start: int) -> Iterator:
    """The batches of arrays: Keras's own loop, which slices nothing until it comes to the first that is wanted."""
    are_wanted = False

    def batch_of(sliceable, indices):
        return sliceable.convert_to_jax_compatible(sliceable[indices]) if are_wanted else None

    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
    iterator = adapter._get_iterator(batch_of, inputs)
    collections.deque(itertools.islice(iterator, start), maxlen=0)
    are_wanted = True
    return iterator


class _Rest(py_dataset_adapter.PyDataset):
    """The batches of a dataset that are left, in the order in which they are wanted."""

    def __init__(self, dataset, indices: list[int]):
        super().__init__()
        self.dataset, self.indices = dataset, indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.dataset[self.indices[index]]


def _dataset_batches(adapter: Any, start: int) -> Iterator:
    """The batches of a PyDataset of known length."""
    indices = list(range(adapter.py_dataset.num_batches))
    if adapter.shuffle:
        random.shuffle(indices)
    rest = _Rest(adapter.py_dataset, indices[start:])
    if adapter.enqueuer is None or not rest.indices:
        return (rest[index] for index in range(len(rest)))
    return _batches_of_workers(adapter.enqueuer, rest)


def _batches_of_workers(enqueuer: Any, rest: _Rest) -> Iterator:
    dataset, shuffle = enqueuer.py_dataset, enqueuer.shuffle
    enqueuer.py_dataset, enqueuer.shuffle = rest, False
    try:
        enqueuer.start()
        yield from itertools.islice(enqueuer.get(), len(rest))
    finally:
        _stop(enqueuer)
        enqueuer.py_dataset, enqueuer.shuffle = dataset, shuffle


def _has_workers(adapter: Any) -> bool:
    """Whether other threads or processes read a PyDataset of known length."""
    is_dataset = isinstance(adapter, data_adapters.PyDatasetAdapter)
    return is_dataset and adapter.enqueuer is not None and adapter.py_dataset.num_batches is not None


def _stop(enqueuer: Any) -> None:
    """Stops the workers of a PyDataset, and forgets what they have read."""
    enqueuer.stop()
    enqueuer.ready_queue = queue.Queue()


def _before_epoch(adapter: Any) -> RandomState | None:
    """The random generators before the workers of a dataset have drawn the order of its batches."""
    return getattr(adapter, "_before_epoch", None) if _has_workers(adapter) else None


@INSTALLED.patch(
    py_dataset_adapter.PyDatasetAdapter,
    "on_epoch_begin",
    reason="batches that workers read before `fit` began come first, and the last ones are left out",
)
def _begin_epoch(original, distribution, self):
    if _has_workers(self):
        _stop(self.enqueuer)
        self._before_epoch = RandomState.now()
    return original(self)


def _as_text(state: Any) -> str:
    # A grain DataLoader has bytes, a dataset what JSON can hold.
    return json.dumps({"bytes": state.decode()} if isinstance(state, bytes) else {"state": state})


def _from_text(text: str) -> Any:
    found = json.loads(text)
    return found["bytes"].encode() if "bytes" in found else found["state"]

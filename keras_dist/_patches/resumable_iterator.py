"""Iterators over the batches of Keras's data adapters that can start in the middle of a pass through the data."""

import collections
import itertools
import json
import queue
import random
from collections.abc import Iterator
from typing import Any

from keras_dist._keras.active_distribution import INSTALLED
from keras_dist._keras.data_adapters import (
    COUNT_EPOCHS,
    adapter_after,
    array_slicing,
    data_adapter_utils,
    data_adapters,
    finished_epochs,
    py_dataset_adapter,
)
from keras_dist._keras.global_state import RandomState
from keras_dist.data.position import DataPosition


class ResumableIterator:
    """Iterates over the batches of a data adapter, after its `on_epoch_begin`, from a batch on, and knows its position.

    Arrays, `keras.utils.PyDataset` and Grain start there without reading what comes before. Other sources are read from
    their beginning, and the batches that are done are dropped. The pass starts when the first batch is requested, in
    the thread that requests it, as with Keras's own generators; a given `position` sets the global random generators.
    """

    def __init__(
        self, adapter: Any, start: int = 0, position: DataPosition | None = None, must_have_batches: bool = False
    ):
        self._adapter, self._resumed_from = adapter, position
        self._batches = start if position is None else position.batches
        self._began = None if position is None else position.began
        self._epochs_began = finished_epochs(adapter) if position is None else position.epochs_began
        self._must_have_batches = must_have_batches
        self._iterator: Any = None  # over the batches, once the first is requested

    def __iter__(self):
        return self

    def __next__(self):
        if self._iterator is None:
            self._iterator = self._begin()
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._batches == 0 and self._must_have_batches:
                raise no_batches_error(type(self._adapter)) from None
            raise
        self._batches += 1
        return batch

    def position(self) -> DataPosition:
        """Returns the position after the last batch; called by the thread that requests batches."""
        began = self._began or _random_state_before_workers(self._adapter) or RandomState.capture()
        source = None
        if self._iterator is None:
            source = None if self._resumed_from is None else self._resumed_from.source
        elif isinstance(self._adapter, data_adapters.GrainDatasetAdapter):
            source = _encode(self._iterator.get_state())
        epochs = self._epochs_began, finished_epochs(self._adapter)
        return DataPosition(self._batches, began, RandomState.capture(), source, *epochs)

    def _begin(self) -> Any:
        adapter, position, start = self._adapter, self._resumed_from, self._batches
        if start == 0 and (position is None or position.source is None):
            self._began = _random_state_before_workers(adapter) or RandomState.capture()
            self._epochs_began = finished_epochs(adapter)
            return iter(adapter.get_jax_iterator())
        _stop_workers(adapter)  # they have already drawn the order and read batches
        if position is not None:
            position.began.restore()
        self._began = RandomState.capture()
        adapter = adapter_after(adapter, self._epochs_began)
        iterator = _skip_to(adapter, start, None if position is None else position.source)
        if position is not None:
            position.now.restore()
        return iterator


def begin_finished_epoch(adapter: Any) -> None:
    """Begins an epoch whose batches are all done: its order was drawn before, so the random state does not change."""
    before = RandomState.capture()
    adapter.on_epoch_begin()
    _stop_workers(adapter)
    before.restore()


def draw_orders(adapter: Any, passes: int) -> None:
    """Draws the orders of passes that are over, which sources of other libraries do not draw from global generators.

    A shuffle of tf.data has another order for each iterator over it. A `DataLoader` of PyTorch draws them from its
    generator. No data is read.
    """
    before = RandomState.capture()
    for _ in range(passes):
        if isinstance(adapter, data_adapters.TFDatasetAdapter):
            iter(adapter._dataset)
        elif isinstance(adapter, data_adapters.TorchDataLoaderAdapter):
            _draw_order(adapter._dataloader)
    before.restore()


def _draw_order(loader: Any) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the seed of its workers
    if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        indices = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        collections.deque(indices, maxlen=0)


def no_batches_error(adapter: type) -> ValueError:
    return ValueError(
        f"The dataset has no batches (Keras reads it with {adapter.__name__}). Pass at least one row; check filters, "
        "file patterns and the dataset's length."
    )


def _skip_to(adapter: Any, start: int, source: str | None) -> Iterator:
    """Returns an iterator that starts at a batch; what is shuffled has been drawn when it returns."""
    if isinstance(adapter, data_adapters.ArrayDataAdapter):
        return _array_batches(adapter, start)
    is_dataset = isinstance(adapter, data_adapters.PyDatasetAdapter)
    if is_dataset and (adapter.enqueuer is None or adapter.py_dataset.num_batches is not None):
        return data_adapter_utils.get_jax_iterator(map(adapter._standardize_batch, _dataset_batches(adapter, start)))
    iterator: Any = iter(adapter.get_jax_iterator())
    if source is not None:
        iterator.set_state(_decode(source))
    else:
        _drop(iterator, start)
    return iterator


def _drop(iterator: Iterator, items: int) -> None:
    collections.deque(itertools.islice(iterator, items), maxlen=0)


def _array_batches(adapter: Any, start: int) -> Iterator:
    """Runs Keras's own loop over arrays, which slices nothing until it reaches the first batch that is needed."""
    is_needed = False

    def batch_of(sliceable, indices):
        return sliceable.convert_to_jax_compatible(sliceable[indices]) if is_needed else None

    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
    iterator = adapter._get_iterator(batch_of, inputs)
    _drop(iterator, start)
    is_needed = True
    return iterator


class _Remainder(py_dataset_adapter.PyDataset):
    def __init__(self, dataset, indices: list[int]):
        super().__init__()
        self.dataset, self.indices = dataset, indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.dataset[self.indices[index]]


def _dataset_batches(adapter: Any, start: int) -> Iterator:
    dataset, indices = adapter.py_dataset, itertools.count(start)
    if dataset.num_batches is not None:
        order = list(range(dataset.num_batches))
        if adapter.shuffle:
            generator = random.Random(finished_epochs(adapter)) if COUNT_EPOCHS else random
            generator.shuffle(order)
        indices = order[start:]
        if adapter.enqueuer is not None and indices:
            return _batches_of_workers(adapter, _Remainder(dataset, indices))
    return (dataset[index] for index in indices)


def _batches_of_workers(adapter: Any, remainder: _Remainder) -> Iterator:
    enqueuer, dataset, shuffle = adapter.enqueuer, adapter.enqueuer.py_dataset, adapter.enqueuer.shuffle
    enqueuer.py_dataset, enqueuer.shuffle = remainder, False
    try:
        enqueuer.start(**({"epoch": 0} if COUNT_EPOCHS else {}))  # they do not shuffle
        yield from itertools.islice(enqueuer.get(), len(remainder))
    finally:
        _stop_workers(adapter)
        enqueuer.py_dataset, enqueuer.shuffle = dataset, shuffle


def _has_workers(adapter: Any) -> bool:
    """Whether other threads or processes read a PyDataset of known length."""
    is_dataset = isinstance(adapter, data_adapters.PyDatasetAdapter)
    return is_dataset and adapter.enqueuer is not None and adapter.py_dataset.num_batches is not None


def _stop_workers(adapter: Any) -> None:
    if _has_workers(adapter):
        adapter.enqueuer.stop()
        adapter.enqueuer.ready_queue = queue.Queue()


def _random_state_before_workers(adapter: Any) -> RandomState | None:
    return getattr(adapter, "_random_state_before_workers", None) if _has_workers(adapter) else None


@INSTALLED.patch(py_dataset_adapter.PyDatasetAdapter, "on_epoch_begin")
def _on_epoch_begin(original, distribution, self):
    """Without it, batches that workers read before `fit` began come first, and the last ones are left out."""
    _stop_workers(self)
    self._random_state_before_workers = RandomState.capture()
    return original(self)


def _encode(state: Any) -> str:
    """Returns the state of a Grain iterator as JSON: bytes of a DataLoader, JSON values of a dataset."""
    return json.dumps({"bytes": state.decode()} if isinstance(state, bytes) else {"state": state})


def _decode(text: str) -> Any:
    values = json.loads(text)
    return values["bytes"].encode() if "bytes" in values else values["state"]

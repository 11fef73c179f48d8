"""An iterator that a thread runs ahead of its consumer: the next item is produced while the current one is used."""

import atexit
import contextlib
import contextvars
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

_EXIT_GRACE = 2.0  # seconds that a thread has to produce its last item when the program ends

_stops: "weakref.WeakKeyDictionary[threading.Thread, Callable[[], Any]]" = weakref.WeakKeyDictionary()


class Prefetcher(Iterator):
    """Runs an iterator in a thread, by default two items ahead of its consumer.

    Items keep the iterator's order. An exception of the iterator is raised in place of the item. When the first item is
    requested, `iter(items)` is called. After that only the thread uses the iterator. It ends with the iterator, when
    `close` is called, or when this object is garbage-collected. No more than `limit` items, plus those that `allow`
    adds, are produced before they are requested, so that items that nobody will request stay in the source.
    `is_stopped` is set when the thread is to end.

    The thread produces an item for each permit that it gets. All other state is the consumer's.

    >>> list(Prefetcher(iter("abc")))
    ['a', 'b', 'c']
    """

    def __init__(
        self, items: Iterable, limit: int | None = None, is_stopped: threading.Event | None = None, ahead: int = 2
    ):
        self._items: Iterable | None = items
        self._ahead = ahead
        self._allowed = math.inf if limit is None else limit
        self._requested = self._permitted = 0  # numbers of items
        self._is_exhausted = False
        self._permits: SimpleQueue[None] = SimpleQueue()
        self._finished: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._is_stopped = is_stopped or threading.Event()
        self._stop = weakref.finalize(self, _stop, self._is_stopped, self._permits, self._finished)

    def allow(self, items: int) -> None:
        """Allows so many more items to be produced before they are requested, if there is a limit."""
        self._allowed = max(self._allowed, self._permitted) + items

    def __next__(self) -> Any:
        if self._is_exhausted:
            raise StopIteration
        self._requested += 1
        self._permit(self._requested)
        if self._items is not None:
            # A daemon thread, because the source may block forever.
            arguments = (_produce, iter(self._items), self._permits, self._is_stopped, self._finished)
            thread = threading.Thread(target=contextvars.copy_context().run, args=arguments, daemon=True)
            thread.start()
            _stops[thread] = self._stop
            self._items = None
        item, error = self._finished.get()
        if error is not None:
            self._is_exhausted = True
            raise error
        self._permit(self._requested + self._ahead)
        return item

    def close(self) -> None:
        """Ends the thread after the item that it is producing, which is lost."""
        self._is_exhausted = True
        self._stop()

    def _permit(self, items: int) -> None:
        """Lets the thread produce items up to this number, as far as they are allowed or requested."""
        while self._permitted < min(items, max(self._allowed, self._requested)):
            self._permitted += 1
            self._permits.put(None)


def _stop(is_stopped: threading.Event, permits: SimpleQueue, finished: SimpleQueue) -> None:
    is_stopped.set()
    permits.put(None)
    with contextlib.suppress(Empty):
        while True:
            finished.get_nowait()


# The thread does not keep the `Prefetcher` alive.
def _produce(items: Iterator, permits: SimpleQueue, is_stopped: threading.Event, finished: SimpleQueue) -> None:
    while True:
        permits.get()
        if is_stopped.is_set():
            return
        try:
            item, error = next(items), None
        except BaseException as raised:
            item, error = None, raised
        finished.put((item, error))
        if error is not None:
            return
        del item


def stop_all() -> None:
    """Stops all threads, before this process ends and while the others do."""
    for stop in [*_stops.values()]:
        stop()


@atexit.register
def _end_all() -> None:
    """Waits for the threads: Python aborts if it ends while one of them is inside JAX."""
    stop_all()
    for thread in [*_stops]:
        thread.join(_EXIT_GRACE)

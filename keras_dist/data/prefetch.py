"""An iterator that a thread runs ahead of its consumer: the next item is produced while the current one is used."""

import collections
import contextvars
import math
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Iterator[T], Generic[T]):
    """Runs an iterator in a thread: one finished item waits while the next one is produced, never more.

    Items keep the iterator's order. An exception of the iterator is raised in place of the item. When the first item is
    requested, `iter(items)` is called. After that only the thread uses the iterator. It ends with the iterator, when
    `close` is called, or when this object is garbage-collected. No more than `limit` items, plus those that `allow`
    adds, are produced before they are requested, so that items that nobody will request stay in the source.

    >>> list(Prefetcher(iter("abc")))
    ['a', 'b', 'c']
    """

    def __init__(self, items: Iterable[T], limit: int | None = None):
        self._items: Iterable[T] | None = items
        self._buffer = _Buffer(limit)
        self._stop = weakref.finalize(self, self._buffer.stop)
        self._is_exhausted = False

    def allow(self, items: int) -> None:
        """Allows so many more items to be produced before they are requested, if there is a limit."""
        self._buffer.allow(items)

    def __next__(self) -> T:
        if self._is_exhausted:
            raise StopIteration
        if self._items is not None:
            # A daemon thread, because the source may block forever.
            arguments = (_produce, iter(self._items), self._buffer)
            threading.Thread(target=contextvars.copy_context().run, args=arguments, daemon=True).start()
            self._items = None
        item, error = self._buffer.take()
        if error is not None:
            self._is_exhausted = True
            raise error
        return item

    def close(self) -> None:
        """Ends the thread after the item that it is producing, which is lost."""
        self._is_exhausted = True
        self._stop()


class _Buffer:
    """The state that the thread shares with the `Prefetcher`, which the thread must not keep alive."""

    def __init__(self, limit: int | None):
        self._changed = threading.Condition()
        self._finished: collections.deque[tuple[Any, BaseException | None]] = collections.deque()
        self._allowed = math.inf if limit is None else limit
        self._requested = self._started = 0  # numbers of items
        self._is_stopped = False

    def allow(self, items: int) -> None:
        with self._changed:
            self._allowed = max(self._allowed, self._started) + items
            self._changed.notify_all()

    def take(self) -> tuple[Any, BaseException | None]:
        with self._changed:
            self._requested += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._finished)
            self._changed.notify_all()
            return self._finished.popleft()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._finished.clear()
            self._changed.notify_all()

    def may_produce(self) -> bool:
        """Waits until an item may be produced; returns False if production has been stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._started < max(self._allowed, self._requested))
            self._started += 1
            return not self._is_stopped

    def put(self, item: Any, error: BaseException | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or not self._finished)
            if not self._is_stopped:
                self._finished.append((item, error))
                self._changed.notify_all()


def _produce(items: Iterator, buffer: _Buffer) -> None:
    while buffer.may_produce():
        try:
            item, error = next(items), None
        except BaseException as raised:
            item, error = None, raised
        buffer.put(item, error)
        if error is not None:
            return
        del item

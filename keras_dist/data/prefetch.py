"""An iterator that a thread runs ahead of its consumer: the next item is made while the last one is used."""

import collections
import contextvars
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LookAhead(Iterator[T], Generic[T]):
    """Runs an iterator in a thread: one finished item waits while the next is made, never more.

    Items come in the iterator's order. What the iterator raises is raised where the item would have come. The thread
    ends when the iterator does, when `close` is called, or when nobody holds this object any more.

    Args:
        items: what is iterated. It is not touched before the first item is asked for, and then by the thread alone.
        limit: how many items may be made before they are asked for, until `allow` raises it; None for as many as
            there are. Items that nobody will ask for then stay in their source.

    Example:

    >>> list(LookAhead(iter("abc")))
    ['a', 'b', 'c']
    """

    def __init__(self, items: Iterator[T], limit: int | None = None):
        self._items: Iterator[T] | None = items
        self._shared = _Shared(limit)
        self._stop = weakref.finalize(self, self._shared.stop)
        self._is_over = False

    def allow(self, items: int) -> None:
        """Lets so many further items be made before they are asked for, where there is a limit."""
        self._shared.allow(items)

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        if self._items is not None:
            # A daemon, since a source may take for ever to give its next item.
            arguments = (_make_items, self._items, self._shared)
            threading.Thread(target=contextvars.copy_context().run, args=arguments, daemon=True).start()
            self._items = None
        item, error = self._shared.take()
        if error is not None:
            self._is_over = True
            raise error
        return item

    def close(self) -> None:
        """Ends the thread, after the item that it is making, which is lost."""
        self._is_over = True
        self._stop()


class _Shared:
    """What the thread and the `LookAhead` share; the thread must not keep the other alive."""

    def __init__(self, limit: int | None):
        self._change = threading.Condition()
        self._finished: collections.deque[tuple[Any, BaseException | None]] = collections.deque()
        self._limit = limit
        self._is_asked = self._is_stopped = False

    def allow(self, items: int) -> None:
        with self._change:
            if self._limit is not None:
                self._limit += items
            self._change.notify_all()

    def take(self) -> tuple[Any, BaseException | None]:
        with self._change:
            self._is_asked = True
            self._change.notify_all()
            self._change.wait_for(lambda: self._finished)
            self._is_asked = False
            self._change.notify_all()
            return self._finished.popleft()

    def stop(self) -> None:
        with self._change:
            self._is_stopped = True
            self._finished.clear()
            self._change.notify_all()

    def may_make(self) -> bool:
        """Waits until an item may be made; False where none will be any more."""
        with self._change:
            self._change.wait_for(
                lambda: (
                    self._is_stopped
                    or (not self._finished and self._is_asked)
                    or self._limit is None
                    or self._limit > 0
                )
            )
            if self._limit is not None:
                self._limit = max(self._limit - 1, 0)
            return not self._is_stopped

    def give(self, item: Any, error: BaseException | None) -> None:
        with self._change:
            self._change.wait_for(lambda: self._is_stopped or not self._finished)
            if not self._is_stopped:
                self._finished.append((item, error))
                self._change.notify_all()


def _make_items(items: Iterator, shared: _Shared) -> None:
    while shared.may_make():
        try:
            item, error = next(items), None
        except BaseException as raised:
            item, error = None, raised
        shared.give(item, error)
        if error is not None:
            return
        del item

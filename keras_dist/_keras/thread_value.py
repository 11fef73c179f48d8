"""Values that each thread has for itself."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadValue(threading.local, Generic[T]):
    """A value that a block of code sets for its thread; everywhere else it is `default`."""

    def __init__(self, default: T):  # called once in each thread
        self.value = default

    @contextlib.contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before

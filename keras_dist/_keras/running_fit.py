"""What is done when the `fit` that runs in this thread has ended, also by an exception."""

import contextlib
from collections.abc import Callable, Iterator

from keras_dist._keras.thread_value import ThreadValue

_at_end: ThreadValue[contextlib.ExitStack | None] = ThreadValue(None)


@contextlib.contextmanager
def running_fit() -> Iterator[None]:
    with contextlib.ExitStack() as stack, _at_end.set_to(stack):
        yield


def at_end_of_fit(function: Callable[[], None]) -> None:
    """Calls a function when the running `fit` has ended. Keras tells callbacks of an end without an exception only."""
    if _at_end.value is not None:
        _at_end.value.callback(function)

"""How often this process has traced or compiled something, in each thread."""

import functools
from typing import Any

import jax

from keras_dist._keras.thread_value import ThreadValue

_PREFIX = "/jax/core/compile/"
_count: ThreadValue[int] = ThreadValue(0)


def compilations_in_this_thread() -> int:
    """Returns a number that grows whenever JAX traces, lowers or compiles a function in this thread.

    Counting starts with the first call.

    >>> before = compilations_in_this_thread()
    >>> jax.jit(lambda x: x + 1)(2).item(), compilations_in_this_thread() > before
    (3, True)
    """
    _listen()
    return _count.value


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_note)


def _note(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event.startswith(_PREFIX):
        _count.value += 1

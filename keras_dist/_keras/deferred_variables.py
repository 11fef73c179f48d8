"""Variables that have a shape, a dtype and a layout, and no value yet."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dist._keras.global_state import drop_deferred_seed_generator
from keras_dist._keras.internals import in_stateless_scope
from keras_dist._keras.patch_registry import PatchGroup
from keras_dist._keras.thread_value import ThreadValue

_lock = threading.RLock()
_blocks_of_thread = ThreadValue(0)  # how many are open in this thread
_blocks = 0  # how many are open in all threads
DEFERRED = PatchGroup(
    "deferred",
    "While a `deferred()` block is open in any thread. They act in threads where one is.",
    lambda: _blocks_of_thread.value or None,
)


class DeferredValue:
    """The initializer of a variable that has no value yet.

    Keras calls the initializer of a variable without a value wherever its value is read. That is right while shapes are
    inferred and while layers are built. Anywhere else the result would be a new, unsharded value, so it is an error.
    """

    def __init__(self, initializer: Callable, path: str):
        self.initializer = initializer  # of the variable, or one that returns the value assigned since
        self._path = path

    def __call__(self, shape, dtype=None, **_):
        if not (in_stateless_scope() or is_deferring()):
            raise ValueError(
                f"'{self._path}' has no value: it was created inside keras_dist.deferred(). Call "
                "keras_dist.materialize(model) before using its value."
            )
        return keras.ops.convert_to_tensor(self.initializer(shape, dtype=dtype), dtype=dtype)


def is_deferring() -> bool:
    """Returns whether variables that are created in this thread get no values."""
    return _blocks_of_thread.value > 0


def require_values(model: keras.Model, step: str) -> None:
    """Raises ValueError for a step inside `deferred()`, which would run on values that Keras initializes for it."""
    if is_deferring():
        raise ValueError(
            f"Cannot run the {step} step of {model.name!r} inside keras_dist.deferred(), or in a function that builds "
            "a model for a plan or for layout rules: there, variables have no values. To build the model there, call "
            "it on keras.KerasTensor(shape). Run steps outside, on a model with values (keras_dist.materialize)."
        )


def give_value(variable: keras.Variable, value: Any) -> None:
    """Gives a deferred variable a value, which is read where it is used."""
    variable._initializer = DeferredValue(lambda shape, dtype=None: value, variable.path)


def deferred_initializer(variable: keras.Variable) -> Callable | None:
    """Returns the initializer of a variable that has no value yet, None for other variables."""
    is_deferred = variable._value is None and isinstance(variable._initializer, DeferredValue)
    return variable._initializer.initializer if is_deferred else None


@contextlib.contextmanager
def deferring() -> Iterator[None]:
    """Variables that are created in this thread in this block get no values."""
    global _blocks
    if keras.config.is_nnx_enabled():
        raise ValueError(
            "keras_dist.deferred() does not support NNX variables, and Keras runs with NNX enabled. Start Python "
            "without KERAS_NNX_ENABLED."
        )
    with _lock:
        DEFERRED.install()
        _blocks += 1
    try:
        with _blocks_of_thread.set_to(_blocks_of_thread.value + 1):
            yield
    finally:
        if not is_deferring():
            drop_deferred_seed_generator()
        with _lock:
            _blocks -= 1
            if not _blocks:
                DEFERRED.remove()

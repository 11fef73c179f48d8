"""Variables that have a shape, a dtype and a layout, and no value: what of Keras is replaced while they are made."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dist._keras.internals import forget_generator_without_value, in_stateless_scope, variable_layout
from keras_dist.mesh.devices import is_described
from keras_dist.variables.variable_layouts import as_sharding

_lock = threading.RLock()
_this_thread = threading.local()
_blocks = 0  # how many blocks of deferred values are open, in all threads
_originals: dict[str, Callable] = {}  # of the last block: a thread may still be in one of ours when it ends


class DeferredValue:
    """Stands as the initializer of a variable that has no value yet.

    Keras calls the initializer of a variable without a value wherever its value is asked for. While shapes are inferred
    and where layers are built that is right; anywhere else it would be a fresh, unsharded value in place of the
    variable's.

    Attributes:
        initializer: the function that was given for the variable, or one that returns the value assigned to it since.
    """

    __slots__ = ("_path", "initializer")

    def __init__(self, initializer: Callable, path: str):
        self.initializer = initializer
        self._path = path

    def __call__(self, shape, dtype=None, **_):
        if not (in_stateless_scope() or is_deferring()):
            raise ValueError(
                "A deferred variable has no value before it is materialized. Received: a use of the value of "
                f"'{self._path}', made inside keras_dist.deferred(). Call keras_dist.materialize(model) before."
            )
        return keras.ops.convert_to_tensor(self.initializer(shape, dtype=dtype), dtype=dtype)


def is_deferring() -> bool:
    """Whether variables that are made in this thread get no values."""
    return getattr(_this_thread, "blocks", 0) > 0


def deferred_initializer(variable: keras.Variable) -> Callable | None:
    """The function that gives a variable its value where it has none yet, else None."""
    waiting = variable._value is None and isinstance(variable._initializer, DeferredValue)
    return variable._initializer.initializer if waiting else None


def lies_on_attached_devices(variable: keras.Variable) -> bool:
    """Whether no device that a variable is laid out over is only described."""
    sharding = as_sharding(variable_layout(variable))
    return sharding is None or not any(map(is_described, sharding.device_set))


def give_value(variable: keras.Variable, value: Any) -> None:
    """Gives a variable its value, laid out already."""
    variable._value = value
    variable._initializer = None


@contextlib.contextmanager
def deferring() -> Iterator[None]:
    """Variables that are made in this thread, in this block, get no values."""
    if keras.config.is_nnx_enabled():
        raise ValueError(
            "Deferred variables are plain Keras variables. Received: Keras with NNX enabled. "
            "Start Python without KERAS_NNX_ENABLED."
        )
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _blocks
    with _lock:
        _blocks += 1
        _this_thread.blocks = getattr(_this_thread, "blocks", 0) + 1
        if _blocks == 1:
            for name, replacement in _REPLACEMENTS.items():
                _originals[name] = getattr(keras.Variable, name)
                setattr(keras.Variable, name, replacement)


def _leave() -> None:
    global _blocks
    with _lock:
        _blocks -= 1
        _this_thread.blocks -= 1
        if not _this_thread.blocks:
            forget_generator_without_value()
        if not _blocks:
            for name, original in _originals.items():
                setattr(keras.Variable, name, original)


def _initialize_with_initializer(self, initializer):
    if not is_deferring():
        _originals["_initialize_with_initializer"](self, initializer)
        return
    self._initialize_layout()
    self._value = None
    self._initializer = DeferredValue(initializer, self.path)


def _deferred_initialize(self):
    # Keras's own deferred variables, of layers that are made while shapes are inferred. Keras drops the initializer
    # after this.
    if not is_deferring():
        _originals["_deferred_initialize"](self)
    elif not isinstance(self._initializer, DeferredValue):
        self._initialize_with_initializer(self._initializer)


def _initialize(self, value):
    # A value that is at hand stays where it is: a described device could not hold it.
    if not is_deferring():
        _originals["_initialize"](self, value)
        return
    self._shape = self._validate_shape(value.shape)
    self._initialize_layout()
    self._value = value


def _direct_assign(self, value):
    if is_deferring() and deferred_initializer(self) is not None:
        self._initializer = DeferredValue(lambda shape, dtype=None: value, self.path)
    elif is_deferring() and not lies_on_attached_devices(self):
        self._value = value
    else:
        _originals["_direct_assign"](self, value)


_REPLACEMENTS = {
    "_deferred_initialize": _deferred_initialize,
    "_direct_assign": _direct_assign,
    "_initialize": _initialize,
    "_initialize_with_initializer": _initialize_with_initializer,
}

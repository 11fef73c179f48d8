"""Where training is in its data, so that it can resume in the middle of an epoch.

A pass through the data starts with each epoch or, with `steps_per_epoch`, spans several epochs. Shuffling draws from
the global random generators when a pass starts, so their states are part of the position.
"""

import random
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np


class RandomState(NamedTuple):
    """State of the global random generators of Python and NumPy."""

    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> "RandomState":
        """Returns the current state."""
        return cls(random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Sets the generators to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def as_json(self) -> list:
        """Returns the state as values that JSON can hold."""
        name, keys, *rest = self.numpy
        return [self.python, [name, np.asarray(keys).tolist(), *rest]]

    @classmethod
    def from_json(cls, values: list) -> "RandomState":
        """Returns the state that `as_json` was called on."""
        (version, keys, gauss), (name, numbers, *rest) = values
        return cls((version, tuple(keys), gauss), (name, np.array(numbers, np.uint32), *rest))


class DataPosition(NamedTuple):
    """Position in a pass through the data. Field names are the keys in checkpoints.

    Attributes:
        batches: number of batches read since the pass started.
        began: random state before the pass started.
        now: random state after the last batch was read.
        source: state of a Grain iterator as JSON text, None for other sources.
    """

    batches: int
    began: RandomState
    now: RandomState
    source: str | None

    def as_json(self) -> dict:
        """Returns the position as values that JSON can hold."""
        return self._asdict() | {"began": self.began.as_json(), "now": self.now.as_json()}

    @classmethod
    def from_json(cls, values: dict) -> "DataPosition":
        """Returns the position that `as_json` was called on."""
        began, now = RandomState.from_json(values["began"]), RandomState.from_json(values["now"])
        return cls(values["batches"], began, now, values["source"])


_resume_at: ContextVar[tuple[int, DataPosition | None] | None] = ContextVar("resume_at", default=None)
_tracked_iterator: ContextVar[Callable[[], Any]] = ContextVar("tracked_iterator", default=lambda: None)


def resume_next_epoch(batches: int, position: DataPosition | None = None) -> None:
    """Makes the next epoch of training in this thread start in its middle, and tracks its iterator from then on.

    Args:
        batches: number of batches of the epoch that are done.
        position: position of its data, from `current_position`.
    """
    _resume_at.set((batches, position))


def begin_tracking(iterator: Any) -> tuple[int, DataPosition | None] | None:
    """Returns where an epoch of training starts if `resume_next_epoch` was called, and tracks its iterator.

    Args:
        iterator: the iterator over the epoch's batches. Its method `position` is what `current_position` returns.

    Returns:
        The arguments of `resume_next_epoch`; None if it was not called since the last epoch.
    """
    start = _resume_at.get()
    if start is not None:
        _resume_at.set(None)
        _tracked_iterator.set(weakref.ref(iterator))
    return start


def is_tracked(iterator: Any) -> bool:
    """Whether `current_position` is that of this iterator."""
    return _tracked_iterator.get()() is iterator


def current_position() -> tuple[int, DataPosition | None]:
    """Returns the position of the tracked iterator in this thread.

    Returns:
        The number of batches of the epoch that it has delivered, and the position in the data after the last of them.
        After the end of an epoch 0, with the position if the next epoch continues the same pass through the data and
        None otherwise. 0 and None if no iterator is tracked.
    """
    iterator = _tracked_iterator.get()()
    return (0, None) if iterator is None else iterator.position()

"""Where training is in its data, so that it can resume in the middle of an epoch.

A pass through the data starts with each epoch or, with `steps_per_epoch`, spans several epochs. Shuffling draws from
the global random generators when a pass starts, so their states are part of the position. Since Keras 3.16 it draws
from generators that are seeded with the number of finished epochs, so that number is part of it too.
"""

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from keras_dist._keras.global_state import RandomState


class DataPosition(NamedTuple):
    """Position in a pass through the data. Field names are the keys in checkpoints."""

    batches: int  # read since the pass started
    began: RandomState  # before the pass started
    now: RandomState  # after the last batch was read
    source: str | None  # state of a Grain iterator as JSON text
    epochs_began: int = 0  # that Keras's data adapter had finished when the pass started; older checkpoints have none
    epochs_now: int = 0  # that it has finished now
    rows: int | None = None  # of each global batch of a Grain dataset, if known

    @classmethod
    def at_beginning(cls) -> "DataPosition":
        return cls(0, RandomState.capture(), RandomState.capture(), None)

    def as_json(self) -> dict:
        return self._asdict() | {"began": self.began.as_json(), "now": self.now.as_json()}

    @classmethod
    def from_json(cls, values: dict) -> "DataPosition":
        states: Any = {name: RandomState.from_json(values[name]) for name in ("began", "now")}
        return cls(**values | states)


class Start(NamedTuple):
    """Where an epoch of training is to start."""

    batches: int  # of the epoch that are done
    position: DataPosition | None
    epochs: int  # before it, that an earlier run of the program has trained
    logs: dict[str, float]  # of the last batch that is done


class _Tracking(NamedTuple):
    """Where a model's next epoch of training is to start, and a reference to the iterator that is tracked."""

    model: Callable[[], Any] = lambda: None  # a reference
    start: Start | None = None
    iterator: Callable[[], Any] = lambda: None


_NOTHING = _Tracking()
_tracking: ContextVar[_Tracking] = ContextVar("tracking", default=_NOTHING)


def resume_next_epoch(model: Any, start: Start) -> None:
    """Makes this thread's next epoch of training a model start at a `current_position`, and tracks its iterator."""
    _tracking.set(_Tracking(weakref.ref(model), start, _tracking.get().iterator))


def begin_tracking(iterator: Any, model: Any) -> Start | None:
    """Returns the place of `resume_next_epoch`, and tracks the iterator, if that was called for this epoch."""
    tracking = _tracking.get()
    if tracking.start is None or tracking.model() is not model:
        return None
    _tracking.set(_Tracking(iterator=weakref.ref(iterator)))
    return tracking.start


def is_tracked(iterator: Any) -> bool:
    """Whether `current_position` is that of this iterator."""
    return _tracking.get().iterator() is iterator


def current_position() -> tuple[int, DataPosition | None]:
    """Returns the tracked iterator's position in this thread: batches delivered in its epoch, and position in the data.

    After the end of an epoch the number is 0, and the position is None or that of a new pass, unless the next epoch
    continues the same pass through the data. They are 0 and None if no iterator is tracked.
    """
    iterator = _tracking.get().iterator()
    return (0, None) if iterator is None else iterator.position()

"""Keras's global state: automatic names, and the seeds and generators of random numbers."""

import collections
import contextlib
import inspect
import random
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_dist._keras.internals import global_state, missing_names_are_errors, variable_value

with missing_names_are_errors():
    from keras.src.random.seed_generator import global_seed_generator
    from keras.src.utils.rng_utils import get_random_seed as get_random_seed

_NAMES, _GENERATOR, _SEED = "object_name_uids", "global_seed_generator", "global_random_seed"


def is_clearing_session() -> bool:
    """Returns whether Keras's `clear_session` runs. Since 3.16 it sets the distribution to None as users do."""
    frames = traceback.walk_stack(inspect.currentframe())
    return any(frame.f_code is global_state.clear_session.__code__ for frame, _ in frames)


class RandomState(NamedTuple):
    """State of the global random generators of Python and NumPy."""

    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> "RandomState":
        return cls(random.getstate(), np.random.get_state())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def as_json(self) -> list:
        name, keys, *rest = self.numpy
        return [self.python, [name, np.asarray(keys).tolist(), *rest]]

    @classmethod
    def from_json(cls, values: list) -> "RandomState":
        (version, keys, gauss), (name, numbers, *rest) = values
        return cls((version, tuple(keys), gauss), (name, np.array(numbers, np.uint32), *rest))


@contextlib.contextmanager
def global_state_restored() -> Iterator[None]:
    """Restores Keras's automatic names, and seeds and generators, also NumPy's, after a block that creates models."""
    names = dict(global_state.get_global_attribute(_NAMES) or {})
    generator, random_state = global_state.get_global_attribute(_GENERATOR), RandomState.capture()
    seed = global_state.get_global_attribute(_SEED)
    value = None if generator is None else variable_value(generator.state)
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAMES, collections.defaultdict(int, names))
        global_state.set_global_attribute(_GENERATOR, generator)
        global_state.set_global_attribute(_SEED, seed)
        random_state.restore()
        if generator is not None:
            generator.state._value = value


def drop_deferred_seed_generator() -> None:
    """Removes Keras's global random generator if it was created without a value; Keras creates another one."""
    generator = global_state.get_global_attribute(_GENERATOR)
    if generator is not None and variable_value(generator.state) is None:
        global_state.set_global_attribute(_GENERATOR, None)


def global_seed() -> list[int] | None:
    """Returns the state of Keras's global random generator, None if it does not exist yet."""
    generator = global_state.get_global_attribute(_GENERATOR)
    return None if generator is None else np.asarray(generator.state.value).tolist()


def set_global_seed(state: list[int] | None) -> None:
    if state is not None:
        generator: Any = global_seed_generator()
        generator.state.assign(np.array(state, generator.state.dtype))

"""Observes the train function of a model: when the host hands a step to the devices, and what the step takes.

Keras calls callbacks before and after a step, but shows them neither the batch nor when the host waits for it. So the
function that `fit` calls for each step, `model.train_function`, is wrapped while a monitor is in use.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from keras_dist._keras.thread_value import ThreadValue
from keras_dist.data.executions import StackedBatches
from keras_dist.monitoring.batches import BatchShape, batch_shape
from keras_dist.monitoring.step_times import Execution
from keras_dist.steps.step_state import changed

_compilations: ThreadValue[int] = ThreadValue(0)  # how often this process has traced or compiled something


class StepObserver:
    """Wraps the train function of a model, and passes each `Execution` to a function.

    `note` is called in the thread of `fit` when a step has been handed to the devices. `specs` are the shapes, dtypes
    and shardings of the state and the batch of the first step with each shape.
    """

    def __init__(self, model: keras.Model, clock: Callable[[], float], note: Callable[[Execution], Any]):
        _count_compilations()
        self._model: Any = model
        self._clock, self._note = clock, note
        self._begin: float | None = None
        self._compilations = 0
        self._follows = False
        if self._model.train_function is not None:
            *_, self._model.train_function = _layers(self._model.train_function)  # a fit that failed leaves it wrapped
        self.specs: dict[BatchShape, tuple[Any, Any]] = {}

    def begin_step(self) -> None:
        """Notes that Keras begins a step. Called by the thread of `fit`."""
        function = self._model.train_function
        # It is not observed at first, and when it is made anew for another distribution.
        if function is not None and all(getattr(each, "observer", None) is not self for each in _layers(function)):
            self._model.train_function = self._wrap(function)
        self._compilations = _compilations.value
        self._begin = self._clock()

    def interrupt(self) -> None:
        """Notes that the next step does not directly follow the one before it."""
        self._follows = False

    def close(self) -> None:
        """Gives the model its own train function back."""
        function = self._model.train_function
        if getattr(function, "observer", None) is self:
            self._model.train_function = function.observed

    def _wrap(self, function: Callable) -> Callable:
        @functools.wraps(function)  # with its attributes: what it was made for
        def observed(state: Any, iterator: Any) -> Any:
            if self._begin is None or not hasattr(iterator, "__next__"):  # a resumed epoch may have no batch
                return function(state, iterator)
            batches = _ObservedBatches(iterator, self._clock)
            with changed(is_monitored=True):
                outputs = function(state, batches)
            dispatched = self._clock()
            shapes, is_compiled = [], _compilations.value != self._compilations
            for item in batches.taken:
                is_stack = isinstance(item, StackedBatches)
                batch = item.spec() if is_stack else item
                shape = batch_shape(batch)
                shapes += [shape] * (item.count if is_stack else 1)
                if shape not in self.specs:
                    self.specs[shape] = _specs(tuple(map(list, outputs[1]))), _specs(batch)
            waits = batches.waits, batches.waits_for_others
            self._note(Execution(self._begin, dispatched, *waits, shapes, is_compiled, self._follows))
            self._begin, self._follows = None, True
            return outputs

        observing: Any = observed
        observing.observer, observing.observed = self, function
        return observing


@functools.cache
def _count_compilations() -> None:
    def note(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            _compilations.value += 1

    jax.monitoring.register_event_duration_secs_listener(note)


def _layers(function: Any) -> Iterator[Any]:
    """Yields a train function, and those below it if it is wrapped: the last one is the model's own."""
    while function is not None:
        yield function
        function = getattr(function, "observed", None)


def _specs(values: Any) -> Any:
    """Returns shapes, dtypes and shardings of arrays, which need not have values any more."""

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        is_array = isinstance(leaf, jax.Array)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if is_array else leaf

    return jax.tree.map(spec, values)


class _ObservedBatches(Iterator):
    """An iterator over batches that notes when its consumer waited, and keeps what it took for one execution."""

    def __init__(self, batches: Iterator, clock: Callable[[], float]):
        self._batches, self._clock = batches, clock
        self.waits: list[tuple[float, float]] = []
        self.waits_for_others: list[tuple[float, float]] = []
        self.taken: list[Any] = []
        # When the newest batch was compared with those of other processes, for which it waited.
        self.compared: tuple[float, float] | None = None

    def __next__(self) -> Any:
        begin = self._clock()
        batch = next(self._batches)
        end = self._clock()
        self.compared = getattr(self._batches, "compared", None)
        self.waits.append((begin, end))
        if self.compared is not None:
            self.waits_for_others.append((max(begin, self.compared[0]), min(end, self.compared[1])))
        self.taken.append(batch)
        return batch

"""The layouts of weights, by the values that stand for them in a traced step."""

import weakref
from typing import Any

from keras_dist.layout.tensor_layout import Axes
from keras_dist.tracing.traced_values import root_of


class TracedWeights:
    """Remembers the axes of the dims of traced weights, as long as their values live."""

    def __init__(self):
        self._axes: dict[int, tuple[weakref.ref, Axes]] = {}  # by the id of the value

    def add(self, value: Any, axes: Axes) -> None:
        tracer = root_of(value)
        key = id(tracer)
        self._axes[key] = (weakref.ref(tracer, lambda _: self._axes.pop(key, None)), axes)

    def axes_of(self, value: Any) -> Axes | None:
        """Returns the axes of each dim of a weight, None for other values."""
        tracer = root_of(value)
        reference, axes = self._axes.get(id(tracer), (None, None))
        return axes if reference is not None and reference() is tracer else None

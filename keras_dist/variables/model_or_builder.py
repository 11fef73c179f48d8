"""Accepts a built model, or a function that builds one, wherever a model is to be inspected."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist._keras import deferred_variables
from keras_dist._keras.global_state import global_state_restored


@contextlib.contextmanager
def built(model_or_builder: Any) -> Iterator[keras.Layer]:
    """Provides a built model. One that a function builds is deferred, and leaves Keras's names and seeds as they were.

    Raises TypeError for neither a model nor a function that returns one, and ValueError for a model that is not built.
    """
    with contextlib.ExitStack() as while_inspected:
        model = model_or_builder
        if not isinstance(model, keras.Layer):
            if not callable(model_or_builder):
                raise TypeError(
                    f"Expected a built Keras model or a function that returns one, got {model_or_builder!r} "
                    f"({type(model_or_builder).__name__}). Pass, for example, lambda: build(width=1024)."
                )
            require_no_arguments(model_or_builder)
            while_inspected.enter_context(global_state_restored())
            while_inspected.enter_context(deferred_variables.deferring())
            model = model_or_builder()
        if not isinstance(model, keras.Layer):
            name = getattr(model_or_builder, "__name__", type(model_or_builder).__name__)
            raise TypeError(
                f"'{name}' returned {model!r} ({type(model).__name__}) instead of a Keras model. Return the model that "
                "it builds."
            )
        if not model.built:
            raise ValueError(
                f"Model '{model.name}' is not built, so it has no variables. Start it with keras.Input(shape), call it "
                "on keras.KerasTensor(shape), or pass a function that does so and returns it."
            )
        yield model


def require_no_arguments(build: Any) -> None:
    """Raises a TypeError with the fix for a function that cannot be called without arguments."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # of a callable that has none
        return
    try:
        signature.bind()
    except TypeError:
        name = getattr(build, "__name__", type(build).__name__)
        needed = [each.name for each in signature.parameters.values() if each.default is each.empty]
        call = "build" if name == "<lambda>" else name
        values = ", ".join(f"{each}=..." for each in needed)
        raise TypeError(
            f"The function that builds the model is called without arguments, but {name}{signature} needs "
            f"{', '.join(needed)}. Pass a function that passes them on: lambda: {call}({values})."
        ) from None

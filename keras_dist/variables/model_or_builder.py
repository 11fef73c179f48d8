"""A model as a user passes it: built, or a function that makes it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist._keras import deferred_variables, internals


@contextlib.contextmanager
def built(model_or_builder: Any) -> Iterator[keras.Layer]:
    """Makes the model where it is to be made, without values; Keras's names and seeds are then as they were.

    Args:
        model_or_builder: a built model or layer, deferred or real, or a function without arguments that returns one.

    Yields:
        The model.

    Raises:
        TypeError: no model and no function, or a function that returns no model.
        ValueError: a model that is not built.
    """
    if isinstance(model_or_builder, keras.Layer):
        yield _require_built(model_or_builder)
        return
    if not callable(model_or_builder):
        raise TypeError(
            "A built model is needed, or a function without arguments that returns one. Received: "
            f"{model_or_builder!r} ({type(model_or_builder).__name__}). Pass, for example, lambda: build(width=1024)."
        )
    with internals.no_trace_left(), deferred_variables.deferring():
        model = model_or_builder()
        if not isinstance(model, keras.Layer):
            raise TypeError(
                f"A function that is passed returns a model. Received: {model!r} ({type(model).__name__}) from "
                f"{model_or_builder!r}. Return the model that it builds."
            )
        yield _require_built(model)


def _require_built(model: keras.Layer) -> keras.Layer:
    if not model.built:
        raise ValueError(
            f"Only a built model has variables. Received: {model.name!r}, which is not built. Call it on "
            "keras.KerasTensor(shape), or pass a function that does."
        )
    return model

"""Layers because of which Keras does not compile the steps of a model, and what to do about them."""

import keras

from keras_dist._keras.model_structure import layers_without_compilation

# Keras excludes them from compilation since TensorFlow's compiler lacks an operation that JAX's has.
_COMPILED_BY_JAX = (
    keras.layers.RandomPerspective,
    keras.layers.RandomRotation,
    keras.layers.RandomShear,
    keras.layers.RandomTranslation,
    keras.layers.RandomZoom,
)


def why_not_compiled(model: keras.Model) -> str | None:
    """Returns the layer because of which Keras does not compile a model, and the fix; None if it is not a layer."""
    layers = [] if model.run_eagerly or model.jit_compile else layers_without_compilation(model)
    if not layers:
        return None
    layer = next((layer for layer in layers if not isinstance(layer, _COMPILED_BY_JAX)), layers[0])
    fix = (
        "JAX can compile this layer: set supports_jit = True on it before model.compile()"
        if isinstance(layer, _COMPILED_BY_JAX)
        else "Remove it from the model, and apply it to the data before fit"
    )
    return f"Keras does not compile models that contain layer {layer.name!r} ({type(layer).__name__}). {fix}."

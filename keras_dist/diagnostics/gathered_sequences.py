"""Which layers of a model gather sequences that are sharded, and why."""

from collections.abc import Mapping

import keras
import numpy as np

_CONVOLUTIONS = (
    *(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
    *(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D),
    *(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D),
)
_MAX_POOLING = keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D
_ADAPTIVE_MAX_POOLING = (
    keras.layers.AdaptiveMaxPooling1D,
    keras.layers.AdaptiveMaxPooling2D,
    keras.layers.AdaptiveMaxPooling3D,
)


def layers_that_gather_sequences(layers: Mapping[str, keras.Layer]) -> dict[str, str]:
    """Returns the reasons of those of Keras's layers, by path, that gather the sequences that they are called with."""
    reasons = {path: _reason(layer) for path, layer in layers.items()}
    return {path: reason for path, reason in reasons.items() if reason is not None}


def _reason(layer: keras.Layer) -> str | None:
    if isinstance(layer, keras.layers.RNN):
        return "recurrent: computes one position after another"
    is_pointwise = isinstance(layer, _CONVOLUTIONS) and {*layer.kernel_size, *np.atleast_1d(layer.strides)} == {1}
    if isinstance(layer, _CONVOLUTIONS) and not is_pointwise:
        return f"convolution: reads neighboring positions (kernel {layer.kernel_size}, strides {layer.strides})"
    if isinstance(layer, _MAX_POOLING):
        return f"max pooling: reads neighboring positions (window {layer.pool_size}, strides {layer.strides})"
    if isinstance(layer, _ADAPTIVE_MAX_POOLING):
        return f"max pooling: reads neighboring positions (output {layer.output_size})"
    return None

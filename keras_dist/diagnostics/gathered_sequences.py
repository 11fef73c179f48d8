"""Which layers of a model gather sequences that are sharded, and why."""

from collections.abc import Mapping

import numpy as np
from keras import Layer, layers

_CONVOLUTIONS = (
    *(layers.Conv1D, layers.Conv2D, layers.Conv3D),
    *(layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose),
    *(layers.DepthwiseConv1D, layers.DepthwiseConv2D, layers.SeparableConv1D, layers.SeparableConv2D),
)
_MAX_POOLING = layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D
_ADAPTIVE_MAX_POOLING = layers.AdaptiveMaxPooling1D, layers.AdaptiveMaxPooling2D, layers.AdaptiveMaxPooling3D


def layers_that_gather_sequences(layers_by_path: Mapping[str, Layer]) -> dict[str, str]:
    """Returns the reasons of those of Keras's layers, by path, that gather the sequences that they are called with."""
    return {path: reason for path, layer in layers_by_path.items() if (reason := _reason(layer))}


def _reason(layer: Layer) -> str | None:
    if isinstance(layer, layers.RNN):
        return "recurrent: computes one position after another"
    if isinstance(layer, _CONVOLUTIONS) and {*layer.kernel_size, *np.atleast_1d(layer.strides)} != {1}:
        return f"convolution: reads neighboring positions (kernel {layer.kernel_size}, strides {layer.strides})"
    if isinstance(layer, _MAX_POOLING):
        return f"max pooling: reads neighboring positions (window {layer.pool_size}, strides {layer.strides})"
    if isinstance(layer, _ADAPTIVE_MAX_POOLING):
        return f"max pooling: reads neighboring positions (output {layer.output_size})"
    return None

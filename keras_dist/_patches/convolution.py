"""Patches of convolutions and of max pooling, which XLA partitions with wrong numbers."""

from typing import Any

import keras

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED
from keras_dist.sharding.sequences import is_pointwise

_REASON = (
    "XLA partitions strided convolutions along a sharded dim, and gradients of grouped kernels, with wrong numbers"
)


@INSTALLED.patch(internals.nn, "conv", reason=_REASON)
def _conv(original, distribution, inputs, kernel, strides=1, padding="valid", data_format=None, dilation_rate=1):
    def convolve(inputs, kernel):
        return original(inputs, kernel, strides, padding, data_format, dilation_rate)

    channels_dim, rank = _channels_dim(inputs, data_format), len(kernel.shape)
    groups = inputs.shape[channels_dim] // kernel.shape[-2]
    if groups == 1 and is_pointwise(kernel.shape[:-2], strides):
        return convolve(inputs, kernel)
    return distribution.compute_convolution(
        convolve, inputs, kernel, strides=strides, groups=groups, channels_dim=channels_dim, filters_dim=rank - 1
    )


@INSTALLED.patch(internals.nn, "depthwise_conv", reason=_REASON)
def _depthwise_conv(
    original, distribution, inputs, kernel, strides=1, padding="valid", data_format=None, dilation_rate=1
):
    def convolve(inputs, kernel):
        return original(inputs, kernel, strides, padding, data_format, dilation_rate)

    channels_dim, groups_dim = _channels_dim(inputs, data_format), len(kernel.shape) - 2
    groups = kernel.shape[groups_dim]
    return distribution.compute_convolution(
        convolve, inputs, kernel, strides=strides, groups=groups, channels_dim=channels_dim, filters_dim=groups_dim
    )


@INSTALLED.patch(internals.nn, "conv_transpose", reason=_REASON)
def _conv_transpose(
    original,
    distribution,
    inputs,
    kernel,
    strides=1,
    padding="valid",
    output_padding=None,
    data_format=None,
    dilation_rate=1,
):
    def convolve(inputs, kernel):
        return original(inputs, kernel, strides, padding, output_padding, data_format, dilation_rate)

    channels_dim, filters_dim = _channels_dim(inputs, data_format), len(kernel.shape) - 2
    return distribution.compute_convolution(
        convolve, inputs, kernel, strides=strides, groups=1, channels_dim=channels_dim, filters_dim=filters_dim
    )


_OVERLAPPING = "XLA partitions the gradient of overlapping windows along a sharded dim with wrong numbers"


@INSTALLED.patch(internals.nn, "max_pool", reason=_OVERLAPPING)
def _max_pool(original, distribution, inputs, pool_size, strides=None, padding="valid", data_format=None):
    def pool(inputs):
        return original(inputs, pool_size, strides, padding, data_format)

    return distribution.compute_unsharded(pool, inputs, _window_dims(inputs, data_format))


@INSTALLED.patch(internals.nn, "adaptive_max_pool", reason=_OVERLAPPING)
def _adaptive_max_pool(original, distribution, inputs, output_size, data_format=None):
    def pool(inputs):
        return original(inputs, output_size, data_format)

    return distribution.compute_unsharded(pool, inputs, _window_dims(inputs, data_format))


def _window_dims(inputs: Any, data_format: str | None) -> set[int]:
    return {*range(1, len(inputs.shape))} - {_channels_dim(inputs, data_format)}


def _channels_dim(inputs: Any, data_format: str | None) -> int:
    is_first = (data_format or keras.config.image_data_format()) == "channels_first"
    return 1 if is_first else len(inputs.shape) - 1

"""The patch of attention."""

from typing import Any

import keras
from jax.core import Tracer

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED


@INSTALLED.patch(internals.nn, "dot_product_attention", issue="keras#21116")
def _dot_product_attention(
    original,
    distribution,
    query,
    key,
    value,
    bias=None,
    mask=None,
    scale=None,
    is_causal=False,
    flash_attention=None,
    attn_logits_soft_cap=None,
):
    """Without it, TPU kernels cannot be partitioned automatically and are given neither the scale nor the mask; traced
    masks silently disable them; GPUs need the kernel on each device's rows and heads.
    """
    operands: list[Any] = [keras.ops.convert_to_tensor(tensor) for tensor in (query, key, value)]
    if any(len(tensor.shape) != 4 for tensor in operands):
        return original(*operands)  # raises Keras's error
    dtype = keras.backend.result_type(*(tensor.dtype for tensor in operands))
    if isinstance(scale, Tracer):  # a kernel takes a number
        operands[0], scale = operands[0] * keras.ops.cast(scale, operands[0].dtype), 1.0
    batch, num_queries, num_heads, _ = operands[0].shape
    logits_shape = batch, num_heads, num_queries, operands[1].shape[1]
    return distribution.attention(
        *(keras.ops.cast(tensor, dtype) for tensor in operands),
        None if bias is None else _with_heads(keras.ops.convert_to_tensor(bias, dtype=dtype), logits_shape),
        None if mask is None else _with_heads(keras.ops.cast(mask, "bool"), logits_shape),
        scale=scale,
        is_causal=is_causal,
        flash_attention=flash_attention,
        soft_cap=attn_logits_soft_cap,
    )


def _with_heads(tensor: Any, logits_shape: tuple[int, ...]) -> Any:
    """Returns a mask or bias of three dims with four: (N, T, S) as XLA reads it, if it is no (B, T, S)."""
    if len(tensor.shape) != 3:
        return tensor
    is_of_heads = all(size in (1, whole) for size, whole in zip(tensor.shape, logits_shape[1:], strict=True))
    return keras.ops.expand_dims(tensor, 0 if is_of_heads else 1)

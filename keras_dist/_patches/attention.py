"""The patch of attention."""

from typing import Any

import keras

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
    return distribution.attention(
        *(keras.ops.cast(tensor, dtype) for tensor in operands),
        None if bias is None else keras.ops.convert_to_tensor(bias, dtype=dtype),
        None if mask is None else keras.ops.cast(mask, "bool"),
        scale=scale,
        is_causal=is_causal,
        flash_attention=flash_attention,
        soft_cap=attn_logits_soft_cap,
    )

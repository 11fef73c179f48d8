"""`keras.ops.dot_product_attention` under a distribution: which kernel computes it, and on which shards."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from keras_dist._keras import internals
from keras_dist._report.user_warnings import warn
from keras_dist.attention.kernels import FUSED_KERNELS, XLA_IN_BLOCKS, Kernel, xla_attention
from keras_dist.attention.mask import AttentionMask
from keras_dist.attention.mask_recognition import recognize, recognize_bias
from keras_dist.attention.sharded import ShardedCall, shards_of, usable_axes
from keras_dist.tracing.dim_axes import without_repeats

# Below this many queries, as in the steps of `generate()`, XLA is used: a kernel would pad them to 128.
_MIN_QUERIES = 128
# And if padding makes so many times the pairs of a query and a key: 1.7 times for a ViT of 197 tokens, padded to 256.
# Such sequences are short, and so are the logits that XLA stores.
_MAX_PADDED_PAIRS = 1.5


@dataclass(frozen=True)
class AttentionCall:
    """How one call of `keras.ops.dot_product_attention` is computed.

    Attributes:
        layer: Path of the layer that calls it.
        implementation: `"splash attention"`, `"cuDNN"`, `"XLA"`, or `"XLA in blocks"` of queries.
        reason: Why XLA computes it on a device that has a fused kernel; None otherwise.
        logits_bytes: Size of XLA's logits on one device; 0 for what does not hold them.
        flops: FLOP of a fused kernel's forward pass over all devices, 2 per multiply-add, of the pairs of a query and a
            key that a causal mask or window lets see each other; so for XLA in blocks of queries. 0 for XLA alone,
            whose FLOP are part of the traced program.
        exchange: How devices that share sequences exchange operands, such as `"all-to-all over 'context'"`; None if
            sequences are not sharded.
    """

    layer: str
    implementation: str
    reason: str | None
    logits_bytes: int
    flops: float
    exchange: str | None = None


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: Any,
    *,
    scale: float | None,
    is_causal: bool,
    flash_attention: bool | None,
    soft_cap: float | None,
    mesh: Mesh,
    batch_axes: Sequence[str],
    sequence_axes: Sequence[str],
    sequence_exchange: str | None,
    axes_of_weight: Callable[[Any], Any],
    calls: list[Any] | None = None,
) -> jax.Array:
    """Computes attention as Keras documents it, by the fused kernel of the mesh's devices where it gives these numbers.

    The kernel runs on the rows and heads of each device. `batch_axes` shard the rows, also in shards of unequal sizes.
    Which axes shard the heads follows from the weights that the queries are computed with: `axes_of_weight` returns the
    axes of each dim of a traced weight, None for other values. `sequence_axes` shard the positions;
    `sequence_exchange` names how devices exchange them, None for what sends the fewest bytes. How it is computed is
    added to `calls`.

    Raises a ValueError if `flash_attention` is True and no kernel can compute it.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    layer = internals.current_path() or ""
    if not all(isinstance(size, int) for size in (*query.shape, *key.shape)):
        # Keras infers the shape of a layer's outputs, for inputs of any size.
        return xla_attention(query, key, value, bias, mask, scale=scale, soft_cap=soft_cap, is_causal=is_causal)
    kernel, reason, exchange = FUSED_KERNELS.get(kernel_platform(mesh)), None, None
    if kernel is None:
        reason = "CPUs have none"
    elif not flash_attention and (flash_attention is False or _is_too_short(query.shape[1], key.shape[1], kernel)):
        kernel = None
    sequence_axes = usable_axes(sequence_axes, mesh, min(query.shape[1], key.shape[1]))
    if kernel is not None or sequence_axes:
        structure, numeric_bias = _structure(mask, bias, is_causal)
        # Kernels need no keys and values that are repeated for groups of queries.
        (key_heads, repeats), (value_heads, value_repeats) = without_repeats(key, 2), without_repeats(value, 2)
        if repeats != value_repeats:
            key_heads, value_heads = key, value
        shards = shards_of(query, mesh, batch_axes, sequence_axes, axes_of_weight)
        if sequence_axes:
            preferred = kernel or XLA_IN_BLOCKS
            exchange = shards.exchange(query, key_heads, structure, numeric_bias, preferred, sequence_exchange)
        if kernel is not None:
            reason = kernel.why_not(query, key_heads, value_heads, numeric_bias, structure)
            reason = reason or shards.why_not(kernel, query, key_heads, structure, exchange)
            if reason is not None and not flash_attention:
                _warn_once(reason, is_in_blocks=exchange is not None)
        if exchange is not None and not flash_attention and (kernel is None or reason is not None):
            kernel = XLA_IN_BLOCKS
        if kernel is not None and (reason is None or kernel is XLA_IN_BLOCKS):
            call = ShardedCall(kernel, structure, scale, soft_cap, shards, exchange)
            if calls is not None:
                flops, name = call.flops(query, key, value), None if exchange is None else str(exchange)
                calls.append(AttentionCall(layer, kernel.name, reason, 0, flops, name))
            return call(query, key_heads, value_heads, numeric_bias)
    if flash_attention:
        raise ValueError(
            f"{_caller()} asks for a fused attention kernel (flash_attention=True), but {reason}. "
            f"Received: query {query.dtype}{list(query.shape)}, key {list(key.shape)}. With flash_attention=None, XLA "
            "computes it."
        )
    if calls is not None:
        shards = shards_of(query, mesh, batch_axes, (), axes_of_weight)
        rows = -(-query.shape[0] // shards.count(shards.batch))
        logits = 4 * rows * math.prod(query.shape[1:3]) * key.shape[1]
        calls.append(AttentionCall(layer, "XLA", reason, logits // shards.count(shards.heads), 0.0))
    return xla_attention(query, key, value, bias, mask, scale=scale, soft_cap=soft_cap, is_causal=is_causal)


def _is_too_short(queries: int, keys: int, kernel: Kernel) -> bool:
    multiple = kernel.run_multiple or 1
    padded = math.prod(-(-each // multiple) * multiple for each in (queries, keys))
    return queries < _MIN_QUERIES or padded > _MAX_PADDED_PAIRS * queries * keys


def _caller() -> str:
    path = internals.current_path()
    return f"Layer {path!r}" if path else "A call of keras.ops.dot_product_attention"


_warned: set[str] = set()


@contextlib.contextmanager
def attention_warnings_repeated() -> Iterator[None]:
    """Shows warnings of attention in a block that were shown before, and again after it."""
    global _warned
    before, _warned = _warned, set()
    try:
        yield
    finally:
        _warned = before


def _warn_once(reason: str, is_in_blocks: bool) -> None:
    if reason not in _warned:
        _warned.add(reason)
        logits = "logits (queries x keys for each head)"
        effect = f"which computes {logits} twice" if is_in_blocks else f"which holds all {logits} in memory"
        warn(f"{_caller()} computes attention by XLA, {effect}: {reason}.")


def _structure(mask: Any, bias: Any, is_causal: bool) -> tuple[AttentionMask, Any]:
    """Returns which keys each query sees, and the bias with four dims, unless all it does is to hide keys."""
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    structure = AttentionMask() if mask is None else recognize(mask)
    if mask is None and bias is not None and (bias_structure := recognize_bias(bias)) is not None:
        structure, bias = bias_structure, None
    if is_causal:
        structure = replace(structure, upper=0 if structure.upper is None else min(structure.upper, 0))
    return structure, bias


def kernel_platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform

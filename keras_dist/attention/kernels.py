"""Kernels that compute attention on the shards of one device: splash attention on TPUs, cuDNN on GPUs, and XLA.

Shapes: B rows, T queries, S keys, N query heads, K key and value heads (N is a multiple of K), H and V head sizes.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.layout import Layout, with_layout_constraint

from keras_dist.attention.mask import AttentionMask
from keras_dist.attention.splash_blocks import QueryRuns, band_function, block_tables
from keras_dist.sharding.per_device import pad_dim, pad_to_multiple

KEPT = "kept_for_backward"  # name of what a rematerialized kernel keeps

_LANES = 128  # lengths of splash attention's blocks are multiples of this
_BLOCK_SIZES = 512, 1024  # MaxText's default, and the largest that fits into the fast memory of a TPU core
_TABLE_BYTES = 768 * 1024  # of scalar memory for three bytes a block of queries and keys; a TPU core has 1 MiB
MAX_SPLASH_PAIRS = _TABLE_BYTES // 3 * _BLOCK_SIZES[-1] ** 2  # of a query and a key on one device, under a mask
_QUERIES_AT_ONCE = 64  # of attention by XLA in blocks
# Since which compute capability GPUs have units that multiply a dtype and sum in float32: Ampere, Volta.
_MIN_CAPABILITY = {"bfloat16": "8.0", "float16": "7.0"}


def why_not_splash(query: Any, key: Any, value: Any, bias: Any, mask: AttentionMask) -> str | None:
    """Returns why splash attention cannot compute this and what would change that, None if it can."""
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"splash attention has no {query.dtype}; use the dtype policy 'mixed_bfloat16'"
    if bias is not None:
        return "splash attention has no bias; pass a boolean mask if the bias only hides keys"
    if mask.dense is not None or (mask.lower or 0) > 0 or (mask.upper or 0) < 0:
        return (
            "splash attention takes causal masks, windows, padding (rows, keys) and packed sequences, and the mask is "
            "not made of these alone"
        )
    return None


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None,
    mask: AttentionMask,
    *,
    scale: float,
    soft_cap: float | None,
    runs: QueryRuns | None = None,
) -> jax.Array:
    """Computes attention by JAX's splash attention, a Pallas kernel. Lengths are padded to multiples of 128.

    `runs` are the positions of the queries if they are not all. Their lengths are multiples of 128.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    num_queries, num_keys = query.shape[1], key.shape[1]
    query = query * jnp.asarray(scale, query.dtype)
    query, key, value = (pad_to_multiple(tensor, 1, _LANES) for tensor in (query, key, value))
    lengths = query.shape[1], key.shape[1]
    runs = runs or QueryRuns(np.zeros((1, 1), int), lengths[0], 0)
    block_q, block_kv = _block_sizes(runs.length, *lengths)
    by_queries = by_keys = MaskInfo(None, None, None, None, None)
    mask_function = None
    if mask.has_band:
        tables = block_tables(mask.lower, mask.upper, runs, lengths[1], block_q, block_kv)
        by_queries, by_keys = (MaskInfo(blocks, None, has, None, runs.positions()) for blocks, has in tables)  # pyright: ignore
        mask_function = band_function(mask.lower, mask.upper)
    block_sizes = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), block_q)
    block_sizes |= dict.fromkeys(("block_kv", "block_kv_dkv", "block_kv_dq"), block_kv)
    kernel = kernels.SplashAttentionKernel(
        by_queries,
        by_queries,
        by_keys,
        block_sizes=kernels.BlockSizes(**block_sizes),
        is_mqa=False,
        save_residuals=False,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=KEPT,
        mask_function=mask_function,
        interpret=False,
    )
    output: Any = jax.vmap(kernel)(
        *(tensor.transpose(0, 2, 1, 3) for tensor in (query, key, value)),
        _splash_segments(kernels.SegmentIds, mask, query.shape[0], (num_queries, num_keys), lengths),
    )
    return output.transpose(0, 2, 1, 3)[:, :num_queries]


def _block_sizes(run: int, num_queries: int, num_keys: int) -> tuple[int, int]:
    """Returns the sizes of the blocks of queries, which do not reach beyond a run, and of keys."""
    default, largest = _BLOCK_SIZES
    has_few = 3 * num_queries * num_keys <= _TABLE_BYTES * default**2

    def block_size(length: int) -> int:
        sizes = range(_LANES, (default if has_few else largest) + 1, _LANES)
        return max(size for size in sizes if length % size == 0)

    return block_size(run), block_size(num_keys)


def _splash_segments(
    segment_ids: Callable, mask: AttentionMask, rows: int, lengths: tuple[int, int], padded: tuple[int, int]
) -> Any:
    """Returns the ids that hide padding and other sequences: a query sees keys of its own id only."""
    hides_padded_keys = mask.upper is not None and lengths[0] - 1 + mask.upper < lengths[1]
    if mask.segments is None and mask.key_valid is None and (padded[1] == lengths[1] or hides_padded_keys):
        return None
    ids = mask.segments or [jnp.zeros((1, length)) for length in lengths]
    query_ids, key_ids = (each.astype(jnp.int32) for each in ids)
    padding_id = query_ids.max() + 1  # the id of no query
    if mask.key_valid is not None:
        key_ids = jnp.where(mask.key_valid, key_ids, padding_id)
    return segment_ids(
        *(
            jnp.full((rows, length), padding_id, jnp.int32).at[:, : each.shape[1]].set(each)
            for each, length in zip((query_ids, key_ids), padded, strict=True)
        )
    )


def why_not_cudnn(query: Any, key: Any, value: Any, bias: Any, mask: AttentionMask) -> str | None:
    """Returns why cuDNN cannot compute this and what would change that, None if it can."""
    if not _has_capability("8.0"):  # JAX does not check it, and cuDNN fails when it runs
        return "cuDNN's attention needs a GPU of compute capability 8.0 or later"
    tensors, structure = jax.tree.flatten((query, key, value, bias, mask))
    shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in tensors)
    return _why_not_cudnn(shapes, structure, jax.devices()[0].device_kind)


@functools.lru_cache(maxsize=256)
def _why_not_cudnn(tensors: tuple[jax.ShapeDtypeStruct, ...], structure: Any, device_kind: str) -> str | None:
    """Traces both passes, in which JAX checks them. The blocks of a model ask for the same, and tracing is slow.

    The answer depends on the compute capability, so on the kind of the devices, which for a target are the target's.
    """

    def loss(query, key, value, bias, mask):
        return cudnn_attention(query, key, value, bias, mask, scale=1.0, soft_cap=None).sum()

    query = tensors[0]
    try:
        jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), *jax.tree.unflatten(structure, tensors))
    except Exception as error:  # JAX raises errors of many types
        reason = f"cuDNN cannot compute it ({type(error).__name__}: {str(error).splitlines()[0].rstrip('.')})"
        return f"{reason}; use the dtype policy 'mixed_bfloat16'" if query.dtype == jnp.float32 else reason
    return None


def _has_capability(capability: str) -> bool:
    """Whether the NVIDIA GPUs of this process, or of the target that a step is traced for, have it."""
    return fused_attention_stablehlo.check_compute_capability(capability)


def _lacks_products(dtype: str) -> bool:
    """Whether the TPUs or GPUs of this process, or of the target, have no products of a dtype in JAX's attention."""
    platform, capability = jax.default_backend(), _MIN_CAPABILITY.get(dtype)
    if platform == "tpu":
        return dtype == "float16"
    return platform == "gpu" and capability is not None and not _has_capability(capability)


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: AttentionMask,
    *,
    scale: float,
    soft_cap: None,
) -> jax.Array:
    """Computes attention by cuDNN. Queries that see no key get the mean of all values, but for `query_valid`.

    cuDNN takes the number of keys of each row. For padding that is not at the end, and queries that see no key, it is
    passed a value for each pair of a query and a key, or XLA computes blocks of queries if these would be large. Which
    one runs is decided on the device. XLA's blocks take more than twice as long to compile as all the rest of a model.
    """
    num_queries, num_keys, head_size = query.shape[1], key.shape[1], value.shape[-1]
    bias = bias if bias is None else jnp.broadcast_to(bias, (*bias.shape[:2], num_queries, num_keys))
    largest = max(query.shape[-1], head_size)
    query, key, value = (pad_dim(tensor, -1, largest + -largest % 8) for tensor in (query, key, value))
    is_causal, window = mask.upper == 0, None if mask.lower is None else (-mask.lower, 0)

    def fused(lengths=None):
        if lengths is None and num_keys % 2 and not (is_causal and num_queries <= num_keys):
            lengths = jnp.full(len(query), num_keys, jnp.int32)  # hides the padding
        padded_query, padded_key, padded_value = map(_padded_to_even_length, (query, key, value))
        output = jax.nn.dot_product_attention(
            padded_query, padded_key, padded_value, bias, scale=scale, is_causal=is_causal,
            key_value_seq_lengths=lengths, local_window_size=window, implementation="cudnn",
        )  # fmt: skip
        return output[:, :num_queries]

    def by_dense_mask():
        return _cudnn_with_dense_mask(query, key, value, bias, mask.to_dense(num_queries, num_keys), scale)

    has_odd_bias = bias is not None and (num_queries % 2 or num_keys % 2)
    if (mask.has_band and not is_causal) or mask.dense is not None or mask.segments is not None or has_odd_bias:
        return by_dense_mask()[..., :head_size]
    seen = replace(mask, query_valid=None).sees_a_key(num_queries, num_keys)
    if seen is None:
        return fused()[..., :head_size]
    # Otherwise XLA transposes what enters and leaves a conditional.
    query, key, value = with_layout_constraint((query, key, value), Layout((0, 1, 2, 3)))
    key_valid = jnp.broadcast_to(True if mask.key_valid is None else mask.key_valid, key.shape[:2])
    lengths = key_valid.sum(axis=1, dtype=jnp.int32)
    is_at_end = key_valid == (jnp.arange(num_keys) < lengths[:, None])
    # With the memory of queries, outputs and their gradients. JAX 0.10 has no gradients of biases with masks.
    if bias is None and num_keys <= 4 * math.prod(query.shape[2:]):
        # Keeps what the other branch keeps, so that XLA keeps it once, and not the mask.
        otherwise = jax.checkpoint(by_dense_mask, policy=lambda primitive, *_, **__: "attention" in primitive.name)
    else:

        def otherwise():
            return xla_attention_in_blocks(query, key, value, bias, mask, scale=scale)

    output = jax.lax.cond(is_at_end.all() & seen.all(), lambda: fused(jnp.maximum(lengths, 1)), otherwise)
    return output[..., :head_size]


def _padded_to_even_length(operand: jax.Array) -> jax.Array:
    """Pads dim 1: cuDNN takes biases of even lengths only, and JAX refuses other lengths also without a bias."""
    return pad_to_multiple(operand, 1, 2)


def _cudnn_with_dense_mask(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, mask: jax.Array, scale: float
) -> jax.Array:
    """Computes attention by cuDNN under a mask with a value for each pair, which takes even lengths only."""
    num_queries, num_keys = query.shape[1], key.shape[1]
    query, key, value = map(_padded_to_even_length, (query, key, value))
    mask = pad_to_multiple(pad_to_multiple(mask, 2, 2), 3, 2)
    bias = bias if bias is None else pad_to_multiple(pad_to_multiple(bias, 2, 2), 3, 2)
    if num_keys % 2:
        # A query that sees no key gets the mean of all values: the padding must be hidden better than they are.
        is_padding = jnp.arange(num_keys + 1) >= num_keys
        hidden = jnp.where(is_padding, jnp.finfo(query.dtype).min, 0).astype(query.dtype)[None, None, None]
        bias, mask = hidden if bias is None else bias + hidden, mask | is_padding
    output = jax.nn.dot_product_attention(query, key, value, bias, mask, scale=scale, implementation="cudnn")
    return output[:, :num_queries]


def xla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    scale: float | None,
    soft_cap: float | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Computes attention by XLA, with logits of shape (B, N, T, S). The mask is boolean.

    By default the scale is one over the root of the head size. The soft cap is `soft_cap * tanh(logits / soft_cap)`, as
    in Gemma 2 and in splash attention.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    dtype = query.dtype
    if _lacks_products(str(dtype)):
        # JAX asks for products of this dtype, which XLA refuses. In other layers, XLA multiplies in float32 instead.
        query, key, value = (tensor.astype(jnp.float32) for tensor in (query, key, value))
        output = xla_attention(query, key, value, bias, mask, scale=scale, soft_cap=soft_cap, is_causal=is_causal)
        return output.astype(dtype)
    if soft_cap is None:
        head_size = value.shape[-1]
        query, key, value = (pad_dim(tensor, -1, max(query.shape[-1], head_size)) for tensor in (query, key, value))
        output = jax.nn.dot_product_attention(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, implementation="xla"
        )
        return output[..., :head_size]
    num_queries, num_keys, groups = query.shape[1], key.shape[1], key.shape[2]
    grouped = query.reshape(*query.shape[:2], groups, -1, query.shape[-1])
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32) * scale
    logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = logits.reshape(logits.shape[0], -1, num_queries, num_keys)
    if bias is not None:
        logits += bias
    if is_causal:
        causal = jnp.tril(jnp.ones((num_queries, num_keys), bool))
        mask = causal if mask is None else mask & causal
    if mask is not None:
        logits = jnp.where(mask, logits, -0.7 * jnp.finfo(logits.dtype).max)
    weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    weights = weights.reshape(weights.shape[0], groups, -1, num_queries, num_keys)
    output = jnp.einsum("bkgts,bskh->btkgh", weights, value)
    return output.reshape(*query.shape[:3], value.shape[-1])


def xla_attention_in_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: AttentionMask,
    *,
    scale: float,
    soft_cap: float | None = None,
    runs: QueryRuns | None = None,
) -> jax.Array:
    """Computes attention by XLA for a block of queries at a time, so that the memory for logits is linear in T and S.

    The backward pass computes the logits again. `runs` are the positions of the queries if they are not all.
    """
    num_queries, num_keys = query.shape[1], key.shape[1]
    missing = -num_queries % _QUERIES_AT_ONCE
    starts = jnp.arange(0, num_queries + missing, _QUERIES_AT_ONCE)
    positions = jnp.arange(num_queries) if runs is None else runs.positions()

    @jax.checkpoint
    def block(queries, key, value, bias, start):
        # The last block may reach beyond the queries. Its rows there are dropped, so any mask will do for them.
        rows = jnp.minimum(start + jnp.arange(_QUERIES_AT_ONCE), num_queries - 1)
        key, value = key.astype(queries.dtype), value.astype(queries.dtype)
        if bias is not None and bias.shape[2] > 1:
            bias = bias[:, :, rows]
        visible = mask.visible_keys(rows, num_keys, positions[rows])
        return xla_attention(queries, key, value, bias, visible, scale=scale, soft_cap=soft_cap)

    @jax.checkpoint  # keeps the operands as they came, not the copies in float32
    def in_blocks(query, key, value, bias):
        # The gradients of keys and values are sums over all blocks, which lose too many digits in half precision.
        key, value = key.astype(jnp.float32), value.astype(jnp.float32)
        padded = jnp.pad(query, ((0, 0), (0, missing), (0, 0), (0, 0)))
        blocks = jnp.moveaxis(padded.reshape(query.shape[0], len(starts), -1, *query.shape[2:]), 1, 0)
        output = jax.lax.map(lambda args: block(args[0], key, value, bias, args[1]), (blocks, starts))
        return jnp.moveaxis(output, 0, 1).reshape(query.shape[0], -1, *output.shape[3:])[:, :num_queries]

    return in_blocks(query, key, value, bias)


class Kernel(NamedTuple):
    """A way to compute attention on a device."""

    name: str
    compute: Callable[..., jax.Array]
    why_not: Callable[..., str | None]
    run_multiple: int | None  # divides the lengths of runs of queries; None if it takes all positions only
    max_pairs: float = math.inf  # of a query and a key that it takes under a mask
    computes_mean: bool = False  # of all values, for valid queries that see no key


FUSED_KERNELS = {
    "tpu": Kernel("splash attention", splash_attention, why_not_splash, _LANES, MAX_SPLASH_PAIRS),
    "gpu": Kernel("cuDNN", cudnn_attention, why_not_cudnn, None, computes_mean=True),
}
XLA_IN_BLOCKS = Kernel("XLA in blocks", xla_attention_in_blocks, lambda *operands: None, 1)

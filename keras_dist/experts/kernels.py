"""Grouped matrix products by kernels: megablox on TPUs, and JAX's Mosaic kernels on GPUs of compute capability 9.0."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

MOSAIC_SCOPE = "grouped_product_by_mosaic"  # in the names of the operations that call these kernels

_LANES = 128  # sizes of tiles on TPUs are multiples of this, or the size of the dim
_NUM_SMS = 132  # of an H100 SXM and an H200
_MOSAIC_MULTIPLE = 64  # of the widths that the Mosaic kernels multiply


# ------------------------------------------------------------------------------------------------------------ megablox


def product_by_megablox(rows: jax.Array, weights: jax.Array, sizes: jax.Array, is_transposed: bool) -> jax.Array:
    """Multiplies each row (R, K) with the weights (E, K, N) of its expert, or with their transposes (E, N, K)."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    num_rows, width = rows.shape[0], weights.shape[1 if is_transposed else 2]
    tiles = megablox_tiles(num_rows, rows.shape[1], width, weights.shape[0], rows.dtype)
    padded = _padded_rows(rows, tiles[0])
    return gmm(padded, weights, sizes, rows.dtype, tiles, transpose_rhs=is_transposed)[:num_rows]


def weight_gradient_by_megablox(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the sum of the products of rows (R, K) and the gradient of outputs (R, N) of each expert, (E, K, N)."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = megablox_tiles(rows.shape[0], rows.shape[1], gradient.shape[1], sizes.shape[0], rows.dtype)
    rows, gradient = (_padded_rows(each, tiles[0]) for each in (rows, gradient))
    return tgmm(rows.T, gradient, sizes, rows.dtype, tiles)


def megablox_tiles(
    num_rows: int, inputs: int, outputs: int, num_experts: int, dtype: jax.typing.DTypeLike
) -> tuple[int, int, int]:
    """Returns the sizes of megablox's tiles of rows, inputs and outputs."""
    rows_of_expert = -(-num_rows // num_experts)
    tile_rows = next((size for size in (512, 256) if rows_of_expert >= size), 128)
    tile_rows = min(tile_rows, num_rows + -num_rows % 16)
    return tile_rows, _tile(inputs, 512), _tile(outputs, 512)


def _tile(size: int, largest: int) -> int:
    """Returns the largest multiple of 128 up to a limit that divides a size, or the size if it is small."""
    if size <= largest:
        return size
    return max(
        (tile for tile in range(_LANES, largest + 1, _LANES) if size % tile == 0),
        default=largest,
    )


def _padded_rows(rows: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(rows, ((0, -rows.shape[0] % multiple), (0, 0)))


# -------------------------------------------------------------------------------------------------------------- Mosaic


def why_not_mosaic(inputs: int, outputs: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why the Mosaic kernels cannot multiply these widths, and what would change that; None if they can."""
    try:
        _mosaic_kernels()
    except ImportError as error:
        return f"this version of JAX has no grouped products in Mosaic ({error}); update it"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"the Mosaic kernels have no {jnp.dtype(dtype).name}; use the dtype policy 'mixed_bfloat16'"
    if inputs % _MOSAIC_MULTIPLE or outputs % _MOSAIC_MULTIPLE:
        return (
            f"the Mosaic kernels multiply widths that are multiples of {_MOSAIC_MULTIPLE}, and the weights of each "
            f"expert are {inputs} x {outputs}"
        )
    return None


def product_by_mosaic(rows: jax.Array, weights: jax.Array, sizes: jax.Array, is_transposed: bool) -> jax.Array:
    """Multiplies each row (R, K) with the weights (E, K, N) of its expert, or with their transposes (E, N, K)."""
    width = weights.shape[1 if is_transposed else 2]
    block = _mosaic_block(width)
    with jax.named_scope(MOSAIC_SCOPE):
        return _mosaic_kernels()[0](
            rows, weights, group_sizes=sizes, transpose_rhs=is_transposed,
            block_m=128 if rows.shape[0] >= 128 * weights.shape[0] else 64, block_n=block, block_k=64,
            max_concurrent_steps=4, grid_block_n=_snake_width(width // block),
        )  # fmt: skip


def weight_gradient_by_mosaic(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the sum of the products of rows (R, K) and the gradient of outputs (R, N) of each expert, (E, K, N)."""
    block_m, block_n = _mosaic_block(rows.shape[1]), _mosaic_block(gradient.shape[1])
    with jax.named_scope(MOSAIC_SCOPE):
        return _mosaic_kernels()[1](
            rows, gradient, group_sizes=sizes, block_m=block_m, block_n=block_n, block_k=64, max_concurrent_steps=4,
            grid_block_n=_snake_width(gradient.shape[1] // block_n),
        )  # fmt: skip


def _mosaic_block(width: int) -> int:
    return 128 if width % 128 == 0 else 64


def _snake_width(blocks: int) -> int:
    """Returns how many blocks of outputs are computed for all rows at a time, so that caches serve both operands."""
    return next(width for width in (8, 4, 2, 1) if blocks % width == 0)


@functools.cache
def _mosaic_kernels() -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    return ragged_dot, _with_core_count(transposed_ragged_dot)


class _JaxWithCoreCount(types.ModuleType):
    """JAX as the transposed kernel sees it, whose devices have a `core_count`, as those of CPUs do not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self) -> list[Any]:
        # The number of thread blocks, which loop over the tiles: another one than that of the GPU is only slower.
        return [types.SimpleNamespace(core_count=getattr(jax.devices()[0], "core_count", _NUM_SMS))]


def _with_core_count(function: Callable) -> Callable:
    """Returns a function that reads the device's number of cores where a program is traced for another device."""
    namespace = {**function.__globals__, "jax": _JaxWithCoreCount("jax")}
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy

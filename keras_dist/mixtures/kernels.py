"""Grouped matrix products by kernels: megablox on TPUs, and JAX's Mosaic kernels on GPUs of compute capability 9.0."""

import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from keras_dist.sharding.per_device import pad_to_multiple

_SUBLANES, _LANES = 16, 128  # sizes of tiles on TPUs are multiples of these, or the size of the dim
_MAX_TILE = 4096  # of inputs or outputs
_VMEM_BYTES = 12 * 2**20  # for tiles and sums, of the 16 MiB that XLA gives a kernel
# For the choice of tiles: the peak rates of a v5p, and about what a step of a kernel's grid costs beside its work.
_FLOPS_PER_SECOND, _BYTES_PER_SECOND, _STEP_SECONDS = 459e12, 2765e9, 0.35e-6
_NUM_SMS = 132  # of an H100 SXM and an H200
_MOSAIC_MULTIPLE = 64  # of the widths that the Mosaic kernels multiply


# ------------------------------------------------------------------------------------------------------------ megablox


def product_by_megablox(rows: jax.Array, weights: jax.Array, sizes: jax.Array, is_transposed: bool) -> jax.Array:
    """Multiplies each row (R, K) with the weights (E, K, N) of its expert, or with their transposes (E, N, K)."""
    num_rows, width = rows.shape[0], weights.shape[1 if is_transposed else 2]
    tiles = product_tiles(num_rows, rows.shape[1], width, weights.shape[0], rows.dtype.itemsize)
    gmm, _ = _megablox_kernels()
    padded = pad_to_multiple(rows, 0, tiles.rows)
    return gmm(padded, weights, sizes, rows.dtype, tuple(tiles), transpose_rhs=is_transposed)[:num_rows]


def weight_gradient_by_megablox(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the sum of the products of rows (R, K) and the gradient of outputs (R, N) of each expert, (E, K, N)."""
    num_rows, num_inputs = rows.shape
    tiles = gradient_tiles(num_rows, num_inputs, gradient.shape[1], sizes.shape[0], rows.dtype.itemsize)
    _, tgmm = _megablox_kernels()
    rows, gradient = (pad_to_multiple(each, 0, tiles.rows) for each in (rows, gradient))
    return tgmm(rows.T, gradient, sizes, rows.dtype, tuple(tiles))


class Tiles(NamedTuple):
    """Sizes of the tiles that a step of megablox multiplies."""

    rows: int
    inputs: int
    outputs: int


def product_tiles(num_rows: int, inputs: int, outputs: int, num_experts: int, itemsize: int) -> Tiles:
    """Returns tiles that fit into VMEM and take the least time, for rows (R, K) by weights (E, K, N)."""

    def traffic(tiles: Tiles, visits: int) -> float:
        # A tile of weights is kept from one tile of rows of its expert to the next if it has all inputs.
        reads_of_weights = num_experts if tiles.inputs == inputs else visits
        return outputs / tiles.outputs * visits * tiles.rows * inputs + reads_of_weights * inputs * outputs

    def memory(tiles: Tiles) -> int:
        operands = tiles.rows * (tiles.inputs + tiles.outputs) + tiles.inputs * tiles.outputs
        return 2 * itemsize * operands + 8 * tiles.rows * tiles.outputs

    return _fastest_tiles(num_rows, inputs, outputs, num_experts, itemsize, traffic, memory)


def gradient_tiles(num_rows: int, inputs: int, outputs: int, num_experts: int, itemsize: int) -> Tiles:
    """Returns tiles that fit into VMEM and take the least time, for the sum of products of rows (R, K) and (R, N)."""

    def traffic(tiles: Tiles, visits: int) -> float:
        return visits * tiles.rows * inputs * outputs * (1 / tiles.outputs + 1 / tiles.inputs)

    def memory(tiles: Tiles) -> int:
        operands = tiles.rows * (tiles.inputs + tiles.outputs) + tiles.inputs * tiles.outputs
        return 2 * itemsize * operands + 4 * (
            tiles.inputs * tiles.outputs + tiles.rows * (tiles.inputs + tiles.outputs)
        )

    return _fastest_tiles(num_rows, inputs, outputs, num_experts, itemsize, traffic, memory)


def _fastest_tiles(
    num_rows: int,
    inputs: int,
    outputs: int,
    num_experts: int,
    itemsize: int,
    traffic: Callable[[Tiles, int], float],
    memory: Callable[[Tiles], int],
) -> Tiles:
    """Returns the tiles with the least estimated time.

    `traffic` is the number of elements that are moved between HBM and VMEM for a number of visits of tiles of rows. A
    tile that has rows of several experts is visited for each of them, and all its rows are multiplied each time.
    """

    def seconds(tiles: Tiles) -> float:
        visits = -(-num_rows // tiles.rows) + min(num_experts, num_rows) - 1
        steps = visits * -(-inputs // tiles.inputs) * -(-outputs // tiles.outputs)
        computing = 2 * steps * math.prod(tiles) / _FLOPS_PER_SECOND
        moving = traffic(tiles, visits) * itemsize / _BYTES_PER_SECOND
        return max(computing, moving) + steps * _STEP_SECONDS

    few = num_rows + -num_rows % _SUBLANES  # for the steps of `generate()`
    choices = itertools.product([128, 256, 512] if few >= 128 else [few], _tile_sizes(inputs), _tile_sizes(outputs))
    return min((tiles for tiles in itertools.starmap(Tiles, choices) if memory(tiles) <= _VMEM_BYTES), key=seconds)


def _tile_sizes(size: int) -> list[int]:
    """Returns the multiples of 128 that divide a size, or all of them if none does, and the size itself."""
    sizes = range(_LANES, min(size, _MAX_TILE) + 1, _LANES)
    divisors = [tile for tile in sizes if size % tile == 0]
    return sorted({*(divisors or sizes), *([size] if size <= _MAX_TILE else [])})


@functools.cache
def _megablox_kernels() -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    return tuple(_with_globals(inspect.unwrap(each), make_group_metadata=visits_of_tiles) for each in (gmm, tgmm))  # pyright: ignore


def visits_of_tiles(
    *,
    group_sizes: jax.Array,
    m: int,
    tm: int,
    start_group: jax.Array,
    num_nonzero_groups: int,
    visit_empty_groups: bool = True,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns what megablox's `make_group_metadata` does, for all groups, in few operations.

    JAX's own takes 30 to 40 small ones, one after another, of 2 microseconds each. Here two comparisons of all visits
    with all groups give the group and the tile of each visit.

    Example: groups of 3, 0 and 5 rows in tiles of 4 rows. Group 0 visits tile 0, and group 2 the tiles 0 and 1.
    """
    ends = jnp.cumsum(group_sizes)
    first_tile = (ends - group_sizes) // tm
    visits = jnp.where(group_sizes > 0, -(-ends // tm) - first_tile, int(visit_empty_groups))
    visit_ends = jnp.cumsum(visits)
    number = jnp.arange(m // tm + num_nonzero_groups - 1, dtype=jnp.int32)[:, None]
    group = jnp.minimum((number >= visit_ends).sum(axis=1, dtype=jnp.int32), num_nonzero_groups - 1)
    is_of_group = (number >= visit_ends - visits) & (number < visit_ends)
    tile = jnp.where(is_of_group, number + first_tile - (visit_ends - visits), 0).sum(axis=1, dtype=jnp.int32)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return (offsets, group, jnp.clip(tile, 0, m // tm - 1)), visit_ends[-1]


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
    ragged_dot, _ = _mosaic_kernels()
    return ragged_dot(
        rows, weights, group_sizes=sizes, transpose_rhs=is_transposed,
        block_m=128 if rows.shape[0] >= 128 * weights.shape[0] else 64, block_n=block, block_k=64,
        max_concurrent_steps=4, grid_block_n=_snake_width(width // block),
    )  # fmt: skip


def weight_gradient_by_mosaic(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the sum of the products of rows (R, K) and the gradient of outputs (R, N) of each expert, (E, K, N)."""
    block_m, block_n = _mosaic_block(rows.shape[1]), _mosaic_block(gradient.shape[1])
    _, transposed_ragged_dot = _mosaic_kernels()
    return transposed_ragged_dot(
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

    return ragged_dot, _with_globals(transposed_ragged_dot, jax=_JaxWithCoreCount("jax"))


class _JaxWithCoreCount(types.ModuleType):
    """JAX as the transposed kernel sees it: all devices have a `core_count`, as those of CPUs do not.

    So the kernel can be traced for a GPU that is not attached.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self) -> list[Any]:
        # The number of thread blocks, which loop over the tiles: another one than that of the GPU is only slower.
        return [types.SimpleNamespace(core_count=getattr(jax.devices()[0], "core_count", _NUM_SMS))]


def _with_globals(function: Callable, **replacements: Any) -> Callable:
    """Returns a copy of a function that finds other values under some global names."""
    namespace = {**function.__globals__, **replacements}
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy

"""Grouped products compiled for devices that are not attached: each form compiles, and its FLOP are counted right."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from support.compilers import needs_cuda, needs_libtpu
from support.hlo_text import read_module
from support.slow_cases import slow

import keras_dist as kd
from keras_dist.mixtures.batched import rows_at_once, rows_of_blocks
from keras_dist.mixtures.blocks import block_rows, num_blocks
from keras_dist.mixtures.grouped_products import choose_form, grouped_product

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("full_compilation")]


def compiled_step(target, num_rows, weights_shape, dtype, form=None):
    """The form, and the compiled text of a product with its derivatives, on the first device of a target."""
    device = np.ravel(kd.target(target))[0]
    form = form or choose_form(device, num_rows, weights_shape, dtype).name

    def step(rows, weights, sizes, gradient):
        output, pull = jax.vjp(functools.partial(grouped_product, sizes=sizes, form=form), rows, weights)
        return output, pull(gradient)

    shapes = (num_rows, weights_shape[1]), weights_shape, weights_shape[:1], (num_rows, weights_shape[2])
    dtypes = dtype, dtype, "int32", dtype
    arguments = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]
    sharding = SingleDeviceSharding(device)
    return form, jax.jit(step, in_shardings=sharding, out_shardings=sharding).lower(*arguments).compile().as_text()


def need(num_rows, weights_shape):
    """FLOP of a product and its two derivatives."""
    return 3 * 2 * num_rows * weights_shape[1] * weights_shape[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [256, 200])
@needs_libtpu
def test_megablox_is_counted_by_the_rows_that_are_passed(width, dtype):
    shape = 8, 512, width
    form, text = compiled_step("v5e:2x4", 4000, shape, dtype)
    assert form == "megablox"
    assert read_module(text).flops == need(4000, shape)  # not by those of whole tiles


@pytest.mark.parametrize("num_rows", [4000, slow(8)])
@needs_cuda
def test_mosaic_is_counted_by_the_rows_that_are_passed(num_rows):
    shape = 8, 512, 192
    form, text = compiled_step("h100:8", num_rows, shape, "bfloat16")
    costs = read_module(text)
    assert form == "mosaic"
    assert costs.flops == need(num_rows, shape)
    assert not costs.opaque_calls


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("h100:8", "float32"), slow("a100:8", "bfloat16"), ("t4:1", "float16"), slow("t4:1", "bfloat16")],
)
@needs_cuda
def test_batched_products_are_counted_with_one_block_of_the_rest(target, dtype):
    num_rows, shape = 4000, (8, 512, 192)
    form, text = compiled_step(target, num_rows, shape, dtype)
    costs = read_module(text)
    assert form == "batched"
    assert costs.unknown_loops == 3
    rows = 8 * rows_at_once(num_rows, 8) + rows_of_blocks(num_rows, 8)
    assert need(rows, shape) <= 1.3 * need(num_rows, shape)
    assert costs.flops == pytest.approx(need(rows, shape), rel=1e-2)  # for GPUs that pad a block to tiles


@needs_cuda
def test_blocks_are_counted_as_all_that_may_be_needed():
    num_rows, shape = 4000, (8, 512, 192)
    _, text = compiled_step("a100:8", num_rows, shape, "bfloat16", "blocks")
    costs = read_module(text)
    blocks = num_blocks(num_rows, 8) * block_rows(num_rows, 8)
    assert not costs.unknown_loops
    assert costs.flops == need(blocks, shape) <= 1.3 * need(num_rows, shape)

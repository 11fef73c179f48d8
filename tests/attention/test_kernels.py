"""Attention by XLA in blocks of queries: the numbers, and the digits of gradients that are sums over all blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from support.slow_cases import slow

from keras_dist.attention.kernels import xla_attention, xla_attention_in_blocks
from keras_dist.attention.mask import AttentionMask

LENGTH = 1000  # not a multiple of the blocks


def operands(length=LENGTH):
    generator = np.random.default_rng(0)
    shapes = (2, length, 4, 16), (2, length, 2, 16), (2, length, 2, 16)
    return [jnp.asarray(generator.standard_normal(shape), "float32") for shape in shapes]


def output_and_gradients(compute, dtype, *arguments):
    def loss(*arguments):
        output = compute(*arguments).astype("float32")
        return (output + 0.5 * output**2).sum(), output  # all queries push gradients in one direction

    step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arguments))), has_aux=True))
    (_, output), gradients = step(*(argument.astype(dtype) for argument in arguments))
    return [np.asarray(each, "float32") for each in (output, *gradients)]


def both(length=LENGTH):
    """Attention in blocks and at once, where the first keys are hidden and later ones, too."""
    key_valid = jnp.arange(length)[None] >= jnp.asarray([[0], [length // 10]])
    mask = AttentionMask(upper=0, key_valid=key_valid)
    dense = mask.to_dense(length, length)

    def in_blocks(query, key, value, bias=None):
        return xla_attention_in_blocks(query, key, value, bias, mask, scale=0.25)

    def at_once(query, key, value, bias=None):
        return xla_attention(query, key, value, bias, dense, scale=0.25)

    return in_blocks, at_once


@pytest.mark.parametrize("bias_queries", [slow(None), 1, slow(LENGTH)])
def test_blocks_give_the_numbers_of_attention_at_once(bias_queries):
    arguments = operands()
    if bias_queries is not None:
        bias = np.random.default_rng(1).standard_normal((2, 4, bias_queries, LENGTH))
        arguments.append(jnp.asarray(bias, "float32"))
    found, expected = (output_and_gradients(compute, "float32", *arguments) for compute in both())
    for each, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(
    ("platform", "dtype", "needed"), [("gpu", "bfloat16", "8.0"), ("gpu", "float16", "7.0"), ("tpu", "float16", None)]
)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_hardware_without_units_for_a_dtype_multiplies_in_float32(platform, dtype, needed, soft_cap, monkeypatch):
    arguments = [each.astype(dtype) for each in operands(64)]
    wide = [each.astype("float32") for each in arguments]

    def compute(query, key, value):
        return xla_attention(query, key, value, None, None, scale=0.25, soft_cap=soft_cap)

    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: capability < needed)
    traced = jax.make_jaxpr(compute)(*arguments)
    products = [each for each in traced.jaxpr.eqns if each.primitive.name == "dot_general"]
    assert all(str(each.invars[0].aval.dtype) == "float32" for each in products)
    output = compute(*arguments)
    assert output.dtype == dtype
    np.testing.assert_array_equal(output, compute(*wide).astype(dtype))


@pytest.mark.slow
def test_gradients_in_half_precision_are_as_good_as_those_of_attention_at_once():
    arguments = operands(2048)
    in_blocks, at_once = both(2048)
    right = output_and_gradients(at_once, "float32", *arguments)
    errors = [
        [
            np.linalg.norm(each - expected) / np.linalg.norm(expected)
            for each, expected in zip(output_and_gradients(compute, "bfloat16", *arguments), right, strict=True)
        ]
        for compute in (in_blocks, at_once)
    ]
    assert max(errors[1]) > 0
    assert np.all(np.asarray(errors[0]) <= 1.1 * np.asarray(errors[1]))

"""The exchange of rows compiled for devices that are not attached: what it sends is what balanced routing needs."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.compilers import V5E_FIRST
from support.hlo_text import read_module
from support.slow_cases import slow

import keras_dist as kd
from keras_dist.mixtures.exchange import buffer_rows, computed_by_exchange
from keras_dist.mixtures.grouped_products import choose_form, grouped_product
from keras_dist.planning.costs.model_flops import count_model_flops
from keras_dist.sharding.per_device import call_per_device

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("full_compilation")]

DEVICES, EXPERTS, ROWS, WIDTH, HIDDEN = 8, 16, 2048, 512, 256


def traced_step(target, shape, axes):
    """The gradient of two products of rows of bfloat16, and of their gates."""
    mesh = Mesh(np.ravel(kd.target(target)).reshape(shape), axes)
    spec = PartitionSpec(axes)

    def experts(received, weights, sizes):
        (tokens, gates), (up, down) = received, weights
        form = choose_form(mesh.devices.flat[0], len(tokens), up.shape, tokens.dtype).name
        hidden = jax.nn.gelu(grouped_product(tokens, up, sizes, form))
        return grouped_product(hidden, down, sizes, form) * gates[:, None].astype(tokens.dtype)

    def on_device(tokens, gates, up, down, sizes):
        rows = jax.tree_util.Partial(lambda *each: each, tokens, gates)
        return computed_by_exchange(experts, rows, (up, down), sizes[0], axes, "ragged")

    def loss(*arguments):
        return (call_per_device(on_device, mesh, arguments, [spec] * 5, spec, [()] * 4).astype("float32") ** 2).sum()

    shapes = (
        ((DEVICES * ROWS, WIDTH), "bfloat16"),
        ((DEVICES * ROWS,), "float32"),
        ((EXPERTS, WIDTH, HIDDEN), "bfloat16"),
        ((EXPERTS, HIDDEN, WIDTH), "bfloat16"),
        ((DEVICES, EXPERTS), "int32"),
    )
    arguments = [jax.ShapeDtypeStruct(*each, sharding=NamedSharding(mesh, spec)) for each in shapes]
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(*arguments)


@pytest.mark.parametrize(("shape", "axes"), [slow((8,), ("expert",)), ((2, 4), ("a", "b"))])
@pytest.mark.parametrize("target", V5E_FIRST)
def test_rows_are_sent_four_times(target, shape, axes):
    traced = traced_step(target, shape, axes)
    costs = read_module(traced.lower().compile().as_text(), dict(zip(axes, shape, strict=True)))
    exchanges = [each for each in costs.collectives if each.kind == "ragged-all-to-all"]
    assert [(each.dtype, each.bytes, each.count) for each in exchanges] == [("bf16", ROWS * WIDTH * 2, 1)] * 4
    assert {each.axes for each in costs.collectives} == {axes}
    floor = 4 * ROWS * WIDTH * 2 * (DEVICES - 1) / DEVICES
    assert floor < costs.wire_bytes <= 1.05 * floor
    # The loops over more rounds count for nothing, and each buffer for all of its rows.
    flops = 3 * 2 * 2 * buffer_rows(ROWS, DEVICES) * WIDTH * HIDDEN
    assert not costs.unknown_loops
    assert costs.flops == pytest.approx(flops, rel=1e-2)
    assert count_model_flops(traced.jaxpr.jaxpr) == DEVICES * flops

"""Mixtures that divide by what is zero in padding only: in that of unequal shards, and in that of buffers of rows."""

import jax
import numpy as np
import pytest
from keras import ops
from passes.test_exchanged_experts import fsdp
from passes.test_experts import assert_near, computed
from passes.test_sharded_experts import distribution_with
from support.expert_layers import EXPERTS, WIDTH, Experts
from support.slow_cases import slow

import keras_dist as kd


class Normalized(Experts):
    """Results of experts have a norm with a scale that all share, and the sum of gates is divided by at the end."""

    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(shape=(WIDTH,), name="scale")

    def mixed(self, x, probabilities, best, chosen):
        gates = ops.einsum("bsk,bske->bse", best, ops.one_hot(chosen, EXPERTS, dtype=x.dtype))
        outputs = ops.einsum("bsem,emd->bsed", self.hidden(x) + 1.0, self.down)
        outputs = outputs * ops.rsqrt(ops.mean(outputs**2, -1, keepdims=True)) * self.scale
        return ops.sum(outputs * gates[..., None] / ops.sum(best, -1)[..., None, None], axis=2)


@pytest.mark.parametrize(
    "distribution",
    [slow(kd.DataParallel), fsdp, slow(lambda: distribution_with("ThreeOperands", (EXPERTS,)))],
    ids=["unsharded", "exchanged", "sharded"],
)
@pytest.mark.parametrize("rows", [slow(8), 13])
def test_gradients_are_those_of_all_experts(distribution, rows):
    expected, _ = computed(Normalized, (rows, 3, WIDTH), "dense", ["uniform"])
    found, (call,) = computed(Normalized, (rows, 3, WIDTH), "auto", ["uniform"], distribution=distribution())
    assert call.form == "blocks"
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(expected))
    assert_near(found, expected, 5e-6)

"""Mixtures of random sizes under random rules, compared with all experts on one device."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops
from passes.test_experts import assert_near
from support.keras_scenarios import start_anew

import keras_dist as kd
from keras_dist.steps.step_state import recorded_calls


class Relu(keras.layers.Layer):
    """A mixture with relu, of any sizes. With `push`, most tokens choose the first experts."""

    def __init__(self, experts, chosen, hidden, push):
        super().__init__()
        self.experts, self.chosen, self.hidden, self.push = experts, chosen, hidden, push

    def build(self, shape):
        random, width = np.random.default_rng(0), shape[-1]
        shapes = {"router": (width, self.experts), "up": (self.experts, width, self.hidden)}
        shapes["down"] = self.experts, self.hidden, width
        for name, each in shapes.items():
            weight = self.add_weight(shape=each, name=name)
            weight.assign(random.normal(size=each))
            setattr(self, name, weight)

    def call(self, x):
        scores = x @ self.router - self.push * ops.arange(self.experts, dtype="float32")
        best, chosen = ops.top_k(ops.softmax(scores), self.chosen)
        gates = ops.sum(ops.one_hot(chosen, self.experts) * best[..., None], -2)
        hidden = ops.relu(ops.einsum("bsd,edm->bsem", x, self.up))
        return ops.einsum("bsem,emd,bse->bsd", hidden, self.down, gates)


MESHES = "data:8", "data:4,a:2", "data:2,a:4", "data:2,a:2,b:2"
ROLES = {  # of an axis: which dims of `up` and `down` it shards
    "nothing": (None, None),
    "experts": (0, 0),
    "parallel": (0, 0),  # and the batch
    "width": (2, 1),
    "inputs and outputs": (1, 2),
    "one of them": (2, None),
    "both in other ways": (1, 0),
}


@st.composite
def cases(draw):
    experts = draw(st.integers(2, 8))
    sizes = [experts, draw(st.integers(1, experts - 1)), *(4 * draw(st.integers(1, 4)) for _ in range(2))]
    shape = draw(st.integers(1, 17)), draw(st.integers(1, 5))
    mesh = draw(st.sampled_from(MESHES))
    roles = {name: draw(st.sampled_from(list(ROLES))) for name in "ab" if f",{name}:" in mesh}
    return sizes, shape, draw(st.sampled_from([0.0, 2.0])), mesh, roles, draw(st.booleans())


def distribution_of(experts, mesh, roles, is_fsdp):
    """Returns a distribution whose axes have these roles, as far as they divide the dims and do not share them."""
    mesh = kd.create_device_mesh(mesh)
    up, down, parallel = [None] * 3, [None] * 3, []
    for name, role in roles.items():
        dims, parts = ROLES[role], mesh.axis_sizes[name]
        is_free = all(dim is None or weight[dim] is None for weight, dim in zip((up, down), dims, strict=True))
        if not is_free or (0 in dims and experts % parts):
            continue
        for weight, dim in zip((up, down), dims, strict=True):
            if dim is not None:
                weight[dim] = name
        parallel += [name] if role == "parallel" else []
    rules = kd.LayoutMap(mesh)
    rules[".*/up"], rules[".*/down"] = up, down
    options = {"expert_dim_name": tuple(parallel) or None}
    if is_fsdp:
        return kd.FullyShardedDataParallel(layout_map=rules, shard_axis=("data",), min_shard_bytes=0, **options)
    return kd.ModelParallel(layout_map=rules, batch_dim_name="data", **options)


def outputs_and_gradients(layer, x):
    layer.build(x.shape)

    @jax.jit
    def step(weights, x):
        def loss(weights, x):
            outputs, _ = layer.stateless_call(weights, [], x)
            return jnp.sum(jnp.sin(outputs)), outputs

        (_, outputs), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(weights, x)
        return outputs, gradients

    return jax.tree.map(np.asarray, step([v.value for v in layer.trainable_variables], x))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(cases())
def test_numbers_are_those_of_all_experts(case):
    (experts, chosen, width, hidden), shape, push, *layout = case

    def computed(distribution):
        with distribution.scope(), recorded_calls() as calls:
            x = np.random.default_rng(1).normal(size=(*shape, width)).astype("float32")
            return outputs_and_gradients(Relu(experts, chosen, hidden, push), x), calls

    start_anew()
    alone = kd.create_device_mesh("data:1", devices=jax.devices()[:1])
    expected, calls = computed(kd.DataParallel(alone, step_options=kd.StepOptions(experts="dense")))
    assert calls == []
    start_anew()
    found, (call,) = computed(distribution_of(experts, *layout))
    assert call.form in ("blocks", "chosen weights")
    assert_near(found, expected, 1e-5)

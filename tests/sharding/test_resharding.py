"""What strategies communicate: collectives in traced programs and in plans, by kind, dtype and bytes."""

import jax
import keras
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from keras import layers
from support.slow_cases import slow
from support.strategy_models import ROWS, fsdp, two_layers

import keras_dist as kd

pytestmark = pytest.mark.usefixtures("shard_small_optimizer_state")


def equations(jaxpr, name):
    """The equations of a primitive in a jaxpr and in the jaxprs inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, name)


def planned(build, distribution, batch=ROWS):
    """The plan of a train step, and its collectives by kind: dtype, bytes and count, largest first."""
    plan = kd.plan(build, distribution, batch, progress=False)
    by_kind = {}
    for each in plan.collectives:
        by_kind.setdefault(each.kind, []).append((each.dtype, each.bytes, each.count))
    return plan, {kind: sorted(found, key=lambda entry: -entry[1]) for kind, found in by_kind.items()}


@pytest.mark.parametrize(("policy", "dtype"), [("float32", "float32"), ("mixed_bfloat16", "bfloat16")])
def test_weights_are_gathered_in_the_dtype_of_compute(policy, dtype):
    """Checked in the traced program, because XLA:CPU computes in float32 instead of bfloat16."""
    with fsdp().scope():
        model = two_layers(policy)
        weights = [variable.value for variable in model.trainable_variables]
        program = jax.make_jaxpr(model.stateless_call)(weights, [], np.ones((ROWS, 64), "float32"))
    gathered = [e for e in equations(program.jaxpr, "sharding_constraint") if e.outvars[0].aval.shape == (64, 512)]
    assert [e.params["sharding"].is_fully_replicated for e in gathered] == [False, True]
    assert {e.outvars[0].aval.dtype.name for e in gathered} == {dtype}


def test_reshard_after_forward_gathers_weights_again():
    def build():
        inputs = keras.Input((64,))
        x = layers.Dense(512, activation="gelu", name="wide")(inputs)
        model = keras.Model(inputs, layers.Dense(8)(layers.Dense(64, activation="gelu", name="narrow")(x)))
        model.compile("adam", "mse")
        return model

    counts = []
    for reshard in (False, True):
        _, found = planned(build, fsdp(reshard_after_forward=reshard))
        counts.append(sum(1 for _, size, _ in found["all-gather"] if size == 64 * 512 * 4))
    # The backward pass does not need the kernel of "wide": inputs have no gradient.
    assert counts == [2, 3]


def test_zero_1_gathers_each_weight_once():
    plan, found = planned(two_layers, kd.DataParallel(shard_optimizer_state=True))
    gathered = [entry for entry in found["all-gather"] if entry[1] == 64 * 512 * 4]
    assert gathered == [("f32", 64 * 512 * 4, 1)]
    assert plan.memory.optimizer < 2 * plan.memory.weights / 6


def test_hsdp_gathers_within_a_group():
    plan = kd.plan(two_layers, fsdp("replica:2,fsdp:4"), ROWS, progress=False)
    assert {each.axes for each in plan.collectives if each.kind == "all-gather"} == {("fsdp",)}


@pytest.mark.parametrize(
    "make",
    [slow(fsdp), slow(lambda: kd.DataParallel(shard_optimizer_state=True)), lambda: fsdp(reshard_after_forward=True)],
)
def test_weights_read_in_a_loop_are_gathered_before_it(make):
    def build():
        model = keras.Sequential([keras.Input((5, 32)), layers.LSTM(32), layers.Dense(8)])
        model.compile("adam", "mse")
        return model

    plan = kd.plan(build, make(), ROWS, progress=False)
    gathered = [each for each in plan.collectives if each.kind in ("all-gather", "reduce-scatter")]
    assert {each.count for each in gathered} == {1}
    assert sum(each.bytes for each in gathered) < 1.5 * plan.parameters * 4


@pytest.mark.parametrize("other_names", [False, True])
def test_a_weight_with_a_layout_of_its_own_keeps_it(mesh, other_names):
    """A layout of Keras, or a sharding of JAX on a mesh with axes of other names."""
    plain = keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names, mesh.devices)
    layout = keras.distribution.TensorLayout((None, "model"), plain)
    if other_names:
        layout = jax.NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), jax.P(None, "x"))

    class Own(layers.Layer):
        def build(self, shape):
            self.kernel = keras.Variable("ones", (shape[-1], 8), name="kernel", layout=layout)

        def call(self, x):
            return x @ self.kernel

    with kd.ModelParallel(layout_map=kd.LayoutMap(mesh)).scope():
        model = keras.Sequential([keras.Input((4,)), Own()])
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 4)), np.ones((8, 8)), verbose=0)
    assert model.weights[0].value.sharding.shard_shape((4, 8)) == (4, 1 if other_names else 2)

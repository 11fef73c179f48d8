"""The exchange of rows between devices with different experts: numbers of a dense computation under any routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.slow_cases import slow_unless

import keras_dist as kd
from keras_dist.mixtures import exchange
from keras_dist.mixtures.exchange import computed_by_exchange
from keras_dist.sharding.per_device import on_devices

DEVICES, EXPERTS, ROWS, WIDTH, OUTPUTS = 8, 16, 160, 24, 20  # rows are wide enough for a ragged exchange
MESHES = {("expert",): (8,), ("a", "b"): (2, 4)}


def draw_experts(routing):
    """The experts of the rows of each device, sorted."""
    generator = np.random.default_rng(0)
    shape = DEVICES, ROWS
    if routing == "uniform":
        experts = generator.integers(0, EXPERTS, shape)
    elif routing == "equal":
        experts = np.arange(ROWS) % EXPERTS + np.zeros(shape, int)
    elif routing == "skewed":
        experts = (EXPERTS * generator.random(shape) ** 3).astype(int)
    elif routing == "all to one expert":
        experts = np.full(shape, 11)
    elif routing == "some without rows":
        experts = generator.choice([0, 3, 4, 9, 15], shape)
    else:  # each device has rows for another one only
        experts = 2 * ((np.arange(DEVICES)[:, None] + 3) % DEVICES) + generator.integers(0, 2, shape)
    return np.sort(experts, 1).astype("int32")


FAST = {("equal", "some without rows", 1), ("ragged", "skewed", 2)}
ROUTINGS = "uniform", "equal", "skewed", "all to one expert", "some without rows", "in pairs"
ONE_ROUND = {"ragged": ("uniform", "equal", "in pairs"), "equal": ("equal",)}


@functools.cache
def operands(dtype="float32"):
    generator = np.random.default_rng(1)
    shapes = (DEVICES * ROWS, WIDTH), (DEVICES * ROWS,), (EXPERTS, WIDTH, OUTPUTS), (DEVICES * ROWS, OUTPUTS)
    tokens, gates, matrices, cotangent = (jnp.asarray(generator.standard_normal(shape), "float32") for shape in shapes)
    return tokens.astype(dtype), gates, {"matrices": matrices.astype(dtype)}, cotangent


def local_experts(received, weights, sizes):
    """Rows times the weights of their experts, the sine of it, times the gates; rows of no expert are NaN."""
    (tokens, gates), matrices = received, weights["matrices"]
    expert = (jnp.arange(len(tokens))[:, None] >= jnp.cumsum(sizes)).sum(1)
    is_used = (expert < len(sizes))[:, None]
    matrices = matrices[jnp.minimum(expert, len(sizes) - 1)]
    products = jnp.where(is_used, jnp.einsum("rk,rkn->rn", tokens, matrices), 0)
    outputs = jnp.sin(products.astype("float32")) * gates[:, None]
    return jnp.where(is_used, outputs, jnp.nan)


def dense(tokens, gates, weights, experts):
    return local_experts(
        (tokens, gates), {"matrices": weights["matrices"][experts.reshape(-1)]}, np.ones(experts.size, int)
    )


@pytest.fixture
def ragged_on_cpus(monkeypatch):
    """XLA has no ragged exchange for CPUs, so everything is gathered, and what is for others is left out."""

    def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        device = jax.lax.axis_index(axis_name)
        gathered = (
            jax.lax.all_gather(each, axis_name) for each in (operand, input_offsets, send_sizes, output_offsets)
        )
        for source, (rows, begins, numbers, places) in enumerate(zip(*gathered, strict=True)):
            begin, number, place = begins[device], numbers[device], places[device]
            position = jnp.arange(len(output)) - place
            is_sent = ((position >= 0) & (position < number)).reshape(-1, *[1] * (output.ndim - 1))
            sent = jnp.take(rows, position + begin, axis=0, mode="clip")
            # The receiver must know how much it is sent.
            output = jnp.where(is_sent & (number == recv_sizes[source]), sent, output)
        return output

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)


def exchanged(tokens, gates, weights, experts, axes, form, function=local_experts):
    """The same as `dense`, by devices that have two experts each."""
    mesh = kd.DeviceMesh(MESHES[axes], axes).backend_mesh

    def on_device(tokens, gates, weights, experts):
        sizes = jnp.bincount(experts[0], length=EXPERTS).astype("int32")
        rows = jax.tree_util.Partial(lambda *each: each, tokens, gates)
        return computed_by_exchange(function, rows, weights, sizes, axes, form)

    spec = PartitionSpec(axes)
    return on_devices(on_device, mesh, (spec, spec, spec, spec), spec)(tokens, gates, weights, experts)


@pytest.fixture
def rounds(monkeypatch):
    """Records how many rounds there are."""
    found = []
    num_rounds = exchange._Exchange.num_rounds

    def recorded(self, counts):
        result = num_rounds(self, counts)
        jax.debug.callback(lambda value: found.append(int(value)), result)
        return result

    monkeypatch.setattr(exchange._Exchange, "num_rounds", recorded)
    return found


@pytest.mark.parametrize(
    ("form", "routing", "axes"),
    [
        slow_unless((form, routing, len(axes)) in FAST, form, routing, axes)
        for form in ("ragged", "equal")
        for routing, axes in (
            *((routing, ("expert",)) for routing in ROUTINGS),
            ("skewed", ("a", "b")),
            ("in pairs", ("a", "b")),
        )
    ],
)
@pytest.mark.usefixtures("ragged_on_cpus")
def test_values_and_gradients_are_those_of_a_dense_computation(form, routing, axes, rounds):
    experts, (*arguments, cotangent) = draw_experts(routing), operands()

    def with_gradients(function):
        def loss(*arguments):
            outputs = function(*arguments)
            return (outputs * cotangent).sum(), outputs

        (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arguments)
        return outputs, *jax.tree.leaves(gradients)

    found = with_gradients(functools.partial(exchanged, experts=experts, axes=axes, form=form))
    expected = with_gradients(functools.partial(dense, experts=experts))
    jax.effects_barrier()
    assert set(rounds) == {1} if routing in ONE_ROUND[form] else min(rounds) > 1
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-6)
    for each, right in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(each, right, rtol=0, atol=5e-6 * max(1, np.abs(right).max()))

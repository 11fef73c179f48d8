"""Sums over rounds: their values and gradients are those of a plain sum, and only further rounds are computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from keras_dist.mixtures.rounds import EXTRA_ROUNDS, summed_in_rounds
from keras_dist.sharding.per_device import call_per_device
from keras_dist.tracing.jaxpr_evaluation import inner_jaxprs

POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "products": jax.checkpoint_policies.dots_saveable,
}

EPSILON = {"float32": 2e-6, "bfloat16": 8e-3}


def of_round(number, arguments, constants):
    """Something that depends on the number of the round and on all arguments, of two dtypes."""
    x, weights = arguments["x"], arguments["weights"]
    hidden = jnp.tanh(x @ weights[0] + number) * constants["scale"][number]
    return {"hidden": hidden @ weights[1], "sum": hidden.sum() * arguments["factor"].astype("float32")}


def operands():
    generator = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(generator.standard_normal(shape), "float32")

    arguments = {"x": draw(6, 4), "weights": (draw(4, 8), draw(8, 3)), "factor": jnp.bfloat16(0.5)}
    return arguments, {"scale": jnp.arange(1, 9)}


def loss(summed, num_rounds, arguments, constants):
    outputs = summed(of_round, num_rounds, arguments, constants)
    return (outputs["hidden"] ** 2).sum() + outputs["sum"]


def plain_sum(function, num_rounds, arguments, constants):
    rounds = [function(number, arguments, constants) for number in range(num_rounds)]
    return jax.tree.map(lambda *each: sum(each), *rounds)


def check(found, expected):
    for each, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert each.dtype == right.dtype
        limit = EPSILON[str(right.dtype)]
        each, right = (np.asarray(value, "float32") for value in (each, right))
        np.testing.assert_allclose(each, right, rtol=limit, atol=limit * max(1, np.abs(right).max()))


@pytest.mark.parametrize("num_rounds", [1, 2, 5])
def test_values_and_gradients_are_those_of_a_plain_sum(num_rounds):
    arguments, constants = operands()
    found = jax.jit(jax.value_and_grad(lambda *each: loss(summed_in_rounds, *each), argnums=1))(
        jnp.int32(num_rounds), arguments, constants
    )
    check(found, jax.value_and_grad(loss, argnums=2)(plain_sum, num_rounds, arguments, constants))
    check(
        jax.jit(lambda *each: summed_in_rounds(of_round, *each))(jnp.int32(num_rounds), arguments, constants),
        plain_sum(of_round, num_rounds, arguments, constants),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_rounds_may_be_rematerialized(policy):
    arguments, constants = operands()

    def of_arguments(num_rounds, arguments):
        remat = jax.checkpoint(
            lambda each: loss(summed_in_rounds, num_rounds, each, constants), policy=POLICIES[policy]
        )
        return remat(arguments)

    found = jax.jit(jax.value_and_grad(of_arguments, argnums=1))(jnp.int32(3), arguments)
    check(found, jax.value_and_grad(loss, argnums=2)(plain_sum, 3, arguments, constants))


def test_each_group_of_devices_has_its_own_number_of_rounds(mesh):
    mesh = mesh.backend_mesh
    generator = np.random.default_rng(0)
    rows, weights = (jnp.asarray(generator.standard_normal(shape), "float32") for shape in ((8, 4), (4, 4)))
    num_rounds = jnp.asarray([2, 4], "int32")  # along the data axis

    def on_device(rows, weights, num_rounds):
        def of_round(number, arguments, constants):
            rows, weights = arguments
            return jax.lax.psum(jnp.sin(rows @ weights + number), "model")

        return summed_in_rounds(of_round, num_rounds[0], (rows, weights), None)

    def summed(rows, weights):
        specs = PartitionSpec(("data", "model")), PartitionSpec(), PartitionSpec("data")
        axes = (), ("data", "model")
        outputs = call_per_device(on_device, mesh, (rows, weights, num_rounds), specs, PartitionSpec("data"), axes)
        return (outputs**2).sum()

    def plain(rows, weights):
        total = 0.0
        for group, count in zip(rows.reshape(2, 4, 4), (2, 4), strict=True):
            rounds = jnp.stack([jnp.sin(group @ weights + number) for number in range(count)])
            total += (rounds.sum((0, 1)) ** 2).sum()
        return total

    found = jax.jit(jax.value_and_grad(summed, argnums=(0, 1)))(rows, weights)
    expected = jax.value_and_grad(plain, argnums=(0, 1))(rows, weights)
    check(found[0], expected[0])


def products(jaxpr, scope=""):
    """The scopes of the matrix products of a program, and of those that it calls."""
    for equation in jaxpr.eqns:
        name = f"{scope}/{equation.source_info.name_stack}"
        if equation.primitive.name == "dot_general":
            yield name
        for inner in inner_jaxprs(equation.params):
            yield from products(inner, name)


def test_the_first_round_is_not_computed_again():
    arguments, constants = operands()
    traced = jax.make_jaxpr(jax.grad(lambda *each: loss(summed_in_rounds, *each), argnums=1))(
        jnp.int32(2), arguments, constants
    )
    scopes = list(products(traced.jaxpr))
    extra = [scope for scope in scopes if EXTRA_ROUNDS in scope]
    # Two products and two derivatives of each. Other rounds compute both products once more in the backward pass.
    assert len(scopes) - len(extra) == 6
    assert len(extra) == 2 + 6

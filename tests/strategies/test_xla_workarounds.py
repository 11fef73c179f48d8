"""Operations that XLA cannot compile: the numbers of one device where it would end the process, or fail later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from support.applied_functions import ROWS, WIDTH, distribution_of, trained
from support.slow_cases import slow
from support.strategy_models import assert_same_numbers

import keras_dist as kd
from keras_dist.strategies.jaxpr_evaluation import inner_jaxprs
from keras_dist.strategies.xla_workarounds import with_workarounds

X = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")


def dtypes_of_indices(jaxpr):
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("scatter"):
            found.add(str(equation.invars[1].aval.dtype))
        else:
            found = found.union(*map(dtypes_of_indices, inner_jaxprs(equation.params)))
    return found


def sums(x, indices):
    """Sums by index: as it is, in a jitted function, in a loop and in a branch."""
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def by_index(x):
        return jax.lax.scatter_add(jnp.zeros_like(x), indices[:, None], jnp.sin(x), numbers)

    looped, _ = jax.lax.scan(lambda total, _: (by_index(total), None), x, length=2)
    return by_index(x) + 2 * jax.jit(by_index)(x) + looped + jax.lax.cond(x[0, 0] > 9, lambda: x, lambda: by_index(x))


@pytest.mark.parametrize("dtype", ["uint32", "int8", "int64", "uint64"])
def test_sums_by_index_in_unequal_shards(dtype):
    with jax.enable_x64(dtype.endswith("64")):
        indices = (np.arange(13) * 5 % 11).astype(dtype)
        indices[3:5] = 100, 120  # out of bounds
        if dtype.endswith("64"):
            indices[5] = 2**32 + 1  # 1, if its first bits are dropped
        program = jax.make_jaxpr(sums)(X, indices)
        changed = with_workarounds(program, "cpu")
        assert dtypes_of_indices(program.jaxpr) == {dtype}
        assert dtypes_of_indices(changed.jaxpr) == {"int32"}
        mesh = kd.create_device_mesh("data:8").backend_mesh

        @jax.jit
        def in_shards(x, indices):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))
            return jaxpr_as_fun(changed)(x, indices)[0]

        assert_same_numbers(in_shards(X, indices), sums(X, indices), 1e-5)


def test_a_program_without_such_scatters_is_not_changed():
    program = jax.make_jaxpr(sums)(X, np.arange(13, dtype="int32"))
    assert with_workarounds(program, "cpu") is program


def sorted_by_jax(x):
    """Sorts all activations, a slice of the rows, and one of the positions."""
    parts = jnp.sort(x[:5], axis=-1), jnp.sort(x[:, :6], axis=1), jnp.median(x.reshape(-1, WIDTH)[:61], axis=0)
    return jnp.sort(x, axis=-1) + sum(jnp.mean(part) for part in parts)


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        slow(kd.DataParallel, ROWS),
        (kd.DataParallel, 13),
        slow(lambda: distribution_of("tensor parallel"), ROWS),
        (lambda: distribution_of("context parallel"), ROWS),
    ],
    ids=["data parallel", "odd rows", "tensor parallel", "context parallel"],
)
def test_layers_that_sort_by_calls_of_jax(make, rows):
    assert_same_numbers(trained(sorted_by_jax, 9, make(), rows), trained(sorted_by_jax, 9, None, rows), 1e-5)

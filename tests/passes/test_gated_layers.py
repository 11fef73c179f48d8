"""Gradients of gated layers on one GPU: in one kernel, with the same numbers."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from keras import layers
from support.compilers import needs_cuda

import keras_dist as kd
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.passes.gates import gates
from keras_dist.passes.rewriting import rewritten
from keras_dist.passes.step_program import StepProgram

SHAPES = (6, 4), (4, 8), (4, 8), (8, 4)


def gated(x, gate, up, down):
    return jnp.sum((jax.nn.silu(x @ gate) * (x @ up)) @ down)


def dense(x, gate, up, down):
    return jnp.sum(jax.nn.silu(x @ gate + x @ up) @ down)


def in_loop(*operands):
    return jax.lax.scan(lambda total, _: (total + jax.checkpoint(gated)(*operands), None), 0.0, length=2)[0]


def after_the_pass(function, target):
    """The gradients of a function before and after the pass, on the devices of a target."""
    program = jax.make_jaxpr(jax.grad(function, (0, 1, 2, 3)))(*(np.zeros(shape, "float32") for shape in SHAPES))
    placer = BatchPlacer(kd.create_device_mesh("data:-1", devices=kd.target(target)), ["data"])
    return program, rewritten(StepProgram(program, placer, ("data",), [()] * 4), [gates])


@pytest.mark.compiler
@needs_cuda
@pytest.mark.parametrize(
    ("function", "target", "barriers"),
    [(gated, "h100:1", 1), (in_loop, "h100:1", 1), (dense, "h100:1", 0), (gated, "h100:2", 0)],
)
def test_a_barrier_for_each_gate(function, target, barriers):
    program, changed = after_the_pass(function, target)
    assert str(changed).count("optimization_barrier") == barriers
    assert (changed is program) == (barriers == 0)
    operands = [np.random.default_rng(0).standard_normal(shape).astype("float32") for shape in SHAPES]
    for before, after in zip(jaxpr_as_fun(program)(*operands), jaxpr_as_fun(changed)(*operands), strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_cpu_needs_none():
    program = jax.make_jaxpr(jax.grad(gated, (0, 1, 2, 3)))(*(np.zeros(shape, "float32") for shape in SHAPES))
    placer = BatchPlacer(kd.create_device_mesh("data:1", devices=1), ["data"])
    assert rewritten(StepProgram(program, placer, ("data",), [()] * 4), [gates]) is program


@needs_cuda
@pytest.mark.compiler
def test_a_step_reads_the_gradient_and_the_gate_once(full_compilation, half_precision):
    rows, width, hidden = 8192, 1024, 4096

    def build():
        inputs = keras.Input((width,))
        gate, up = (layers.Dense(hidden, use_bias=False, name=name)(inputs) for name in ("gate", "up"))
        model = keras.Model(inputs, layers.Dense(width, use_bias=False)(keras.ops.silu(gate) * up))
        model.compile("sgd", "mse")
        return model

    mesh = kd.create_device_mesh("data:-1", devices=kd.target("h100:1"))
    batch = jax.ShapeDtypeStruct((rows, width), "float32")
    plan = functools.partial(kd.plan, build, batch=(batch, batch))
    without = plan(kd.DataParallel(mesh, step_options=kd.StepOptions(without_passes="gates")))
    improved = plan(kd.DataParallel(mesh))
    assert without.memory_traffic - improved.memory_traffic >= 2 * 2 * rows * hidden  # two reads in bfloat16
    assert improved.memory.temporaries <= 1.001 * without.memory.temporaries

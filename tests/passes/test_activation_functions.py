"""What the backward pass computes again of activation functions on GPUs: with the same numbers, and less memory."""

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
from keras_dist.passes.registry import PASSES
from keras_dist.passes.rewriting import rewritten
from keras_dist.passes.step_program import StepProgram

SHAPES = (6, 4), (4, 8), (8,), (8, 4)
OPERANDS = [np.random.default_rng(0).standard_normal(shape).astype("float32") for shape in SHAPES]


def hidden(activation):
    def loss(x, up, bias, down):
        return jnp.sum(activation(x @ up + bias) @ down)

    return loss


gelu = hidden(functools.partial(jax.nn.gelu, approximate=False))
tanh_gelu = hidden(functools.partial(jax.nn.gelu, approximate=True))
mish = hidden(jax.jit(jax.nn.mish))  # the function is called
silu = hidden(jax.nn.silu)  # an exponential
tanh = hidden(jnp.tanh)  # the result, which the product with `down` stores, is enough


def gated(x, up, bias, down):
    return jnp.sum((jax.nn.gelu(x @ up) * (x @ up[::-1] + bias)) @ down)


def of_a_sum(x, up, bias, down):
    """XLA does not store the sum, so its copy would be another value to store."""
    return jnp.sum(jax.nn.gelu(x @ up + x @ up[::-1] + bias) @ down)


def soft_cap(x, up, bias, down):
    return jax.nn.logsumexp(3 * jnp.tanh((x @ up + bias) / 3)) + jnp.sum(down)


def after_passes_on(devices, program):
    placer = BatchPlacer(kd.create_device_mesh("data:-1", devices=devices), ["data"])
    axes = [[("data",), ()], *([()] * len(shape) for shape in SHAPES[1:])]
    return rewritten(StepProgram(program, placer, ("data",), axes), [*PASSES.values()])


def after_passes(function, devices):
    """The gradients of a function before and after all passes, on some devices."""
    program = jax.make_jaxpr(jax.value_and_grad(function, (0, 1, 2, 3)))(*OPERANDS)
    return program, after_passes_on(devices, program)


@pytest.mark.compiler
@needs_cuda
@pytest.mark.parametrize("function", [gelu, tanh_gelu, mish, gated])
def test_the_backward_pass_has_copies_behind_a_barrier(function):
    program, changed = after_passes(function, kd.target("h100:2"))
    assert str(changed).count("optimization_barrier") == 1
    for before, after in zip(jaxpr_as_fun(program)(*OPERANDS), jaxpr_as_fun(changed)(*OPERANDS), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.compiler
@needs_cuda
def test_a_program_may_return_a_number():
    program = jax.make_jaxpr(lambda *operands: (*jax.grad(gelu, (0, 1))(*operands), 1.0))(*OPERANDS)
    assert str(after_passes_on(kd.target("h100:2"), program)).count("optimization_barrier") == 1


@pytest.mark.compiler
@needs_cuda
def test_gradients_in_a_loop():
    def of_halves(*operands):
        gradients = jax.grad(gelu, (0, 1, 2, 3))
        halves = operands[0].reshape(2, 3, 4)
        return jax.lax.scan(lambda total, x: (total + gradients(x, *operands[1:])[1], None), 0 * operands[1], halves)[0]

    program = jax.make_jaxpr(of_halves)(*OPERANDS)
    changed = after_passes_on(kd.target("h100:2"), program)
    assert str(changed).count("optimization_barrier") == 1
    np.testing.assert_array_equal(*(jaxpr_as_fun(each)(*OPERANDS)[0] for each in (program, changed)))


@pytest.mark.compiler
@needs_cuda
@pytest.mark.parametrize("function", [silu, tanh, of_a_sum, soft_cap])
def test_what_would_not_take_less_memory_stays(function):
    program, changed = after_passes(function, kd.target("h100:2"))
    assert changed is program


def test_a_cpu_needs_no_copies():
    program, changed = after_passes(gelu, 2)
    assert changed is program


@pytest.mark.slow
@needs_cuda
@pytest.mark.compiler
@pytest.mark.parametrize("target", ["h100:1", "h100:2"])
def test_a_step_stores_no_error_function(target, full_compilation, half_precision):
    rows, width, hidden = 8192, 1024, 4096

    def build():
        inputs = x = keras.Input((width,))
        for _ in range(3):
            x += layers.Dense(width)(layers.Dense(hidden, activation="gelu")(x))
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
        return model

    mesh = kd.create_device_mesh("data:-1", devices=kd.target(target))
    batch = jax.ShapeDtypeStruct((rows * mesh.devices.size, width), "float32")
    plan = functools.partial(kd.plan, build, batch=(batch, batch))
    stored = plan(kd.DataParallel(mesh, step_options=kd.StepOptions(without_passes="activations")))
    computed = plan(kd.DataParallel(mesh))
    bytes_in_bfloat16 = 2 * rows * hidden
    assert stored.memory.temporaries - computed.memory.temporaries >= 3 * bytes_in_bfloat16
    assert stored.memory_traffic - computed.memory_traffic >= 3 * 2 * bytes_in_bfloat16

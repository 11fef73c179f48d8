"""Operations of a traced step that XLA cannot compile, in a form that it can.

Scatters: XLA pads the indices of shards of unequal sizes. Where they are not int32, it makes the padding in the wrong
dtype, and ends the process. JAX's gradients of sorts have indices in uint32, and with `jax_enable_x64` most indices are
int64. So they are cast.

Fourier transforms: XLA:CPU computes them of arrays in row-major layout only, but chooses another one where an array is
gathered along dim 1, and fails when the step runs. So the layout is required.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from keras_dist.strategies.jaxpr_evaluation import with_equations

_INT32 = np.iinfo("int32")


def with_workarounds(program: Any, platform: str) -> Any:
    """Returns a traced program that XLA can compile for devices of a platform, such as "cpu"."""

    def replaced(equation: Any) -> Any:
        name = equation.primitive.name
        if name.startswith("scatter") and _has_other_indices(equation):
            return _called(equation, _scatter)
        return _called(equation, _fft) if name == "fft" and platform == "cpu" else equation

    return with_equations(program, replaced)


def _has_other_indices(equation: Any) -> bool:
    operand, indices = (variable.aval for variable in equation.invars[:2])
    return indices.dtype != "int32" and max(operand.shape, default=0) <= _INT32.max


def _scatter(scatter: Callable, operand: Any, indices: Any, updates: Any) -> Any:
    own = np.iinfo(indices.dtype)
    # What is beyond int32 is out of bounds, and stays so.
    indices = jnp.clip(indices, max(own.min, _INT32.min), min(own.max, _INT32.max)).astype("int32")
    return scatter(operand, indices, updates)


def _fft(fft: Callable, operand: Any) -> Any:
    return _row_major(fft(_row_major(operand)))


def _row_major(array: Any) -> Any:
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def _called(equation: Any, function: Callable) -> Any:
    """Returns an equation that calls a function of another one's operation and operands, in place of that one."""

    def call(*operands: Any) -> Any:
        return function(lambda *operands: equation.primitive.bind(*operands, **equation.params), *operands)

    (called,) = jax.make_jaxpr(jax.jit(call))(*(variable.aval for variable in equation.invars)).eqns
    return called.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)

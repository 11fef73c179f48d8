"""Which operations of a traced program are linear in some of their operands."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from keras_dist.tracing.primitives import LINEAR, SUMS


def is_linear(equation: Any, marked: Sequence[bool]) -> bool:
    """Whether an operation is linear in the operands that are marked, of which there is at least one."""
    name = equation.primitive.name
    if not has_number(equation):
        return False
    if name == "mul":
        return sum(marked) == 1
    if name == "div":
        return not marked[1]
    if name == "pad":
        return not marked[1] and is_zero(equation.invars[1])
    return name in LINEAR or name in SUMS


def has_number(equation: Any) -> bool:
    """Whether the output of an operation consists of numbers that have gradients."""
    dtypes = [getattr(variable.aval, "dtype", None) for variable in equation.outvars]
    return bool(dtypes) and dtypes[0] is not None and jnp.issubdtype(dtypes[0], jnp.inexact)


def is_zero(variable: Any) -> bool:
    # What JAX passes as the gradient of an integer, in dtype float0, cannot be compared.
    if not isinstance(variable, Literal):
        return False
    value = np.asarray(variable.val)
    return jnp.issubdtype(value.dtype, jnp.inexact) and bool(np.all(value == 0))

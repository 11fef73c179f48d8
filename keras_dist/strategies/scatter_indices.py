"""Scatters with indices in int32, the only dtype for which XLA partitions them into shards of unequal sizes.

XLA pads the indices of unequal shards. Where they have another dtype, it makes the padding in the wrong one, and ends
the process. JAX's gradients of sorts have indices in uint32, and with `jax_enable_x64` most indices are int64.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_dist.strategies.jaxpr_evaluation import with_equations

_INT32 = np.iinfo("int32")


def with_int32_indices(program: Any) -> Any:
    """Returns a traced program whose scatters have indices in int32."""
    return with_equations(program, _with_int32_indices)


def _with_int32_indices(equation: Any) -> Any:
    if not equation.primitive.name.startswith("scatter"):
        return equation
    operand, indices, *_ = (variable.aval for variable in equation.invars)
    if indices.dtype == "int32" or max(operand.shape, default=0) > _INT32.max:
        return equation
    own = np.iinfo(indices.dtype)

    @jax.jit
    def scatter(operand: Any, indices: Any, *updates: Any) -> Any:
        # What is beyond int32 is out of bounds, and stays so.
        indices = jnp.clip(indices, max(own.min, _INT32.min), min(own.max, _INT32.max)).astype("int32")
        return equation.primitive.bind(operand, indices, *updates, **equation.params)

    (call,) = jax.make_jaxpr(scatter)(*(variable.aval for variable in equation.invars)).eqns
    return call.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)

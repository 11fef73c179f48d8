"""The FLOP that a step asks for, before any compiler has seen it."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def asked_flops(jaxpr: Any) -> tuple[float, bool]:
    """Counts the FLOP of matrix multiplications and convolutions, and says whether some are for recomputed values.

    Args:
        jaxpr: what a function was traced to, over whole arrays.

    Returns:
        FLOP, two for each multiplication with its addition. The body of a loop counts as often as it runs where that is
        known, else once; of several branches the most expensive one counts. And whether values are recomputed for the
        backward pass to save memory (`jax.checkpoint`, `keras.remat`).
    """
    total, recomputes = 0.0, False
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, []
        if name == "dot_general":
            total += _of_dot(equation)
        elif name == "conv_general_dilated":
            total += _of_convolution(equation)
        else:
            inner = [asked_flops(each) for each in _inner_jaxprs(equation.params)]
        if inner:
            flops = [each[0] for each in inner]
            times = equation.params["length"] if name == "scan" else 1
            total += times * (max(flops) if name == "cond" else sum(flops))
            recomputes |= any(each[1] for each in inner) or bool(equation.params.get("differentiated"))
    return total, recomputes


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def _of_dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def _of_convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    of_outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    # Each element of the output is a sum over all of one output feature's kernel, the input features of its group only.
    flops = 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / of_outputs
    # Rows of zeros that stand for a stride of the forward pass are not multiplied by any compiler worth its name.
    return flops / math.prod(equation.params["lhs_dilation"]) / equation.params["batch_group_count"]

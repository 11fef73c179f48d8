"""The FLOP that a step asks for, before any compiler has seen it."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")


def asked_flops(jaxpr: Jaxpr) -> float | None:
    """Counts the FLOP of the matrix multiplications and convolutions that a function asks for, over whole arrays.

    What is computed again from the same values counts once: a model that recomputes activations for its backward pass
    to save memory asks for no more than one that keeps them. Source: Chowdhery et al. 2022, "PaLM", appendix B.

    Args:
        jaxpr: what the function was traced to.

    Returns:
        FLOP, two for each multiplication with its addition. The body of a scan counts as often as it runs, and of
        several branches the most expensive one; None where a loop of unknown length multiplies matrices.
    """
    counter = _Counter()
    flops = counter.count(jaxpr, [next(counter.numbers) for _ in (*jaxpr.constvars, *jaxpr.invars)])[0]
    return None if math.isnan(flops) else flops


class _Counter:
    """Numbers values so that the same operation on the same values has the same numbers."""

    def __init__(self):
        self.numbers = itertools.count()
        self.known: dict[Any, list[int]] = {}

    def count(self, jaxpr: Jaxpr, inputs: Sequence[int]) -> tuple[float, list[int]]:
        """Returns the FLOP that are new, and the numbers of the results."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
        total = 0.0
        for equation in jaxpr.eqns:
            operands = [self._number(each, values) for each in equation.invars]
            flops, results = self._of_equation(equation, operands)
            total += flops
            values.update(zip(equation.outvars, results, strict=True))
        return total, [self._number(each, values) for each in jaxpr.outvars]

    def _number(self, value: Any, values: dict[Any, int]) -> int:
        if not isinstance(value, Literal):
            return values[value]
        return self._known_results(("literal", str(value.val), str(value.aval)), 1)[0]

    def _known_results(self, key: Any, count: int) -> list[int]:
        if key not in self.known:
            self.known[key] = [next(self.numbers) for _ in range(count)]
        return self.known[key]

    def _of_equation(self, equation: Any, operands: list[int]) -> tuple[float, list[int]]:
        name, inner = equation.primitive.name, _inner_jaxprs(equation.params)
        if name in _INLINED and inner:
            first = inner[0]
            constants = [next(self.numbers) for _ in first.constvars]
            return self.count(first, [*constants, *operands])
        if inner:
            # The body of a loop is counted by itself, since its values are new ones in every turn.
            flops = [_Counter().count(each, range(len(each.constvars) + len(each.invars)))[0] for each in inner]
            times = equation.params["length"] if name == "scan" else math.nan if name == "while" and any(flops) else 1
            total = times * (max(flops) if name == "cond" else sum(flops))
            return total, [next(self.numbers) for _ in equation.outvars]
        key = name, tuple(operands), tuple((key, str(value)) for key, value in sorted(equation.params.items()))
        is_new = key not in self.known
        results = self._known_results(key, len(equation.outvars))
        if name == "dot_general" and is_new:
            return _of_dot(equation), results
        if name == "conv_general_dilated" and is_new:
            return _of_convolution(equation), results
        return 0.0, results


def _inner_jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    values = itertools.chain.from_iterable(v if isinstance(v, (tuple, list)) else (v,) for v in params.values())
    return [each for each in (getattr(value, "jaxpr", value) for value in values) if isinstance(each, Jaxpr)]


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

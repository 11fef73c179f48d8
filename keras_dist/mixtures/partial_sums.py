"""Where partial sums of products with weights of experts can be added up: after the sum over experts, or at once."""

from typing import Any

from jax.extend.core import Literal

from keras_dist.mixtures.recognition import Mixture
from keras_dist.tracing.primitives import LINEAR, SUMS


def partial_sums(mixture: Mixture) -> set[Any]:
    """Returns the products with weights of experts on which the result of a mixture depends linearly.

    If each device has a shard of what such a product contracts, such as the width of experts, each can compute all that
    follows of its partial sum, and the results of the mixture are added up. A bias that follows belongs to one of them.
    """
    linear, others = {mixture.output}, set()
    found = set()
    for equation in reversed(mixture.equations):
        result = equation.outvars[0]
        is_followed = result in linear - others
        if is_followed and mixture.weight_of(equation) is not None:
            found.add(result)
        for number, variable in enumerate(equation.invars):
            if not isinstance(variable, Literal):
                (linear if is_followed and is_linear(equation, number) else others).add(variable)
    return found


def is_linear(equation: Any, number: int) -> bool:
    """Whether the result of an equation depends linearly on an operand, given the others."""
    name = equation.primitive.name
    if name in ("mul", "dot_general"):
        return equation.invars[0] is not equation.invars[1]
    return name in (*LINEAR, *SUMS) or (name == "div" and number == 0)

"""Which products with weights of experts are multiplied by a number for each row, such as its gate.

The gradient of a gate g depends on h @ W, the product that it multiplies. A backward pass would keep it, one row of the
width of the model for each pair of a token and an expert. But d @ W.T is enough, for d, the gradient of g (h @ W), and
the gradient of h needs that in any case:

    gradient of g    sum(d * (h @ W)) = sum((d @ W.T) * h)
    gradient of h    g (d @ W.T)
    gradient of W    (g h).T @ d

So a grouped product is passed the gates, if nothing else uses its result.
"""

import collections
import math
from typing import Any

from jax.extend.core import Literal

from keras_dist.mixtures.recognition import Mixture
from keras_dist.tracing.primitives import REARRANGEMENTS, UNCHANGED


def gates_of_products(mixture: Mixture) -> tuple[dict[Any, Any], set[tuple[Any, int]]]:
    """Returns the gates, by the products that they multiply, and where they do so: results, and numbers of operands.

    A gate is an operand of the mixture, and of the dtype of the product. Both may be rearranged before.
    """
    operands = [[None if isinstance(v, Literal) else v for v in equation.invars] for equation in mixture.equations]
    uses = collections.Counter(variable for variables in operands for variable in variables)
    gates = {variable: variable for variable in mixture.operands if _has_one_number(mixture, variable)}
    products, found, places = {}, {}, set()
    for equation, variables in zip(mixture.equations, operands, strict=True):
        result, name = equation.outvars[0], equation.primitive.name
        is_of_one_dtype = len({variable.aval.dtype for variable in (*equation.invars, result)}) == 1
        if mixture.weight_of(equation) is not None:
            if is_of_one_dtype:
                products[result] = result
        elif name in (*REARRANGEMENTS, *UNCHANGED):
            for sources in (gates, products):
                if variables[0] in sources:
                    sources[result] = sources[variables[0]]
        elif name in ("mul", "dot_general") and is_of_one_dtype:
            for number, variable in enumerate(variables):
                if variable in gates and (product := products.get(variables[1 - number])) is not None:
                    found[product] = gates[variable]
                    places.add((result, number))
        if uses[result] != 1:
            products.pop(result, None)
    return found, places


def _has_one_number(mixture: Mixture, variable: Any) -> bool:
    """Whether an operand has one number for each row."""
    place = mixture.places[variable]
    return place.tokens is not None and math.prod(variable.aval.shape[dim] for dim in place.rest(variable)) == 1

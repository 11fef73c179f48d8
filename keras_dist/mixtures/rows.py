"""Computes a mixture of experts for the chosen pairs of tokens and experts only.

The equations of the mixture are evaluated as they are, of other shapes: as if there was one expert, and as many tokens
as chosen pairs. Only a product with the weights of experts is another one, in which each row meets the weights of its
expert.

Worked example: 18 tokens that choose 2 of 6 experts each, sorted into 36 rows.

    x (18, 16) @ up (6, 16, 8)      -> (6, 18, 8)     becomes   rows (36, 16), grouped by expert -> (1, 36, 8)
    relu                               (6, 18, 8)               relu                               (1, 36, 8)
    ... @ down (6, 8, 16)           -> (6, 18, 16)              grouped by expert                  (1, 36, 16)
    sum over experts                -> (18, 16)                 (36, 16), summed for each token -> (18, 16)

A single token needs no rows: the weights of its k experts are looked up, as if there were no others.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from keras_dist.mixtures.recognition import Mixture, Place
from keras_dist.mixtures.routing import Routing
from keras_dist.tracing.kept_dims import activation, kept_dims, places_in_product
from keras_dist.tracing.primitives import UNCHANGED

GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Returns (R, N) of rows (R, K), sorted by expert, weights (E, K, N) and the number of rows of each expert, (E,)."""


def compute_mixture(
    mixture: Mixture, product: GroupedProduct, operands: Sequence[jax.Array], indices: jax.Array
) -> jax.Array:
    """Returns the sum over experts, for operands and with a result in their tokens-first form.

    Args:
        mixture: What to compute.
        product: Multiplies rows with the weights of their experts.
        operands: Those of `mixture.operands`, each (tokens..., E, others...), as far as it has these dims.
        indices: The experts that each token chooses, (tokens..., k).
    """
    rows = (_OneToken if mixture.num_tokens == 1 else _Rows)(mixture, product, indices, operands)
    for equation in mixture.equations:
        rows.values.update(zip(equation.outvars, rows.evaluate(equation), strict=True))
    return rows.summed(rows.values[mixture.equations[-1].outvars[0]])


def tokens_first(place: Place, variable: Any) -> list[int]:
    """Returns the dims of a variable in the order of its tokens-first form."""
    return [*(place.tokens or ()), *([] if place.expert is None else [place.expert]), *place.rest(variable)]


class _OneToken:
    """Evaluates equations as if there were no experts but those that the token chooses."""

    def __init__(self, mixture: Mixture, product: GroupedProduct, indices: jax.Array, operands: Sequence[jax.Array]):
        self.values = dict(zip(mixture.operands, operands, strict=True))
        self._places, self._indices = mixture.places, indices.reshape(-1)
        for variable, value in self.values.items():
            if (expert := mixture.places[variable].expert) is not None:
                self.values[variable] = jnp.take(value, self._indices, axis=expert, mode="clip")

    def evaluate(self, equation: Any) -> Sequence[jax.Array]:
        operands = [v.val if isinstance(v, Literal) else self.values[v] for v in equation.invars]
        return _evaluated(equation, operands, [self._shape(variable) for variable in equation.outvars])

    def _shape(self, variable: Any) -> list[int]:
        expert = self._places[variable].expert
        return [self._indices.size if dim == expert else size for dim, size in enumerate(variable.aval.shape)]

    def summed(self, total: jax.Array) -> jax.Array:
        return total


class _Rows:
    """Evaluates equations as if there was one expert, and a token for each chosen pair."""

    def __init__(self, mixture: Mixture, product: GroupedProduct, indices: jax.Array, operands: Sequence[jax.Array]):
        self.values: dict[Any, jax.Array] = {}
        self._mixture, self._product, self._tokens = mixture, product, indices.shape[:-1]
        self._places: dict[Any, Any] = mixture.places
        self._routing = Routing.of(indices.reshape(-1, indices.shape[-1]), mixture.choice.num_experts)
        self._given = dict(zip(mixture.operands, operands, strict=True))

    def evaluate(self, equation: Any) -> Sequence[jax.Array]:
        """Returns what an equation computes for rows: the first dim of tokens has them, that of experts has size 1."""
        shapes = [self._shape(variable) for variable in equation.outvars]
        if (weight := self._mixture.weight_of(equation)) is not None:
            return [self._multiplied(equation, weight).reshape(shapes[0]).astype(equation.outvars[0].aval.dtype)]
        operands = [self._operand(equation, number) for number in range(len(equation.invars))]
        if equation.primitive.name == "broadcast_in_dim" and operands[0].ndim == len(shapes[0]):
            return [jnp.broadcast_to(operands[0], shapes[0])]
        return _evaluated(equation, operands, shapes)

    def summed(self, rows: jax.Array) -> jax.Array:
        variable = self._mixture.equations[-1].outvars[0]
        place: Any = self._places[variable]
        rows = jnp.moveaxis(rows, place.tokens[0], 0)
        sums = self._routing.summed(rows.reshape(-1, *(variable.aval.shape[dim] for dim in place.rest(variable))))
        return sums.reshape(*self._tokens, *sums.shape[1:])

    def _shape(self, variable: Any) -> list[int]:
        (expert, tokens), shape = self._places[variable], list(variable.aval.shape)
        for dim in (*(tokens or ()), *(() if expert is None else (expert,))):
            shape[dim] = self._routing.order.size if tokens and dim == tokens[0] else 1
        return shape

    def _operand(self, equation: Any, number: int) -> Any:
        variable = equation.invars[number]
        if isinstance(variable, Literal):
            return variable.val
        if variable in self.values:
            return self.values[variable]
        place, value = self._places[variable], self._given[variable]
        if place.tokens is None:
            return value if place.expert is None else self._of_experts(equation, number, value)
        flat = value.reshape(-1, *value.shape[len(self._tokens) :])
        rows = self._routing.of_tokens(flat) if place.expert is None else self._routing.of_pairs(flat)
        before = sum(dim < place.tokens[0] for dim in place.rest(variable))
        self.values[variable] = jnp.moveaxis(rows, 0, before).reshape(self._shape(variable))
        return self.values[variable]

    def _of_experts(self, equation: Any, number: int, value: jax.Array) -> jax.Array:
        """Returns what the expert of each row has, such as a bias, with dims as the result of an equation has them."""
        result = equation.outvars[0]
        tokens, expert = self._places[result].tokens[0], self._places[equation.invars[number]].expert
        shape = [1] * result.aval.ndim
        for (dim,), (place,) in kept_dims(equation, number):
            if dim != expert:
                shape[place] = result.aval.shape[place]
        before = sum(size > 1 for size in shape[:tokens])
        shape[tokens] = self._routing.order.size
        rows = self._routing.of_experts(value.reshape(value.shape[0], *(size for size in value.shape[1:] if size > 1)))
        return jnp.moveaxis(rows, 0, before).reshape(shape)

    def _multiplied(self, equation: Any, weight: int) -> jax.Array:
        """Returns the product of rows with the weights of their experts, its dims in the order of the equation's."""
        other = 1 - weight
        rows, weights = equation.invars[other], equation.invars[weight]
        contracted = equation.params["dimension_numbers"][0]
        pairs = zip(contracted[other], contracted[weight], strict=True)
        summed = [pair for pair in pairs if pair[1] != self._places[weights].expert]
        dims, weight_dims = self._places[rows].rest(rows), self._places[weights].rest(weights)
        free = [dim for dim in dims if dim not in contracted[other]]
        free_of_weights = [dim for dim in weight_dims if dim not in contracted[weight]]
        first = self._places[rows].tokens[0]
        left, right = self._operand(equation, other), self._given[weights]
        left = jnp.moveaxis(left, (first, *free, *(dim for dim, _ in summed)), range(1 + len(free) + len(summed)))
        order = [1 + weight_dims.index(dim) for dim in (*(dim for _, dim in summed), *free_of_weights)]
        right = right.transpose(0, *order)
        depth = math.prod(rows.aval.shape[dim] for dim, _ in summed)
        sizes = [self._routing.order.size, *(rows.aval.shape[dim] for dim in free)]
        sizes_of_weights = right.shape[1 + len(summed) :]
        groups = self._routing.sizes * math.prod(sizes[1:])
        product = self._product(left.reshape(-1, depth), right.reshape(right.shape[0], depth, -1), groups)
        places, places_of_weights = (dict(places_in_product(equation, number)) for number in (other, weight))
        target = [*(places[dim] for dim in (first, *free)), *(places_of_weights[dim] for dim in free_of_weights)]
        return product.reshape(*sizes, *sizes_of_weights).transpose(sorted(range(len(target)), key=target.__getitem__))


def _evaluated(equation: Any, operands: Sequence[Any], shapes: Sequence[Sequence[int]]) -> Sequence[jax.Array]:
    """Returns what an equation computes for operands of other shapes, with results of `shapes`."""
    name, params = equation.primitive.name, equation.params
    if name in UNCHANGED:
        return operands[:1]
    if (function := activation(equation)) is not None:
        return [function(*operands)]
    if name in ("reshape", "squeeze", "expand_dims"):
        return [operands[0].reshape(shapes[0])]
    if name == "broadcast_in_dim":
        return [jax.lax.broadcast_in_dim(operands[0], shapes[0], params["broadcast_dimensions"])]
    if name == "slice":
        bounds = zip(operands[0].shape, equation.invars[0].aval.shape, params["limit_indices"], strict=True)
        limits = [here if limit == size else limit for here, size, limit in bounds]
        return [jax.lax.slice(operands[0], params["start_indices"], limits, params["strides"])]
    if name == "dynamic_slice":
        sizes = params["slice_sizes"]
        params = params | {"slice_sizes": tuple(min(each) for each in zip(sizes, operands[0].shape, strict=True))}
    outputs = equation.primitive.bind(*operands, **params)
    return outputs if equation.primitive.multiple_results else [outputs]

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from keras_dist.mixtures.gates import gates_of_products
from keras_dist.mixtures.recognition import Mixture, Place
from keras_dist.mixtures.routing import Groups
from keras_dist.mixtures.shards import Shards
from keras_dist.tracing.kept_dims import activation, inverse_order, kept_dims, places_in_product
from keras_dist.tracing.primitives import UNCHANGED

GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""Returns (R, N) of rows (R, K), sorted by expert, weights (E, K, N), the number of rows of each expert (E,), and gates
that multiply the rows, (R,)."""


def compute_rows(
    mixture: Mixture, product: GroupedProduct, shards: Shards, groups: Groups, given: Mapping[Any, jax.Array]
) -> jax.Array:
    """Returns what the chosen experts compute for rows, (R, others...).

    Args:
        mixture: What to compute.
        product: Multiplies rows with the weights of their experts.
        shards: How weights are sharded.
        groups: How many of the rows each expert has.
        given: The rows of each operand with tokens, (R, others...), and other operands in their tokens-first form.
    """
    rows, output = _Rows(mixture, product, shards, groups, given).evaluated(), mixture.output
    place: Any = mixture.places[output]
    others = (shards.size(output, dim) for dim in place.rest(output))
    return jnp.moveaxis(rows, place.tokens[0], 0).reshape(groups.experts.size, *others)


def compute_one_token(
    mixture: Mixture, operands: Sequence[jax.Array], indices: jax.Array, first_expert: jax.Array | int = 0
) -> jax.Array:
    """Returns the sum over the experts that a single token chooses, in the shape of the mixture's output.

    Args:
        mixture: What to compute.
        operands: Those of `mixture.operands`.
        indices: The experts that the token chooses, or some of them, (n,).
        first_expert: The first one that operands have, if they are a shard. Those of other shards count as zero.
    """
    return _OneToken(mixture, operands, indices, first_expert).evaluated()


def tokens_first(place: Place, variable: Any) -> list[int]:
    """Returns the dims of a variable in the order of its tokens-first form."""
    return [*(place.tokens or ()), *([] if place.expert is None else [place.expert]), *place.rest(variable)]


class _Evaluation:
    """Evaluates the equations of a mixture for operands of other shapes."""

    def __init__(self, mixture: Mixture):
        self.values: dict[Any, jax.Array] = {}
        self._mixture, self._places = mixture, cast("dict[Any, Any]", mixture.places)

    def _evaluate(self, equation: Any) -> Sequence[jax.Array]:
        raise NotImplementedError

    def evaluated(self) -> jax.Array:
        for equation in self._mixture.equations:
            self.values.update(zip(equation.outvars, self._evaluate(equation), strict=True))
        return self.values[self._mixture.output]


class _OneToken(_Evaluation):
    """Evaluates equations as if there were no experts but those that the token chooses."""

    def __init__(
        self, mixture: Mixture, operands: Sequence[jax.Array], indices: jax.Array, first_expert: jax.Array | int
    ):
        super().__init__(mixture)
        self.values = dict(zip(mixture.operands, operands, strict=True))
        self._indices, own = indices, indices - first_expert
        self._is_here: Any = None  # which of them a shard has
        for variable, value in self.values.items():
            if (expert := mixture.places[variable].expert) is not None:
                self.values[variable] = jnp.take(value, own, axis=expert, mode="clip")
                if value.shape[expert] < mixture.choice.num_experts:
                    self._is_here = (own >= 0) & (own < value.shape[expert])

    def _evaluate(self, equation: Any) -> Sequence[jax.Array]:
        operands = [v.val if isinstance(v, Literal) else self.values[v] for v in equation.invars]
        if self._is_here is not None and equation is self._mixture.equations[-1]:
            operands = list(map(self._only_here, equation.invars, operands))
        return _evaluated(equation, operands, [self._shape(variable) for variable in equation.outvars])

    def _only_here(self, variable: Any, value: Any) -> Any:
        """Returns zeros for experts of other shards: of weights of other experts, results may be infinite."""
        expert = None if isinstance(variable, Literal) else self._places[variable].expert
        if expert is None:
            return value
        is_here = jnp.expand_dims(self._is_here, [dim for dim in range(value.ndim) if dim != expert])
        return jnp.where(is_here, value, 0)

    def _shape(self, variable: Any) -> list[int]:
        expert = self._places[variable].expert
        return [self._indices.size if dim == expert else size for dim, size in enumerate(variable.aval.shape)]


class _Rows(_Evaluation):
    """Evaluates equations as if there was one expert, and a token for each chosen pair."""

    def __init__(
        self, mixture: Mixture, product: GroupedProduct, shards: Shards, groups: Groups, given: Mapping[Any, jax.Array]
    ):
        super().__init__(mixture)
        self._product, self._groups, self._given, self._shards = product, groups, given, shards
        self._gates, self._places_of_gates = gates_of_products(mixture)

    def _evaluate(self, equation: Any) -> Sequence[jax.Array]:
        """Returns what an equation computes for rows: the first dim of tokens has them, that of experts has size 1."""
        shapes = [self._shape(variable) for variable in equation.outvars]
        if (weight := self._mixture.weight_of(equation)) is not None:
            return [self._multiplied(equation, weight).reshape(shapes[0]).astype(equation.outvars[0].aval.dtype)]
        operands = [self._operand(equation, number) for number in range(len(equation.invars))]
        for number, operand in enumerate(operands):
            if (equation.outvars[0], number) in self._places_of_gates:  # the product is multiplied by it already
                operands[number] = jnp.ones_like(operand)
            if axes := self._shards.first_device_only(equation, number):
                operands[number] = jnp.where(jax.lax.axis_index(tuple(axes)) == 0, operand, jnp.zeros_like(operand))
        is_shared = self._has_shared_operand(equation)
        if is_shared:
            operands = [self._only_rows(v, value) for v, value in zip(equation.invars, operands, strict=True)]
        if equation.primitive.name == "broadcast_in_dim" and operands[0].ndim == len(shapes[0]):
            results = [jnp.broadcast_to(operands[0], shapes[0])]
        else:
            results = _evaluated(equation, operands, shapes)
        if is_shared:
            results = [self._only_rows(v, value) for v, value in zip(equation.outvars, results, strict=True)]
        return results

    def _has_shared_operand(self, equation: Any) -> bool:
        """Whether an operand is one of the layer, neither of tokens nor of experts: its gradient sums over rows."""
        variables = (each for each in equation.invars if not isinstance(each, Literal))
        return any(self._places[each] == (None, None) for each in variables)

    def _only_rows(self, variable: Any, value: Any) -> Any:
        """Returns zeros for rows of no expert. What was computed of these may be infinite, as may be its derivative."""
        tokens = None if isinstance(variable, Literal) else self._places[variable].tokens
        if not tokens:
            return value
        return jnp.moveaxis(self._groups.only_rows(jnp.moveaxis(value, tokens[0], 0)), 0, tokens[0])

    @property
    def _num_rows(self) -> int:
        return self._groups.experts.size

    def _shape(self, variable: Any) -> list[int]:
        expert, tokens = self._places[variable]
        shape = [self._shards.size(variable, dim) for dim in range(variable.aval.ndim)]
        for dim in (*(tokens or ()), *(() if expert is None else (expert,))):
            shape[dim] = self._num_rows if tokens and dim == tokens[0] else 1
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
        before = sum(dim < place.tokens[0] for dim in place.rest(variable))
        self.values[variable] = jnp.moveaxis(value, 0, before).reshape(self._shape(variable))
        return self.values[variable]

    def _of_experts(self, equation: Any, number: int, value: jax.Array) -> jax.Array:
        """Returns what the expert of each row has, such as a bias, with dims as the result of an equation has them."""
        result = equation.outvars[0]
        tokens, expert = self._places[result].tokens[0], self._places[equation.invars[number]].expert
        shape = [1] * result.aval.ndim
        for (dim,), (place,) in kept_dims(equation, number):
            if dim != expert:
                shape[place] = self._shards.size(result, place)
        before = sum(size > 1 for size in shape[:tokens])
        shape[tokens] = self._num_rows
        rows = self._groups.of_experts(value.reshape(value.shape[0], *(size for size in value.shape[1:] if size > 1)))
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
        depth = math.prod(right.shape[1 : 1 + len(summed)])
        sizes = [self._num_rows, *(self._shards.size(rows, dim) for dim in free)]
        sizes_of_weights = right.shape[1 + len(summed) :]
        left = self._groups.only_rows(left).reshape(-1, depth)
        groups = self._groups.sizes * math.prod(sizes[1:])
        gates = self._gates.get(equation.outvars[0])
        if gates is not None:
            gates = self._groups.only_rows(self._given[gates].reshape(-1, *(1 for _ in sizes[1:])))
            gates = jnp.broadcast_to(gates, sizes).reshape(-1)
        product = self._product(left, right.reshape(right.shape[0], depth, -1), groups, gates)
        product = self._groups.only_rows(product.reshape(*sizes, *sizes_of_weights))
        places, places_of_weights = (dict(places_in_product(equation, number)) for number in (other, weight))
        target = [*(places[dim] for dim in (first, *free)), *(places_of_weights[dim] for dim in free_of_weights)]
        return product.transpose(inverse_order(target))


def _evaluated(equation: Any, operands: Sequence[Any], shapes: Sequence[Sequence[int]]) -> Sequence[jax.Array]:
    """Returns what an equation computes for operands of other shapes, with results of `shapes`."""
    name, params = equation.primitive.name, equation.params
    if name in UNCHANGED:
        return operands[:1]
    if (function := activation(equation)) is not None:
        return [function(*operands)]
    if name in ("reshape", "squeeze"):
        return [operands[0].reshape(shapes[0])]
    if name == "broadcast_in_dim":
        return [jax.lax.broadcast_in_dim(operands[0], shapes[0], params["broadcast_dimensions"])]
    if name == "slice":
        bounds = zip(operands[0].shape, equation.invars[0].aval.shape, params["limit_indices"], strict=True)
        limits = [here if limit == size else limit for here, size, limit in bounds]
        return [jax.lax.slice(operands[0], params["start_indices"], limits, params["strides"])]
    if name == "dynamic_slice":
        sizes = params["slice_sizes"]
        dims = zip(operands[0].shape, equation.invars[0].aval.shape, sizes, strict=True)
        params = params | {"slice_sizes": tuple(here if size == whole else size for here, whole, size in dims)}
    outputs = equation.primitive.bind(*operands, **params)
    return outputs if equation.primitive.multiple_results else [outputs]

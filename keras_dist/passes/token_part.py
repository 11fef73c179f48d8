"""Finds the part of a program that computes a large dim for each token and reduces it, as losses do with logits.

    logits[t, v] = sum over d ( hidden[t, d] * kernel[d, v] )
    loss[t] = log(sum over v ( exp(logits[t, v]) )) - logits[t, label[t]]

It begins with the product, and contains what is computed from it for each token alone: here both lines, but not the
mean of the losses. Nothing is assumed about which loss or metric it is. `hidden` and `label` are its operands with
tokens, `kernel` is shared by all of them, and `loss` is its result. A value without a place for each token that is used
in it ends the search with a reason.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import Literal

from keras_dist.sharding.resharding import changed_shardings
from keras_dist.tracing.jaxpr_evaluation import not_literal, scope_of, shape_of, variables_of
from keras_dist.tracing.kept_dims import (
    Groups,
    activation,
    index_dims,
    kept_dims,
    moved,
    places_in_product,
    reversed_groups,
)
from keras_dist.tracing.primitives import GATHERED_DIMS, INDEXWISE, REDUCTIONS, UNCHANGED

Place = tuple[int, ...]
"""The dims of a value that are those of tokens, without dims of size 1; () for a value that all tokens share."""

_SUPPORTED = {
    *(*INDEXWISE, *UNCHANGED, *REDUCTIONS, *GATHERED_DIMS, "broadcast_in_dim", "concatenate", "dot_general"),
    *("gather", "iota", "pad", "reshape", "rev", "slice", "split", "squeeze", "transpose"),
}


@dataclass(frozen=True)
class TokenPart:
    """Equations of an open jaxpr that compute the same for each token."""

    equations: Sequence[Any]  # in their order
    product: Any  # the equation that makes the large dim
    places: dict[Any, Place]  # of the variables of the equations
    operands: Sequence[Any]  # variables that are computed outside
    results: Sequence[Any]  # variables that are used outside

    @property
    def tokens(self) -> list[int]:
        """The sizes of the dims of tokens, such as rows and positions."""
        return [self.product.outvars[0].aval.shape[dim] for dim in self.places[self.product.outvars[0]]]

    def inner_shape(self, variable: Any) -> list[int]:
        """Returns the sizes of the dims of a variable that are not those of tokens."""
        return [size for dim, size in enumerate(shape_of(variable)) if dim not in self.places[variable]]


class LossCall(NamedTuple):
    """How a step computes a large dim of each token, such as logits, and what is made of it.

    Attributes:
        layer: The layer of the product that makes the large dim.
        size: The size of that dim, such as that of a vocabulary.
        tokens: The number of tokens of a device.
        chunk: The number of tokens that a device computes at a time; None: the program is as it was.
        products: The products that a train step computes for the one of the layer: 3, or 4 if it is computed again.
        reason: Why `chunk` is None, or there are 4 products; None otherwise.
    """

    layer: str
    size: int
    tokens: int
    chunk: int | None
    products: int
    reason: str | None


class NotPerTokenError(Exception):
    """What is computed from a large dim of each token is not for each token alone."""


def find_token_parts(jaxpr: Any, batch: Collection[Any]) -> tuple[list[TokenPart], list[tuple[Any, str]]]:
    """Returns such parts of an open jaxpr, with different equations; and products that begin none, with the reasons.

    Args:
        jaxpr: The program, with the functions that it calls written inline.
        batch: Those of its inputs that have tokens.
    """
    with_tokens = set(batch)
    for equation in jaxpr.eqns:
        if not with_tokens.isdisjoint(each for each in equation.invars if not isinstance(each, Literal)):
            with_tokens.update(equation.outvars)
    parts: list[TokenPart] = []
    refused: list[tuple[Any, str]] = []
    for number, equation in enumerate(jaxpr.eqns):
        operand = _operand_with_tokens(equation, with_tokens)
        if operand is None or any(equation in part.equations for part in parts):
            continue
        try:
            parts.append(_Search(jaxpr, number, operand).found())
        except NotPerTokenError as error:
            refused.append((equation, str(error)))
    return parts, refused


def _operand_with_tokens(equation: Any, with_tokens: Collection[Any]) -> int | None:
    """Returns which operand of a product has tokens, of which the other one, a matrix, has none; None: neither."""
    if equation.primitive.name != "dot_general" or any(isinstance(each, Literal) for each in equation.invars):
        return None
    has_tokens = [variable in with_tokens for variable in equation.invars]
    if has_tokens.count(True) != 1 or equation.params["dimension_numbers"][1][0]:
        return None
    operand = has_tokens.index(True)
    (columns,) = [places_in_product(equation, 1 - operand)]
    sizes = [equation.outvars[0].aval.shape[place] for _, place in columns]
    return operand if math.prod(sizes) > 1 and kept_dims(equation, operand) else None


class _Search:
    """A search for the part that begins with a product."""

    def __init__(self, jaxpr: Any, number: int, operand: int):
        """`operand`: which one of the product, equation `number` of the jaxpr, has tokens."""
        self._jaxpr, self._number, self._product = jaxpr, number, jaxpr.eqns[number]
        output = self._product.outvars[0]
        place = [after for _, each in kept_dims(self._product, operand) for after in each]
        self._places: dict[Any, Place] = {output: tuple(sorted(place))}
        num_tokens = math.prod(output.aval.shape[dim] for dim in place)
        self._limit = num_tokens * max(1, output.aval.size // num_tokens // 8)
        self._inside, self._derived = {number}, {output}

    def found(self) -> TokenPart:
        jaxpr, output = self._jaxpr, self._product.outvars[0]
        if output in jaxpr.outvars:
            raise NotPerTokenError("the step returns it")
        self._add_operands(self._product, self._places[output])
        self._follow_results()
        self._add_large_operands()
        equations = [jaxpr.eqns[number] for number in sorted(self._inside)]
        made = {variable for equation in equations for variable in equation.outvars}
        operands = dict.fromkeys(v for e in equations for v in variables_of(e) if v not in made)
        outside = (e for number, e in enumerate(jaxpr.eqns) if number not in self._inside)
        used = {*(v for e in outside for v in variables_of(e)), *not_literal(jaxpr.outvars)}
        results = [v for e in equations for v in e.outvars if v in used and v in self._derived]
        for variable in filter(self._is_large, results):
            users = [scope_of(e) or e.primitive.name for e in jaxpr.eqns if variable in variables_of(e)]
            raise NotPerTokenError(f"{users[-1]} uses it as a whole" if users else "the step returns it")
        return TokenPart(equations, self._product, self._places, [*operands], results)

    def _is_large(self, variable: Any) -> bool:
        return math.prod(shape_of(variable)) > self._limit

    def _follow_results(self) -> None:
        """Adds the equations that compute for each token alone with what is computed from the product."""
        after: set[Any] = set()  # variables that depend on the part, but are not in it
        for number in range(self._number + 1, len(self._jaxpr.eqns)):
            equation = self._jaxpr.eqns[number]
            variables = variables_of(equation)
            derived = [each for each in variables if each in self._derived]
            if not derived and after.isdisjoint(variables):
                continue
            try:
                if not after.isdisjoint(variables):
                    raise NotPerTokenError("it is combined with a sum over tokens of itself")
                place = self._place_of_results(equation, derived)
                self._add_operands(equation, place)
            except NotPerTokenError as error:
                if any(map(self._is_large, derived)):
                    layer = scope_of(equation)
                    where = f" in {layer}" if layer else ""
                    raise NotPerTokenError(f"{error}{where}") from None
                after.update(equation.outvars)
                continue
            self._inside.add(number)
            self._derived.update(equation.outvars)
            self._places.update(dict.fromkeys(equation.outvars, place))

    def _place_of_results(self, equation: Any, derived: Iterable[Any]) -> Place:
        name = equation.primitive.name
        if not _is_supported(equation):
            raise NotPerTokenError(f"{name} uses it")
        if name == "dot_general" and len(derived := [*derived]) == 1 and not equation.params["dimension_numbers"][1][0]:
            raise NotPerTokenError("it is an operand of another product")
        found = {
            moved(self._places[variable], _kept(equation, number))
            for number, variable in enumerate(equation.invars)
            if not isinstance(variable, Literal) and variable in self._derived
        }
        place = found.pop()
        if place is None or found:
            raise NotPerTokenError(f"{name} mixes its tokens")
        return place

    def _add_operands(self, equation: Any, place: Place) -> None:
        """Adds the places of the operands of an equation, given that of its results."""
        found: dict[Any, Place] = {}
        for number, variable in enumerate(equation.invars):
            if isinstance(variable, Literal):
                continue
            groups = reversed_groups(_kept(equation, number))
            own = moved(place, groups) if shape_of(variable) else ()
            if own is None and any(not set(after).isdisjoint(place) for after, _ in groups):
                raise NotPerTokenError(f"{equation.primitive.name} repeats tokens")
            if found.setdefault(variable, own or ()) != (own or ()):
                raise NotPerTokenError(f"{equation.primitive.name} combines its tokens")
        for variable, own in found.items():
            if self._places.get(variable, own) != own:
                raise NotPerTokenError(f"{equation.primitive.name} combines its tokens")
        self._places.update(found)

    def _add_large_operands(self) -> None:
        """Adds the equations that compute large values of other origin, such as one-hot labels, for each token."""
        producers = {v: number for number, e in enumerate(self._jaxpr.eqns) for v in e.outvars}
        pending = [v for number in self._inside for v in self._operands_to_follow(number)]
        while pending:
            variable = pending.pop()
            number = producers.get(variable)
            if number is None or number in self._inside:
                continue
            equation, place = self._jaxpr.eqns[number], self._places[variable]
            if not _is_supported(equation) or len(equation.outvars) > 1:
                continue
            if equation.primitive.name == "iota" and equation.params["dimension"] in place:
                continue
            try:
                self._add_operands(equation, place)
            except NotPerTokenError:  # so the value is computed outside, and has to be stored
                continue
            self._inside.add(number)
            pending += self._operands_to_follow(number)

    def _operands_to_follow(self, number: int) -> list[Any]:
        equation = self._jaxpr.eqns[number]
        if equation.primitive.name == "dot_general":
            return []
        others = (each for each in variables_of(equation) if each not in self._derived)
        return [each for each in others if self._places[each] and self._is_large(each)]


def _is_supported(equation: Any) -> bool:
    is_known = equation.primitive.name in _SUPPORTED or activation(equation) is not None
    return is_known or bool(changed_shardings(equation))


def _kept(equation: Any, number: int) -> Groups:
    """As `kept_dims`, also for changes of layouts, and for lookups of one index for each token."""
    if changed_shardings(equation):
        return [((dim,), (dim,)) for dim, size in enumerate(shape_of(equation.invars[0])) if size != 1]
    if equation.primitive.name != "gather":
        return kept_dims(equation, number)
    numbers = equation.params["dimension_numbers"]
    dims = (numbers.operand_batching_dims, numbers.start_indices_batching_dims)[number]
    places = index_dims(equation)
    sizes = equation.invars[number].aval.shape
    # The dims of the result that are not those of the window are those of the indices, in their order.
    paired = zip(dims, (places[dim] for dim in numbers.start_indices_batching_dims), strict=True)
    return [((dim,), (place,)) for dim, place in paired if sizes[dim] != 1]

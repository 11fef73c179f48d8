"""Finds mixtures of experts in a traced program by what is computed, not by the names of layers.

A mixture is a sum over a dim of experts of values that are zero for each expert that a token has not chosen
(`choices.py`). What leads to these values, as far as it is computed for one pair of a token and an expert alone, can be
computed for the chosen pairs only (`rows.py`).

    sum over e ( gates[t, e] * (relu(x[t] @ up[e]) @ down[e]) )

Here `gates` and what leads to them are computed as before, as are `up` and `down`. The products, `relu` and the sum are
those of the mixture; `x`, `gates`, `up` and `down` are its operands.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from keras_dist.mixtures.choices import Choice, Unchosen, read_choices
from keras_dist.tracing.jaxpr_evaluation import all_equations, inner_jaxprs
from keras_dist.tracing.kept_dims import kept_dims, moved, moved_dim, reversed_groups
from keras_dist.tracing.primitives import CALLS_WITH_GRADIENTS


class Place(NamedTuple):
    """Which dims of a value are those of experts and tokens; those of tokens have no dims of size 1 among them."""

    expert: int | None
    tokens: tuple[int, ...] | None

    def rest(self, variable: Any) -> list[int]:
        """Returns the other dims of a variable at this place."""
        return [dim for dim in range(variable.aval.ndim) if dim != self.expert and dim not in (self.tokens or ())]


_NOWHERE = Place(None, None)


@dataclass(frozen=True)
class Mixture:
    """Equations of an open jaxpr that compute the same for each pair of a token and an expert, and their sum."""

    choice: Choice
    equations: Sequence[Any]  # in their order; the last one sums over the experts
    places: dict[Any, Place]  # of the variables of the equations

    @property
    def num_tokens(self) -> int:
        return self.choice.num_tokens

    @property
    def output(self) -> Any:
        return self.equations[-1].outvars[0]

    @property
    def summand_dtype(self) -> Any:
        """The dtype in which an expert computes what is summed, although the sum may be in a wider one."""
        *others, last = self.equations
        summed = {equation.outvars[0]: equation for equation in others}.get(last.invars[0])
        if last.primitive.name == "reduce_sum" and summed and summed.primitive.name == "convert_element_type":
            return summed.invars[0].aval.dtype
        return self.output.aval.dtype

    def sends_tokens(
        self, num_tokens: float, weights: Iterable[tuple[float, bool]], trained: Collection[Any], regathers: bool
    ) -> bool:
        """Whether a step sends fewer bytes if tokens are sent to the devices of their experts than if weights are.

        It sends rows to experts and results back, and their gradients; or it gathers weights, with `regathers` again
        for the backward pass, and reduces and scatters their gradients.

        Args:
            num_tokens: Those of a device.
            weights: Of each weight that a device would gather, the bytes, and whether it has a gradient.
            trained: Variables with gradients, operands or others. A step without a backward pass has none.
            regathers: Whether the weights are gathered again for the backward pass.
        """
        gathered = 2 if regathers and self._has_gradients(trained) else 1
        sent = sum(size * (gathered + is_trained) for size, is_trained in weights)
        return num_tokens * self.token_bytes(trained) <= sent

    def token_bytes(self, trained: Collection[Any]) -> int:
        """Returns the bytes of the rows and results of a token, and of their gradients; see `sends_tokens`."""
        rows = [(v, v.aval.dtype, v in trained) for v in self.operands if self.places[v].tokens is not None]
        values = (*rows, (self.output, self.summand_dtype, self._has_gradients(trained)))
        sizes = ((1 + both) * _size(v, self.places[v].rest(v)) * dtype.itemsize for v, dtype, both in values)
        return self.choice.num_chosen * sum(sizes)

    def _has_gradients(self, trained: Collection[Any]) -> bool:
        return any(variable in trained for variable in self.operands)

    @cached_property
    def operands(self) -> list[Any]:
        """The variables that are computed before, those with gradients first."""
        computed = {variable for equation in self.equations for variable in equation.outvars}
        used = (variable for equation in self.equations for variable in equation.invars)
        found = dict.fromkeys(v for v in used if not isinstance(v, Literal) and v not in computed)
        return sorted(found, key=lambda variable: not jnp.issubdtype(variable.aval.dtype, jnp.inexact))

    @property
    def variables_of_tokens(self) -> list[Any]:
        """Its operands and its output, as far as they have tokens."""
        values = (*self.operands, self.output)
        return [self.choice.indices, *(each for each in values if self.places[each].tokens is not None)]

    def weight_of(self, equation: Any) -> int | None:
        """Returns the number of the operand with the weights of all experts, if an equation is a product with them."""
        # What a single token has of each expert looks like a vector or a number of each expert.
        return _weight_of(equation, self._places_of(equation), is_matrix=self.choice.num_tokens == 1)

    def has_other_product(self, equation: Any) -> bool:
        """Returns whether an equation is a product with something else that each expert has, such as scales."""
        is_other = equation.primitive.name == "dot_general" and self.weight_of(equation) is None
        places = self._places_of(equation) if is_other and self.choice.num_tokens > 1 else []
        return any(place.expert is not None and not place.tokens for place in places)

    def _places_of(self, equation: Any) -> list[Place]:
        return [_NOWHERE if isinstance(v, Literal) else self.places[v] for v in equation.invars]


DENSE = "dense"


@dataclass(frozen=True)
class MixtureCall:
    """How one mixture of experts is computed.

    Attributes:
        layer: Path of the layer.
        form: What multiplies rows with the weights of their experts, such as "megablox"; "dense": all experts for each
            token, as the layer is written.
        reason: Why the form is not the best one of the platform; None if it is.
        num_experts: E.
        num_chosen: The number of experts that a token chooses, k.
        rows: The number of pairs of a token and an expert on one device; 0 if dense.
        flops: FLOP of the products with weights of experts in the forward pass of one device; 0 if dense.
        exchange: What is sent over the expert axes, such as `"tokens over 'expert'"`, or weights; None without them.
    """

    layer: str
    form: str
    reason: str | None
    num_experts: int
    num_chosen: int
    rows: int
    flops: float
    exchange: str | None = None


class NoMixture(Exception):
    """A sum over chosen experts has to be computed for all of them. The text says why."""


class Refusal(NamedTuple):
    """A part of a program that computes all experts, although tokens choose some of them."""

    equation: Any
    num_experts: int
    num_chosen: int
    reason: str


def find_mixtures(jaxpr: Any, constants: Sequence[Any]) -> tuple[list[Mixture], list[Refusal]]:
    """Returns the mixtures of an open jaxpr, and what looks like one and has to be computed for all experts."""
    finder = _Finder(jaxpr, read_choices(jaxpr, constants))
    found: list[Mixture] = []
    refused: list[Refusal] = []
    for equation in jaxpr.eqns:
        for number, variable in enumerate(equation.invars):
            fact = None if isinstance(variable, Literal) else finder.facts.get(variable)
            if fact is None or fact.number or fact.expert not in summed_dims(equation, number):
                continue
            try:
                mixture = finder.mixture(equation, number, fact)
            except NoMixture as reason:
                refused.append(Refusal(equation, fact.choice.num_experts, fact.choice.num_chosen, str(reason)))
                continue
            if mixture is not None:
                found.append(mixture)
                break
    known = {id(equation) for mixture in found for equation in mixture.equations} | {id(each[0]) for each in refused}
    return found, refused + list(finder.unproven(known))


def summed_dims(equation: Any, number: int) -> Sequence[int]:
    """Returns the dims of an operand that an equation sums over."""
    if equation.primitive.name == "reduce_sum":
        return equation.params["axes"]
    return equation.params["dimension_numbers"][0][number] if equation.primitive.name == "dot_general" else ()


class _Finder:
    def __init__(self, jaxpr: Any, facts: dict[Any, Unchosen]):
        self.facts = facts
        self._equations = jaxpr.eqns
        self._producers = {v: number for number, equation in enumerate(jaxpr.eqns) for v in equation.outvars}
        self._users: dict[Any, set[int]] = {v: {-1} for v in jaxpr.outvars if not isinstance(v, Literal)}
        for number, equation in enumerate(jaxpr.eqns):
            for variable in equation.invars:
                if not isinstance(variable, Literal):
                    self._users.setdefault(variable, set()).add(number)

    def mixture(self, equation: Any, number: int, fact: Unchosen) -> Mixture | None:
        """Returns the mixture that an equation sums over experts; None if it has no product with their weights."""
        tokens = moved(fact.tokens, kept_dims(equation, number))
        todo = None if tokens is None else _operands(equation, Place(None, tokens))
        if todo is None:  # such as what experts compute of the tokens that fit into their buffers
            return None
        is_single = fact.choice.num_tokens == 1
        last = self._producers[equation.outvars[0]]
        numbers: set[int] = {last}
        places, reasons = {equation.outvars[0]: Place(None, tokens)}, []
        for other, expert in _partners(equation, number, fact.expert):
            todo[other] = todo[other][0], Place(expert, todo[other][1].tokens)
        while todo:
            variable, place = todo.pop()
            if isinstance(variable, Literal):
                continue
            if places.setdefault(variable, place) != place:
                reasons.append("a value has its experts and tokens along other dims where it is used again")
                continue
            if place.expert is None or place.tokens is None:
                continue
            if _size(variable, place.rest(variable)) == 1 and not self._has_weights(variable, place):
                continue  # a number for each pair, such as its gate
            producer = self._producers.get(variable, -1)
            operands = None if producer < 0 else _operands(self._equations[producer], place)
            if (
                operands is None
                and producer >= 0
                and _hides_weights(self._equations[producer], fact.choice.num_experts)
            ):
                raise NoMixture("products with weights of experts have gradients of their own, as quantized ones do")
            if operands is None:
                name = "an input" if producer < 0 else self._equations[producer].primitive.name
                reasons += [] if is_single else [f"{name} may compute a value from several tokens or experts"]
            elif producer not in numbers:
                numbers.add(producer)
                places.update(dict.fromkeys(self._equations[producer].outvars, place))
                todo += operands
        mixture = Mixture(fact.choice, [self._equations[each] for each in sorted(numbers)], places)
        products = ((each, mixture.weight_of(each)) for each in mixture.equations)
        weights = [each.invars[number] for each, number in products if number is not None]
        if not weights or any(self._depends(each, fact.choice.indices) for each in weights):
            return None  # for example if each expert has a buffer of the tokens that chose it
        if any(map(mixture.has_other_product, mixture.equations[:-1])):
            reasons.append("a product with values of each expert, such as scales, sums over none of their dims")
        inner = {variable for each in mixture.equations[:-1] for variable in each.outvars}
        if any(self._users.get(variable, set()) - numbers for variable in inner):
            reasons.append("what each expert computes for each token is used elsewhere, too")
        if reasons:
            raise NoMixture(reasons[0])
        return mixture

    def unproven(self, known: Collection[int]) -> Iterator[Refusal]:
        """Finds products with weights of all experts of which a layer uses some, in ways that are not followed."""
        routers: list[Any] = []
        in_loops: set[Any] = set()
        for equation in self._equations:
            if equation.primitive.name == "top_k":
                routers.append(equation)
            for number, variable in enumerate(() if id(equation) in known else equation.invars):
                fact = None if isinstance(variable, Literal) else self.facts.get(variable)
                if fact is None:
                    yield from self._unproven_sums(equation, number, routers)
                elif _takes_one_expert(equation, number, fact) and fact.choice not in in_loops:
                    in_loops.add(fact.choice)
                    reason = "it takes the gates of single experts, as in a loop over them"
                    yield Refusal(equation, fact.choice.num_experts, fact.choice.num_chosen, reason)

    def _unproven_sums(self, equation: Any, number: int, routers: Sequence[Any]) -> Iterator[Refusal]:
        """Finds sums over experts by values of a router, and lookups of the results of experts that it chooses."""
        is_lookup = equation.primitive.name == "gather" and number == 0
        looked_up = equation.params["dimension_numbers"].start_index_map if is_lookup else ()
        for dim in {*summed_dims(equation, number), *looked_up} if routers else ():
            values = [*self._per_pair(equation.invars[number], Place(dim, ()))]
            pairs = max((pairs for _, _, pairs in values), default=0)
            for router in routers:
                scores, count = router.invars[0], router.outvars[-1].aval.shape[-1]
                if not pairs or scores.aval.size > pairs:  # fewer pairs are those that a layer has chosen itself
                    continue
                if is_lookup and count == scores.aval.shape[-1]:
                    continue  # it sorts
                if is_lookup:
                    is_of_router, reason = self._is_at_choice(equation, router), "it looks up results of chosen ones"
                else:
                    is_of_router = any(self._is_of_router(v, place, router) for v, place, _ in values)
                    reason = "nothing proves that the others are zero"
                if is_of_router:
                    size = scores.aval.shape[-1]
                    yield Refusal(equation, size, count, reason if count < size else "each token chooses all of them")
                    break

    def _is_of_router(self, variable: Any, place: Place, router: Any) -> bool:
        """Whether a value has the scores among which a router chooses, or numbers at the indices that it chooses."""
        if variable is router.invars[0]:
            return place.expert == variable.aval.ndim - 1
        if (producer := self._producers.get(variable)) is None:
            return False
        equation = self._equations[producer]
        return equation.primitive.name.startswith("scatter") and self._is_at_choice(equation, router)

    def _is_at_choice(self, equation: Any, router: Any) -> bool:
        """Whether the indices of a lookup or a scatter are computed from those that a router chooses."""
        indices = equation.invars[1]
        return not isinstance(indices, Literal) and self._depends(indices, router.outvars[-1])

    def _depends(self, variable: Any, other: Any) -> bool:
        """Whether a value is computed from another one."""
        todo, seen = [variable], set()
        while todo:
            variable = todo.pop()
            if variable is other:
                return True
            if variable not in seen and (number := self._producers.get(variable)) is not None:
                todo += [each for each in self._equations[number].invars if not isinstance(each, Literal)]
            seen.add(variable)
        return False

    def _has_weights(self, variable: Any, place: Place) -> bool:
        """Whether a value is computed from a product with weights of experts."""
        return any(pairs for _, _, pairs in self._per_pair(variable, place))

    def _per_pair(self, variable: Any, place: Place) -> Iterator[tuple[Any, Place, int]]:
        """Yields a value and all that it is computed from for each token and expert.

        Each with its place, and for how many pairs of a token and an expert it is a product with weights of experts.
        """
        todo, seen = [(variable, place)], set()
        while todo:
            variable, place = todo.pop()
            if isinstance(variable, Literal) or variable in seen or None in place:
                continue
            seen.add(variable)
            number = self._producers.get(variable)
            equation = None if number is None else self._equations[number]
            operands = [] if equation is None else _operands(equation, place) or []
            places = [each for _, each in operands]
            yield variable, place, _num_pairs(equation, places) if places else 0
            todo += operands


def _takes_one_expert(equation: Any, number: int, fact: Unchosen) -> bool:
    is_slice = equation.primitive.name in ("slice", "dynamic_slice", "split", "gather")
    return is_slice and moved_dim(fact.expert, kept_dims(equation, number)) is None


def _hides_weights(equation: Any, num_experts: int) -> bool:
    """Whether an equation calls a function with gradients of its own that has a product with weights of experts."""
    if equation.primitive.name not in CALLS_WITH_GRADIENTS:
        return False
    inner = itertools.chain.from_iterable(map(all_equations, inner_jaxprs(equation.params)))
    shapes = (variable.aval.shape for each in inner if each.primitive.name == "dot_general" for variable in each.invars)
    return any(len(shape) > 2 and shape[0] == num_experts for shape in shapes)


def _weight_of(equation: Any, places: Sequence[Place], is_matrix: bool) -> int | None:
    if equation.primitive.name != "dot_general":
        return None
    contracted = equation.params["dimension_numbers"][0]
    for number, (variable, place) in enumerate(zip(equation.invars, places, strict=True)):
        is_weight, rest = place.expert is not None and not place.tokens, place.rest(variable)
        if is_matrix:
            rest = [dim for dim in rest if variable.aval.shape[dim] > 1]
        if is_weight and len(rest) > is_matrix and not {*rest}.isdisjoint(contracted[number]):
            return number
    return None


def _num_pairs(equation: Any, places: Sequence[Place]) -> int:
    """Returns for how many pairs of a token and an expert an equation multiplies with matrices of experts."""
    number = _weight_of(equation, places, is_matrix=True)
    if number is None:
        return 0
    weights, contracted = equation.invars[number], equation.params["dimension_numbers"][0][number]
    columns = [dim for dim in places[number].rest(weights) if dim not in contracted]
    return equation.outvars[0].aval.size // _size(weights, columns)


def _size(variable: Any, dims: Sequence[int]) -> int:
    return math.prod(variable.aval.shape[dim] for dim in dims)


def _partners(equation: Any, number: int, expert: int) -> list[tuple[int, int]]:
    """Returns the operands that an equation sums over experts, each with its dim of experts."""
    if equation.primitive.name == "reduce_sum":
        return [(number, expert)]
    contracted = equation.params["dimension_numbers"][0]
    index = contracted[number].index(expert)
    return [(other, dims[index]) for other, dims in enumerate(contracted)]


def _operands(equation: Any, place: Place) -> list[tuple[Any, Place]] | None:
    """Returns the operands of an equation and their places, given that of its result.

    None if the result for a token and an expert may depend on what operands have for others.
    """
    groups = [kept_dims(equation, number) for number in range(len(equation.invars))]
    tokens = place.tokens or ()
    needed, kept = {*tokens, place.expert} - {None}, {dim for each in groups for _, after in each for dim in after}
    if not needed <= kept and equation.primitive.name != "broadcast_in_dim":
        return None
    operands: list[tuple[Any, Place]] = []
    for variable, group in zip(equation.invars, groups, strict=True):
        back, has = reversed_groups(group), {dim for _, after in group for dim in after}
        expert = None if place.expert is None else moved_dim(place.expert, back)
        its_tokens = moved(tokens, back)
        if (expert is None and place.expert in has) or (its_tokens is None and has.intersection(tokens)):
            return None
        operands.append((variable, Place(expert, its_tokens)))
    return operands

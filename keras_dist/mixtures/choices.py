"""Proves which values of a traced program are zero for each expert that a token has not chosen.

A router chooses by `top_k`. Its indices become factors of what experts compute: one-hot vectors, masks, or scores that
are -inf for all other experts. `read_choices` follows them through a program, equation by equation, and knows of a
value that it is one number, 0 or -inf for example, wherever its expert is not among the chosen ones of its token.

Worked example: two of six experts for each of 18 tokens.

    chosen = top_k(scores, 2)[1]                     # (18, 2), a choice
    one_hot = chosen[:, :, None] == arange(6)        # (18, 2, 6): False for experts that are not chosen
    masked = where(one_hot.any(1), scores, -inf)     # (18, 6): -inf for experts that are not chosen
    gates = exp(masked - max) / sum                  # (18, 6): 0 for experts that are not chosen

A sum over experts of something times `gates` needs what the chosen experts compute, and nothing else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from keras_dist.tracing.kept_dims import kept_dims, moved, moved_dim
from keras_dist.tracing.primitives import REDUCTIONS, UNCHANGED

NEGLIGIBLE = -1e9
"""A score that is masked by this or less has a probability of zero. Models mask by -1e9, -1e30 or -inf."""


CHOSEN_EXPERTS = "chosen_experts_of_"
"""The name, with the number of experts, of indices that `keras_dist.experts` is passed."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The experts that a router chooses for each token."""

    indices: Any  # variable of the program, (tokens..., k)
    num_experts: int

    @property
    def num_chosen(self) -> int:
        return self.indices.aval.shape[-1]

    @property
    def num_tokens(self) -> int:
        return math.prod(self.indices.aval.shape[:-1])


class Unchosen(NamedTuple):
    """What is known of a value with a dim of experts: one number for each expert that its token has not chosen."""

    choice: Choice
    number: float
    expert: int  # the dim of experts
    tokens: tuple[int, ...]  # the dims of tokens that are not of size 1, in the order of those of the indices


class _Indices(NamedTuple):
    """The value has the indices of a choice, and is equal along all dims but those of tokens and choices."""

    choice: Choice
    tokens: tuple[int, ...]
    dims: tuple[int, ...]  # along which it is not equal: those of tokens, and that of the chosen experts


class _Positions(NamedTuple):
    """Along one dim the value is 0, 1, 2, ..., and it is equal along all others."""

    dim: int


class _Number(NamedTuple):
    """All elements of the value are this number."""

    number: float


Fact = Unchosen | _Indices | _Positions | _Number


def read_choices(jaxpr: Any, constants: Sequence[Any]) -> dict[Any, Unchosen]:
    """Returns what is known of values of an open jaxpr, by their variables, if they are known for unchosen experts."""
    facts: dict[Any, Fact] = {}
    for variable, value in zip(jaxpr.constvars, constants, strict=True):
        if (fact := _of_constant(value)) is not None:
            facts[variable] = fact

    def of(variable: Any) -> Fact | None:
        if isinstance(variable, Literal):
            return _of_constant(variable.val)
        return facts.get(variable)

    for equation in jaxpr.eqns:
        if (num_experts := number_of_experts(equation)) is not None:
            indices = equation.outvars[-1]
            shape = indices.aval.shape
            if shape[-1] < num_experts:
                tokens = tuple(dim for dim in range(len(shape) - 1) if shape[dim] > 1)
                dims = tokens if shape[-1] == 1 else (*tokens, len(shape) - 1)
                facts[indices] = _Indices(Choice(indices, num_experts), tokens, dims)
        elif equation.primitive.name == "iota":
            if equation.params["shape"][equation.params["dimension"]] > 1:
                facts[equation.outvars[0]] = _Positions(equation.params["dimension"])
        elif len(equation.outvars) == 1:
            known = [of(variable) for variable in equation.invars]
            if any(each is not None for each in known) and (fact := _after(equation, known)) is not None:
                facts[equation.outvars[0]] = fact
    return {variable: fact for variable, fact in facts.items() if isinstance(fact, Unchosen)}


def number_of_experts(equation: Any) -> int | None:
    """Returns how many experts there are, if the last result of an equation are indices of chosen ones; else None."""
    if equation.primitive.name == "top_k":
        axis, rank = equation.params.get("axis", -1), equation.invars[0].aval.ndim
        return equation.invars[0].aval.shape[-1] if axis in (-1, rank - 1) else None
    name = str(equation.params.get("name", ""))
    is_marked = equation.primitive.name == "name" and name.startswith(CHOSEN_EXPERTS)
    return int(name.removeprefix(CHOSEN_EXPERTS)) if is_marked else None


def _of_constant(value: Any) -> Fact | None:
    if isinstance(value, Tracer) or np.size(value) > 4096:
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or not array.size:  # no number, or bfloat16 for example
        return None
    if np.all(array == array.flat[0]):
        return _Number(array.flat[0].item())
    dims = [dim for dim, size in enumerate(array.shape) if size > 1]
    return _Positions(dims[0]) if len(dims) == 1 and np.array_equal(array.ravel(), range(array.size)) else None


def _after(equation: Any, known: Sequence[Fact | None]) -> Fact | None:
    """Returns what is known of the result of an operation, given what is known of its operands."""
    name, first = equation.primitive.name, known[0]
    if name == "eq" and (found := _one_hot(equation, *known) or _one_hot(equation, *known[::-1])):
        return found
    if name == "dot_general":
        return next((fact for number in (0, 1) if (fact := _of_product(equation, known, number))), None)
    if len(known) == 1 and first is not None and name in _KEEPING:
        return _moved(first, equation)
    if name in REDUCTIONS:
        return _reduced(first, equation)
    return _computed(equation, known)


_KEEPING = (
    *(*UNCHANGED, "broadcast_in_dim", "convert_element_type", "reshape"),
    *("slice", "squeeze", "stop_gradient", "transpose"),
)


def _moved(fact: Fact, equation: Any, number: int = 0) -> Fact | None:
    """Returns a fact about an operand as one about the result that has the same elements."""
    if isinstance(fact, _Number | Unchosen) and equation.primitive.name == "convert_element_type":
        with np.errstate(over="ignore"):  # -1e9 in float16, for example
            fact = fact._replace(number=np.asarray(fact.number).astype(equation.params["new_dtype"]).item())
    if isinstance(fact, _Number):
        return fact
    groups = kept_dims(equation, number)
    if isinstance(fact, _Positions):
        place = moved_dim(fact.dim, groups)
        return None if place is None else _Positions(place)
    tokens = moved(fact.tokens, groups)
    if isinstance(fact, _Indices):
        # A slice has some of the chosen experts of each token.
        is_slice, shape = equation.primitive.name == "slice", equation.outvars[0].aval.shape
        dims = tuple(dim for dim in fact.dims if shape[dim] > 1) if is_slice else moved(fact.dims, groups)
        return None if tokens is None or dims is None else _Indices(fact.choice, tokens, dims)
    expert = moved_dim(fact.expert, groups)
    return None if tokens is None or expert is None else Unchosen(fact.choice, fact.number, expert, tokens)


def _one_hot(equation: Any, indices: Fact | None, positions: Fact | None) -> Fact | None:
    """Returns that indices of chosen experts do not equal those of the others."""
    if not isinstance(indices, _Indices) or not isinstance(positions, _Positions) or positions.dim in indices.dims:
        return None
    expert, shape = positions.dim, equation.outvars[0].aval.shape
    if shape[expert] != indices.choice.num_experts:
        return None
    return Unchosen(indices.choice, 0, expert, indices.tokens)


def _reduced(fact: Fact | None, equation: Any) -> Fact | None:
    if not isinstance(fact, Unchosen):
        return None
    keeps = equation.primitive.name in ("reduce_max", "reduce_min", "reduce_or", "reduce_and") or not fact.number
    is_index = equation.primitive.name.startswith("arg")
    return _moved(fact, equation) if keeps and not is_index else None


def _of_product(equation: Any, known: Sequence[Fact | None], number: int) -> Fact | None:
    fact = known[number]
    return _moved(fact, equation, number) if isinstance(fact, Unchosen) and not fact.number else None


_ON_NUMBERS: dict[str, Callable] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "not": np.logical_not, "neg": np.negative, "exp": np.exp},
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "sign": np.sign, "abs": np.abs, "square": np.square, "sqrt": np.sqrt},
}


def _computed(equation: Any, known: Sequence[Fact | None]) -> Fact | None:
    """Returns what is known after an elementwise operation."""
    name = equation.primitive.name
    for fact in known:
        if isinstance(fact, Unchosen):
            numbers = [_number_at(fact, each) for each in known]
            if (number := _number(name, numbers)) is not None:
                return fact._replace(number=number)
    numbers = [each.number if isinstance(each, _Number) else None for each in known]
    number = None if None in numbers else _number(name, numbers)
    return None if number is None else _Number(number)


def _number_at(place: Unchosen, fact: Fact | None) -> float | None:
    """Returns the number that a value has where an expert is not chosen."""
    if isinstance(fact, Unchosen) and fact._replace(number=0) != place._replace(number=0):
        return None
    return fact.number if isinstance(fact, Unchosen | _Number) else None


def _number(name: str, numbers: Sequence[float | None]) -> float | None:
    """Returns the result of an elementwise operation on numbers, of which some are not known (None)."""
    if name == "select_n":
        return None if numbers[0] is None else numbers[1 + int(numbers[0])]
    if name in ("mul", "and") and any(each == 0 for each in numbers):
        return 0
    if name == "div" and numbers[0] == 0:
        return 0
    if name in ("add", "sub") and None in numbers:
        masks = numbers if name == "add" else numbers[:1]
        return next((each for each in masks if each is not None and each <= NEGLIGIBLE), None)
    if None in numbers or name not in _ON_NUMBERS:
        return None
    with np.errstate(all="ignore"):
        return _ON_NUMBERS[name](*numbers).item()

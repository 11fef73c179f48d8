"""Which shards of a mixture's weights a device computes with, and what becomes of their sums.

An axis of the mesh may shard the width of experts. Each device computes with its columns of the first weights and its
rows of the last ones, and the sum of what devices have for a token is its result:

    x[t] @ up[e]      up (E, D, M), dim 2 is sharded     each device has M / n columns of hidden values
    relu                                                 each device has M / n columns
    ... @ down[e]     down (E, M, D), dim 1 is sharded   each device has a summand
    sum over experts                                     each device has a summand of the result

What follows the last product has to be linear in it. What is added to a summand, such as a bias, is added on one device
only. Where this cannot be followed, as through a slice of the columns, the axis shards the experts instead.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from keras_dist.mixtures.exchange import Form
from keras_dist.mixtures.partial_sums import is_linear
from keras_dist.mixtures.recognition import Mixture, Place, summed_dims
from keras_dist.tracing.kept_dims import interleaved_dims, kept_dims
from keras_dist.tracing.primitives import SUMS


@dataclass(frozen=True)
class Shards:
    """How axes of the mesh shard what a mixture computes, beside its tokens.

    Attributes:
        expert_axes: The axes that shard experts.
        width_axes: The axis of each other dim that is sharded, by variable and dim.
        summands: The variables of which devices along an axis have summands, by axis.
        axis_sizes: Sizes of the axes.
        exchange: How rows are sent to the devices of their experts, as `exchange.py` has it, if devices along the
            expert axes have different tokens; None if they have the same.
    """

    expert_axes: tuple[str, ...]
    width_axes: Mapping[tuple[Any, int], str]
    summands: Mapping[str, Collection[Any]]
    axis_sizes: Mapping[str, int]
    exchange: Form | None = None

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """All axes over which devices share the work for a token."""
        return (*(() if self.exchange else self.expert_axes), *self.summands)

    def summand_axes(self, output: Any) -> tuple[str, ...]:
        """Returns the axes along which devices have summands of the sum over experts."""
        return tuple(axis for axis in self.shared_axes if output in self.summands.get(axis, (output,)))

    def axes_of(self, variable: Any, place: Place) -> list[Sequence[str] | str | None]:
        """Returns the axes of the dims of a variable in its tokens-first form, after those of tokens."""
        experts = [] if place.expert is None else [self.expert_axes if place.tokens is None else None]
        return [*experts, *(self.width_axes.get((variable, dim)) for dim in place.rest(variable))]

    @property
    def num_expert_shards(self) -> int:
        return math.prod(self.axis_sizes[name] for name in self.expert_axes)

    def size(self, variable: Any, dim: int) -> int:
        """Returns the size of a dim, not one of tokens or experts, on a device."""
        axis = self.width_axes.get((variable, dim))
        return variable.aval.shape[dim] // (1 if axis is None else self.axis_sizes[axis])

    def first_device_only(self, equation: Any, number: int) -> list[str]:
        """Returns the axes along which only the first device adds an operand, since the others have summands."""
        if equation.primitive.name not in SUMS:
            return []
        (result,), operand = equation.outvars, equation.invars[number]
        return [axis for axis, each in self.summands.items() if result in each and not _is_in(operand, each)]


def row_flops(mixture: Mixture, shards: Shards) -> float:
    """Returns the FLOP, 2 per multiply-add, of the products of a row with weights of its expert, on one device."""
    total = 0.0
    for equation in mixture.equations:
        if (number := mixture.weight_of(equation)) is not None:
            weights, (result,) = equation.invars[number], equation.outvars
            expert = mixture.places[weights].expert
            summed = [(weights, dim) for dim in summed_dims(equation, number) if dim != expert]
            others = [(result, dim) for dim in mixture.places[result].rest(result)]
            total += 2.0 * math.prod(shards.size(*each) for each in (*summed, *others))
    return total


UNSHARDED = Shards((), {}, {}, {})


def read_shards(
    mixture: Mixture,
    axes: Mapping[Any, Sequence[Sequence[str]]],
    axis_sizes: Mapping[str, int],
    expert_axes: Sequence[str] = (),
    exchange: Form | None = None,
) -> Shards:
    """Returns how to compute a mixture with weights that are sharded.

    Args:
        mixture: The mixture.
        axes: Axes that shard each dim of each operand that has experts and no tokens. Over axes that cannot be followed
            experts are sharded instead, or weights are gathered.
        axis_sizes: Sizes of the axes of the mesh.
        expert_axes: The axes of an exchange, which shard experts.
        exchange: As in `Shards`.
    """
    experts, found, summands = list(expert_axes), {}, {}
    names = dict.fromkeys(name for dims in axes.values() for names in dims for name in names)
    num_experts = mixture.choice.num_experts
    for axis in names:
        if axis_sizes[axis] == 1 or axis in experts:
            continue
        sharded = {
            (variable, dim)
            for variable, dims in axes.items()
            for dim, names in enumerate(dims)
            if axis in names and dim != mixture.places[variable].expert
        }
        try:
            dims = _followed(mixture, sharded, axis_sizes[axis], found)
            summands[axis] = _summands(mixture, dims)
            found |= dict.fromkeys(dims, axis)
        except _NotFollowed:
            parts = math.prod(axis_sizes[name] for name in (*experts, axis))
            if not exchange and num_experts % parts == 0:
                experts.append(axis)
    return Shards(tuple(experts), found, summands, axis_sizes, exchange)


class _NotFollowed(Exception):
    """Sharded dims or summands cannot be followed through a mixture."""


def _followed(
    mixture: Mixture, sharded: Collection[tuple[Any, int]], size: int, taken: Collection[tuple[Any, int]]
) -> set[tuple[Any, int]]:
    """Returns all dims that have to be sharded together, of all variables of a mixture."""
    found, todo = set(), list(sharded)
    if not sharded:
        raise _NotFollowed  # the axis shards experts
    links: dict[tuple[Any, int], list[tuple[Any, int]]] = {}
    for equation in mixture.equations:
        for one, other in _links(equation):
            links.setdefault(one, []).append(other)
            links.setdefault(other, []).append(one)
    while todo:
        variable, dim = todo.pop()
        if (variable, dim) in found:
            continue
        place = mixture.places[variable]
        if dim == place.expert or dim in (place.tokens or ()) or variable.aval.shape[dim] % size:
            raise _NotFollowed
        if (variable, dim) in taken:
            raise _NotFollowed  # another axis shards it
        found.add((variable, dim))
        todo += links.get((variable, dim), [])
    variables = [variable for variable, _ in found]
    if len(variables) != len({*variables}):
        raise _NotFollowed  # an axis can shard one dim of a value
    return found


def _links(equation: Any) -> Iterator[tuple[tuple[Any, int], tuple[Any, int]]]:
    """Yields dims of operands and results that are sharded together."""
    for number, operand in enumerate(equation.invars):
        if isinstance(operand, Literal):
            continue
        for dim, place in _kept(equation, number).items():
            yield from (((operand, dim), (result, place)) for result in equation.outvars)
    if equation.primitive.name == "dot_general":
        left, right = equation.params["dimension_numbers"][0]
        yield from (
            ((equation.invars[0], one), (equation.invars[1], other)) for one, other in zip(left, right, strict=True)
        )


def _kept(equation: Any, number: int) -> dict[int, int]:
    """Returns the dims of an operand whose shards are shards of the results, each with the dim of these."""
    kept = {before[0]: after[0] for before, after in kept_dims(equation, number) if len(before) == len(after) == 1}
    if equation.primitive.name == "slice":
        shapes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        kept |= {dim: dim for dim in interleaved_dims(equation.params, *shapes)}
    return kept


def _summands(mixture: Mixture, sharded: Collection[tuple[Any, int]]) -> set[Any]:
    """Returns the variables of which devices have summands, given the dims that are sharded."""
    summands: set[Any] = set()
    for equation in mixture.equations:
        contracts = _contracts(equation, sharded)
        has = [number for number, each in enumerate(equation.invars) if _is_in(each, summands)]
        if not (contracts or has):
            continue
        is_linear_in = len(has) == 1 and is_linear(equation, has[0])
        if (contracts and has) or not (contracts or is_linear_in or equation.primitive.name in SUMS):
            raise _NotFollowed
        if any((result, dim) in sharded for result in equation.outvars for dim in range(result.aval.ndim)):
            raise _NotFollowed
        summands.update(equation.outvars)
    if mixture.output not in summands and not any(variable is mixture.output for variable, _ in sharded):
        raise _NotFollowed
    return summands


def _is_in(variable: Any, variables: Collection[Any]) -> bool:
    return not isinstance(variable, Literal) and variable in variables


def _contracts(equation: Any, sharded: Collection[tuple[Any, int]]) -> bool:
    """Whether an equation sums over sharded dims. It may do nothing else along them but keep them."""
    contracted, kept = False, set()
    for number, operand in enumerate(equation.invars):
        if not isinstance(operand, Literal):
            places = _kept(equation, number)
            kept.update(places.values())
            lost = [dim for dim in range(operand.aval.ndim) if (operand, dim) in sharded and dim not in places]
            contracted |= bool(lost)
            if not {*lost} <= {*summed_dims(equation, number)}:
                raise _NotFollowed
    sharded_results = {dim for each in equation.outvars for dim in range(each.aval.ndim) if (each, dim) in sharded}
    if not sharded_results <= kept and equation.primitive.name != "broadcast_in_dim":
        raise _NotFollowed
    return contracted

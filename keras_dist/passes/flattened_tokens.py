"""Keeps the tokens of flattened batches on their devices, where both batch and positions are sharded.

Layers reshape (batch, positions, D) to (tokens, D), compute each token alone, and reshape back. With context
parallelism, XLA gathers positions for that, since the tokens of a device do not follow each other among all tokens. But
where their order makes no difference, they may have another one, in which each device flattens the positions it has.

Worked example: 2 rows of 4 positions, which 2 devices share. Tokens, numbered as the reshape orders them, are on

    device 0    device 1
     0  1        2  3
     4  5        6  7

so the tokens of device 0 are 0, 1, 4 and 5. In the order 0, 1, 4, 5, 2, 3, 6, 7 they are a shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from keras_dist.passes.step_program import StepProgram
from keras_dist.sharding.per_device import on_devices
from keras_dist.tracing.jaxpr_evaluation import equations_in_place_of, shape_of, with_equations
from keras_dist.tracing.kept_dims import Groups, index_dims, kept_dims, moved_dim
from keras_dist.tracing.primitives import REDUCTIONS, REMATERIALIZATIONS


def flattened_per_device(jaxpr: Any, program: StepProgram, computed_together: Sequence[Sequence[Any]]) -> Any:
    """Returns an open jaxpr in which each device flattens its own tokens; `program.token_dims` has their dims then.

    Args:
        jaxpr: The program of a step or a part of it.
        program: Knows the axes of its variables.
        computed_together: Sets of variables that need the same order of tokens. Only what computes some of them is
            changed; if that is nothing, the jaxpr is returned as it is.
    """

    def is_wanted(tokens: _Tokens) -> bool:
        shares = [[variable in tokens.dims for variable in variables] for variables in computed_together]
        return not tokens.is_ordered and any(map(all, shares)) and all(all(each) or not any(each) for each in shares)

    found = [tokens for tokens in _Reading(jaxpr, program).tokens() if is_wanted(tokens)]
    if not found:
        return jaxpr
    changed = {id(reshape.equation): (reshape, tokens.axes) for tokens in found for reshape in tokens.reshapes}

    def replaced(equation: Any) -> Sequence[Any] | None:
        if id(equation) not in changed:
            return None
        return equations_in_place_of(equation, partial(_per_device, program, *changed[id(equation)]))

    for tokens in found:
        program.token_dims.update({variable: (dim, tokens.all_axes) for variable, dim in tokens.dims.items()})
    return with_equations(jaxpr, replaced)


class _Reshape(NamedTuple):
    """A reshape between several dims and one dim of tokens."""

    equation: Any
    before: Sequence[int]
    after: Sequence[int]


@dataclass(eq=False)
class _Tokens:
    """What is computed of tokens: values with a dim that was several sharded ones."""

    sizes: tuple[int, ...]  # of the dims that are merged
    axes: tuple[tuple[str, ...], ...]  # over which they are sharded
    dims: dict[Any, int] = field(default_factory=dict)  # by variable
    reshapes: list[_Reshape] = field(default_factory=list)  # which merge these dims, and split them again
    is_ordered: bool = False  # whether a result may depend on the order of tokens

    @property
    def all_axes(self) -> tuple[str, ...]:
        return sum(self.axes, ())


class _Reading:
    """Follows tokens through an open jaxpr, from where dims are merged to where they are split again or summed."""

    def __init__(self, jaxpr: Any, program: StepProgram):
        self._program = program
        self._producers: dict[Any, Any] = {}
        self._outer: dict[Any, Any] = {}  # variables, by the inputs of bodies that they are passed to
        self._axes: dict[tuple[int, ...], tuple[tuple[str, ...], ...]] = {}  # of merged dims, by their sizes
        self._tokens: dict[Any, _Tokens] = {}  # by variable
        self._read(jaxpr.eqns)
        for variable in jaxpr.outvars:
            if (tokens := self._tokens_of(variable)) is not None:
                tokens.is_ordered = True

    def _read(self, equations: Sequence[Any]) -> None:
        self._begin(equations)
        for equation in equations:
            self._producers |= dict.fromkeys(equation.outvars, equation)
            operands = [number for number, each in enumerate(equation.invars) if self._tokens_of(each) is not None]
            if operands and equation.primitive.name in REMATERIALIZATIONS:
                self._read_body(equation)
            elif operands:
                self._follow(equation, operands)

    def _read_body(self, equation: Any) -> None:
        """Follows tokens through a part that is computed again."""
        body = equation.params["jaxpr"]
        self._outer |= dict(zip(body.invars, equation.invars, strict=True))
        self._pass_on(equation.invars, body.invars)
        self._read(body.eqns)
        self._pass_on(body.outvars, equation.outvars)

    def _pass_on(self, variables: Sequence[Any], others: Sequence[Any]) -> None:
        for variable, other in zip(variables, others, strict=True):
            if (tokens := self._tokens_of(variable)) is not None:
                self._tokens[other] = tokens
                tokens.dims[other] = tokens.dims[variable]

    def tokens(self) -> Iterator[_Tokens]:
        yield from dict.fromkeys(self._tokens.values())

    def _tokens_of(self, variable: Any) -> _Tokens | None:
        return None if isinstance(variable, Literal) else self._tokens.get(variable)

    def _begin(self, equations: Sequence[Any]) -> None:
        """Begins with reshapes that merge several sharded dims.

        So do reshapes of values of which not all axes are known, such as masks, if they merge the same sizes.
        """
        program = self._program
        merges = [
            (tuple(shape_of(equation.invars[0])[dim] for dim in before), _Reshape(equation, before, after))
            for equation in equations
            if equation.primitive.name == "reshape" and program.partitioned_mesh(equation) is program.mesh
            for before, after in kept_dims(equation, 0)
            if len(before) > 1 and len(after) == 1
        ]
        for sizes, (equation, before, _) in merges:
            names = program.axes_of(equation.invars[0])
            names = tuple(tuple(names[dim]) for dim in before)
            is_even = all(size % program.num_shards(each) == 0 for size, each in zip(sizes, names, strict=True))
            if is_even and names[0] and any(names[1:]):
                self._axes.setdefault(sizes, names)
        for sizes, reshape in merges:
            if sizes in self._axes:
                (result,) = reshape.equation.outvars
                self._tokens[result] = _Tokens(sizes, self._axes[sizes], {result: reshape.after[0]}, [reshape])

    def _follow(self, equation: Any, operands: Sequence[int]) -> None:
        """Follows the tokens of some operands of an equation, all those that have such, to its results."""
        tokens = self._united([self._tokens[equation.invars[number]] for number in operands])
        dims = [tokens.dims[equation.invars[number]] for number in operands]
        if (after := self._split_dims(equation, tokens, dims[0])) is not None:
            tokens.reshapes.append(_Reshape(equation, dims, after))
        elif not self._reduces(equation, operands, dims):
            place = self._place(equation, operands, dims)
            if place is None:
                tokens.is_ordered = True
            else:
                tokens.dims |= dict.fromkeys(equation.outvars, place)
                self._tokens |= dict.fromkeys(equation.outvars, tokens)

    def _united(self, several: Sequence[_Tokens]) -> _Tokens:
        """Returns the tokens of values that are computed with each other, whose order has to be the same."""
        first, *others = dict.fromkeys(several)
        for other in others:
            is_same = (other.sizes, other.axes) == (first.sizes, first.axes)
            first.is_ordered |= other.is_ordered or not is_same
            first.dims |= other.dims
            first.reshapes += other.reshapes
            self._tokens |= dict.fromkeys(other.dims, first)
        return first

    def _split_dims(self, equation: Any, tokens: _Tokens, dim: int) -> Sequence[int] | None:
        """Returns the dims that a reshape splits tokens into, if these are those that were merged."""
        if equation.primitive.name != "reshape":
            return None
        shape = shape_of(equation.outvars[0])
        found = (after for before, after in kept_dims(equation, 0) if before == (dim,))
        return next((after for after in found if tuple(shape[each] for each in after) == tokens.sizes), None)

    def _reduces(self, equation: Any, operands: Sequence[int], dims: Sequence[int]) -> bool:
        """Whether an equation sums over tokens, for example, so that their order makes no difference."""
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0]
            return len(operands) == 2 and tuple(dims) in zip(*contracted, strict=True)
        return equation.primitive.name in _IN_ANY_ORDER and dims[0] in equation.params["axes"]

    def _place(self, equation: Any, operands: Sequence[int], dims: Sequence[int]) -> int | None:
        """Returns the dim of tokens of the results, if each token of them is computed of that of the operands."""
        kept = [_kept(equation, number) for number in range(len(equation.invars))]
        (place, *others) = {moved_dim(dim, kept[number]) for number, dim in zip(operands, dims, strict=True)}
        if place is None or others:
            return None
        for number, variable in enumerate(equation.invars):
            if number not in operands:
                own = (dim for dim in range(variable.aval.ndim) if moved_dim(dim, kept[number]) == place)
                if not all(self._is_same_along(variable, dim) for dim in own):
                    return None
        return place

    def _is_same_along(self, variable: Any, dim: int) -> bool:
        """Whether all elements of a value along a dim are known to be the same."""
        while not isinstance(variable, Literal) and variable in self._outer:
            variable = self._outer[variable]
        equation = None if isinstance(variable, Literal) else self._producers.get(variable)
        if equation is None:
            return shape_of(variable)[dim] == 1
        if equation.primitive.name == "iota":
            return equation.params["dimension"] != dim
        if equation.primitive.name == "broadcast_in_dim":
            (operand, *_), places = equation.invars, equation.params["broadcast_dimensions"]
            return dim not in places or self._is_same_along(operand, places.index(dim))
        operands = [each for each in enumerate(equation.invars) if each[1].aval.ndim]
        before = [
            (each, [d for d in range(each.aval.ndim) if moved_dim(d, kept_dims(equation, number)) == dim])
            for number, each in operands
        ]
        return bool(before) and all(own and self._is_same_along(each, own[0]) for each, own in before)


def _kept(equation: Any, number: int) -> Groups:
    """Returns the dims of an operand that its results keep, also of a lookup, such as `take_along_axis` does."""
    if equation.primitive.name != "gather":
        return kept_dims(equation, number)
    numbers, places = equation.params["dimension_numbers"], index_dims(equation)
    if number == 1:
        return [((dim,), (place,)) for dim, place in enumerate(places)]
    batch = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    return [((dim,), (places[other],)) for dim, other in batch]


_IN_ANY_ORDER = {*REDUCTIONS} - {"argmax", "argmin"}


def _per_device(
    program: StepProgram, reshape: _Reshape, axes: Sequence[tuple[str, ...]], value: jax.Array
) -> jax.Array:
    """Merges dims on each device, or splits them again."""
    all_axes = sum(axes, ())

    def axes_of(dims: Sequence[int], rank: int) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = [()] * rank
        for dim, names in zip(dims, axes if len(dims) > 1 else [all_axes], strict=True):
            found[dim] = names
        return found

    shape = shape_of(reshape.equation.outvars[0])
    before, after = axes_of(reshape.before, value.ndim), axes_of(reshape.after, len(shape))
    sizes = [size // program.num_shards(names) for size, names in zip(shape, after, strict=True)]
    reshaped = on_devices(
        lambda shard: shard.reshape(sizes), program.mesh, (PartitionSpec(*before),), PartitionSpec(*after), all_axes
    )
    return reshaped(value)

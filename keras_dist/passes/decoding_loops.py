"""Loops that generate tokens: weights are read once before a loop, and caches of keys and values are updated in place.

KerasHub's language models take the keys and values of each layer out of one array, update those of one token, and stack
all of them to a new array. XLA would copy the array for each token. Example, of an array with 2 layers:

    first = dynamic_update_slice(cache[0], token, ...)          cache = dynamic_update_slice(cache, [token], 0, ...)
    ... what reads `first`                                      ... what reads cache[0]
    second = dynamic_update_slice(cache[1], other, ...)         cache = dynamic_update_slice(cache, [other], 1, ...)
    ... what reads `second`                                     ... what reads cache[1]
    cache = stack([first, second])

The left form becomes the right one, which XLA computes in the memory of the array that the loop carries.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]

from keras_dist.tracing.jaxpr_evaluation import (
    equations_in_place_of,
    equations_of,
    inner_jaxprs,
    not_literal,
    renamed,
    shape_of,
    variables_of,
    with_equations,
)
from keras_dist.tracing.primitives import ALL_CALLS

Region = tuple[int | None, ...]
"""A part of an array: an index for each of its dims, or None for all of a dim."""


def with_improved_loops(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose loops read weights before their first iteration, and update arrays in place."""
    return with_equations(program, _improved_loop)


def changing_operands(program: ClosedJaxpr) -> list[bool]:
    """Returns for each operand of a program whether a loop in it changes the value, like tokens, and unlike weights."""
    changing = set()
    for each in program.jaxpr.eqns:
        if each.primitive.name == "while":
            num_constants = each.params["cond_nconsts"] + each.params["body_nconsts"]
            changing.update(not_literal(each.invars[num_constants:]))
    return [variable in changing for variable in program.jaxpr.invars]


def _improved_loop(equation: Any) -> Sequence[Any] | None:
    if equation.primitive.name != "while":
        return None
    num_before, num_constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    body = equation.params["body_jaxpr"]
    jaxpr = body.jaxpr
    constants, carried = jaxpr.invars[:num_constants], jaxpr.invars[num_constants:]
    operands = equation.invars[num_before : num_before + num_constants]
    known, reads, others = dict(zip(constants, operands, strict=True)), [], []
    for each in jaxpr.eqns:
        if _only_reads(each) and each.invars[0] in known:
            reads.append(renamed(each, known))
            known[each.outvars[0]] = each.outvars[0]
        else:
            others.append(each)
    used = {variable for each in others for variable in variables_of(each)}
    used.update(not_literal(jaxpr.outvars))
    read = [each.outvars[0] for each in reads if each.outvars[0] in used]
    jaxpr = jaxpr.replace(
        eqns=others, invars=[*constants, *read, *carried], debug_info=jaxpr.debug_info.with_unknown_names()
    )
    for carry, result in zip(carried, list(jaxpr.outvars), strict=True):
        jaxpr = _updated_in_place(jaxpr, carry, result)
    params = {**equation.params, "body_nconsts": num_constants + len(read), "body_jaxpr": body.replace(jaxpr=jaxpr)}
    end = num_before + num_constants
    invars = [*equation.invars[:end], *read, *equation.invars[end:]]
    return [*reads, equation.replace(params=params, invars=invars)]


def _only_reads(equation: Any) -> bool:
    """Returns whether an equation casts a value to a dtype that is no larger, or reshards it."""
    if len(equation.invars) != 1 or len(equation.outvars) != 1 or isinstance(equation.invars[0], Literal):
        return False
    if equation.primitive.name == "convert_element_type":
        return equation.outvars[0].aval.dtype.itemsize <= equation.invars[0].aval.dtype.itemsize
    if equation.primitive.name in ALL_CALLS:
        return all(_only_reads(each) for inner in inner_jaxprs(equation.params)[:1] for each in inner.eqns)
    return equation.primitive.name == "sharding_constraint"


class _Update(NamedTuple):
    region: Region
    equation: Any  # the `dynamic_update_slice` of the region


class _Stack:
    """The equations that stack updated parts of an array, which a loop carries, to the array of the next iteration."""

    def __init__(self, jaxpr: Jaxpr, carry: Any):
        self._producers: dict[Any, Any] = {variable: each for each in jaxpr.eqns for variable in each.outvars}
        self._carry, self._shape = carry, shape_of(carry)
        self.updates: dict[Any, _Update] = {}
        self.stacking: list[Any] = []

    def finds(self, result: Any, region: Region) -> bool:
        """Returns whether a value is a region of the array, stacked of parts in which slices were updated."""
        equation = self._producers.get(result)
        if equation is None:
            return False
        if self._region_of(result) == region:
            return True
        if equation.primitive.name == "dynamic_update_slice":
            self.updates[result] = _Update(region, equation)
            return self._region_of(equation.invars[0]) == region
        axis, parts = self._parts(equation)
        dims = [dim for dim, index in enumerate(region) if index is None]
        if not parts or len(parts) != self._shape[dims[axis]]:
            return False
        self.stacking.append(equation)
        regions = [(*region[: dims[axis]], number, *region[dims[axis] + 1 :]) for number in range(len(parts))]
        return all(map(self.finds, parts, regions))

    def _parts(self, equation: Any) -> tuple[int, list[Any]]:
        """Returns the dim along which an equation stacks values, and these; none if it does something else."""
        if equation.primitive.name == "stack":
            return equation.params["axis"], list(equation.invars)
        if equation.primitive.name != "concatenate":
            return 0, []
        axis, parts = equation.params["dimension"], []
        for variable in equation.invars:
            expanded = self._producers.get(variable)
            if expanded is None or shape_of(variable)[axis] != 1:
                return axis, []
            (part, *_), shape = expanded.invars, shape_of(variable)
            dims = [dim for dim in range(len(shape)) if dim != axis]
            inserts = expanded.params.get("broadcast_dimensions", dims) if expanded.primitive.name in _EXPANDING else ()
            if tuple(inserts) != tuple(dims) or tuple(shape_of(part)) != tuple(shape[dim] for dim in dims):
                return axis, []
            self.stacking.append(expanded)
            parts.append(part)
        return axis, parts

    def _region_of(self, variable: Any) -> Region | None:
        """Returns the region of the array, as the loop carries it, that a value is; None if it is something else."""
        if variable is self._carry:
            return (None,) * len(self._shape)
        squeeze = self._producers.get(variable)
        if squeeze is None or squeeze.primitive.name != "squeeze":
            return None
        part = self._producers.get(squeeze.invars[0])
        if part is None or part.primitive.name != "slice" or (region := self._region_of(part.invars[0])) is None:
            return None
        dims = [dim for dim, index in enumerate(region) if index is None]
        starts, found = part.params["start_indices"], list(region)
        for place, size in enumerate(shape_of(squeeze.invars[0])):
            if place in squeeze.params["dimensions"]:
                found[dims[place]] = starts[place]
            elif size != self._shape[dims[place]]:
                return None
        return tuple(found)


_EXPANDING = ("broadcast_in_dim", "reshape")


def _updated_in_place(jaxpr: Jaxpr, carry: Any, result: Any) -> Jaxpr:
    """Returns the body of a loop that updates an array that it carries, if it stacked updated parts of it."""
    found = _Stack(jaxpr, carry)
    if result is carry or not found.finds(result, (None,) * len(shape_of(carry))) or not found.stacking:
        return jaxpr
    stacking = set(map(id, found.stacking))
    stacked = {each.outvars[0] for each in found.stacking}
    others = [each for each in jaxpr.eqns if id(each) not in stacking]
    read = {variable for each in others for variable in variables_of(each)}
    if read & stacked or sum(each in stacked for each in jaxpr.outvars if not isinstance(each, Literal)) > 1:
        return jaxpr
    array, equations, unread = carry, [], {}

    def read_parts(variables: Sequence[Any]) -> None:
        # As late as possible, after the updates of keys and values: a read between them would keep a copy.
        for update in (unread.pop(each) for each in variables if not isinstance(each, Literal) and each in unread):

            def part(array: Any, region: Region = update.region) -> Any:
                starts = [index or 0 for index in region]
                pairs = zip(region, array.shape, strict=True)
                limits = [size if index is None else index + 1 for index, size in pairs]
                return lax.squeeze(lax.slice(array, starts, limits), _pinned(region))

            equations.extend(equations_in_place_of(update.equation, part, [array]))

    for each in others:
        read_parts(each.invars)
        if (update := found.updates.get(each.outvars[0]) if each.outvars else None) is None:
            equations.append(each)
            continue

        def updated(array: Any, value: Any, *starts: Any, update: _Update = update) -> Any:
            given = iter(starts)
            every = [next(given) if index is None else starts[0].dtype.type(index) for index in update.region]
            value = lax.expand_dims(value, _pinned(update.region))
            return update.equation.primitive.bind(array, value, *every, **update.equation.params)

        added, (array,) = equations_of(updated, [array, *each.invars[1:]], each.source_info)
        equations.extend(added)
        unread[each.outvars[0]] = update
    read_parts(jaxpr.outvars)
    return jaxpr.replace(eqns=equations, outvars=[array if each is result else each for each in jaxpr.outvars])


def _pinned(region: Region) -> list[int]:
    return [dim for dim, index in enumerate(region) if index is not None]

"""Evaluates jaxprs, the programs that JAX traces, in whole or in parts."""

import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters.partial_eval import dce_jaxpr

from keras_dist.tracing.primitives import CALLS, CALLS_WITH_GRADIENTS, LOOPS_AND_BRANCHES, REMATERIALIZATIONS


def as_function(jaxpr: Any, constants: Sequence[Any] = ()) -> Callable[..., list[Any]]:
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, constants))


def never(equation: Any) -> bool:
    return False


def evaluate_inlined(
    jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any], is_call: Callable[[Any], bool] = never
) -> list[Any]:
    """Evaluates an open jaxpr, and the functions that it calls as if they were written inline.

    Equations of `jax.checkpoint` keep their bodies, except those that `is_call` says to be calls.
    """
    values = Values(jaxpr, constants, arguments)
    pending: list[Any] = []
    for equation in jaxpr.eqns:
        is_rematerialized = equation.primitive.name in REMATERIALIZATIONS
        if not is_rematerialized and equation.primitive.name not in CALLS:
            pending.append(equation)
            continue
        values.evaluate(pending)
        pending = []
        body = equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]
        consts, body = getattr(body, "consts", ()), getattr(body, "jaxpr", body)
        operands = [values.read(variable) for variable in equation.invars]
        if is_rematerialized and not is_call(equation):
            outputs = with_body(equation, partial(evaluate_inlined, body, (), is_call=is_call), operands)
        else:
            outputs = evaluate_inlined(body, consts, operands, is_call)
        values.known.update(zip(equation.outvars, outputs, strict=True))
    values.evaluate(pending)
    return [values.read(variable) for variable in jaxpr.outvars]


def with_body(equation: Any, body: Callable, operands: Sequence[Any]) -> Any:
    """Evaluates an equation of `jax.checkpoint` with another body, of its operands, and returns what that returns."""
    traced, shapes = jax.make_jaxpr(lambda *values: body(values), return_shape=True)(*operands)
    jaxpr = traced.jaxpr.replace(invars=[*traced.jaxpr.constvars, *traced.jaxpr.invars], constvars=[])
    outputs = equation.primitive.bind(*traced.consts, *operands, **{**equation.params, "jaxpr": jaxpr})
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def inner_jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    """Returns the programs among the parameters of an equation, such as the body of a loop."""
    values = itertools.chain.from_iterable(v if isinstance(v, (tuple, list)) else (v,) for v in params.values())
    return [each for each in (getattr(value, "jaxpr", value) for value in values) if isinstance(each, Jaxpr)]


def bind(jaxpr: Any, equation: Any, *operands: Any) -> Any:
    """Applies the operation of an equation of a jaxpr to other operands; returns a list if it has several results."""
    if equation.primitive.name not in CALLS_WITH_GRADIENTS:
        return equation.primitive.bind(*operands, **equation.params)
    # Its gradient is among the parameters, in a form of JAX's own.
    values = dict(zip(equation.invars, operands, strict=True))
    inputs = {variable: value for variable, value in values.items() if not isinstance(variable, Literal)}
    single = jaxpr.replace(eqns=[equation], invars=[*inputs], outvars=equation.outvars, constvars=[])
    return as_function(single)(*inputs.values())


def with_equations(program: Any, replace: Callable[[Any], Sequence[Any] | None]) -> Any:
    """Returns a jaxpr, open or closed, with each equation replaced by others, also in its inner programs.

    `replace` returns None for an equation that stays. A program whose equations all stay does so, too, as the same
    object: JAX lowers each object once.
    """
    if not isinstance(program, Jaxpr):
        jaxpr = with_equations(program.jaxpr, replace)
        return program if jaxpr is program.jaxpr else program.replace(jaxpr=jaxpr)

    def replaced(equation: Any) -> Sequence[Any]:
        others = replace(equation)
        return [with_programs(equation, partial(with_equations, replace=replace))] if others is None else others

    equations = unless_same(program.eqns, list(itertools.chain.from_iterable(map(replaced, program.eqns))))
    return program if equations is program.eqns else program.replace(eqns=equations)


def with_programs(equation: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """Returns an equation with its inner programs changed; the same object if they stay the same objects."""

    def in_parameter(value: Any) -> Any:
        if isinstance(value, Jaxpr):
            return change(value)
        if isinstance(value, ClosedJaxpr):
            return value if (jaxpr := change(value.jaxpr)) is value.jaxpr else value.replace(jaxpr=jaxpr)
        if isinstance(value, tuple) and all(isinstance(each, (Jaxpr, ClosedJaxpr)) for each in value):
            return unless_same(value, tuple(map(in_parameter, value)))
        return value

    params = {name: in_parameter(value) for name, value in equation.params.items()}
    is_same = all(params[name] is value for name, value in equation.params.items())
    return equation if is_same else equation.replace(params=params)


def unless_same(before: Any, after: Any) -> Any:
    """Returns a sequence, or the one before if that has the same objects."""
    return before if len(before) == len(after) and all(map(operator.is_, before, after)) else after


def inlined(jaxpr: Any, constants: Sequence[Any], is_call: Callable[[Any], bool] = never) -> ClosedJaxpr:
    """Returns a program with the functions that it calls written inline, also in its loops and branches."""
    values = [variable.aval for variable in jaxpr.invars]
    program = jax.make_jaxpr(lambda *values: evaluate_inlined(jaxpr, constants, values, is_call))(*values)

    def in_body(body: Any) -> Any:
        changed = inlined(body, (), is_call)
        return body if changed.consts else changed.jaxpr

    names = (*REMATERIALIZATIONS, *LOOPS_AND_BRANCHES)
    equations = [with_programs(e, in_body) if e.primitive.name in names else e for e in program.jaxpr.eqns]
    return program.replace(jaxpr=program.jaxpr.replace(eqns=equations))


def live(jaxpr: Jaxpr) -> Jaxpr:
    """Returns an open jaxpr without what none of its results needs; its inputs stay."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def with_gradients(jaxpr: Jaxpr, trained: Collection[Any]) -> set[Any]:
    """Returns the variables of an open jaxpr that have gradients: these, and numbers that are computed from them."""
    found = {*trained}
    for equation in jaxpr.eqns:
        if equation.primitive.name != "stop_gradient" and not found.isdisjoint(variables_of(equation)):
            dtypes = {variable: getattr(variable.aval, "dtype", None) for variable in equation.outvars}
            found.update(variable for variable, dtype in dtypes.items() if dtype and jnp.issubdtype(dtype, jnp.inexact))
    return found


def variables_of(equation: Any) -> list[Any]:
    """Returns the operands of an equation that are no literals."""
    return [*not_literal(equation.invars)]


def not_literal(variables: Iterable[Any]) -> Iterator[Any]:
    return (each for each in variables if not isinstance(each, Literal))


def shape_of(variable: Any) -> Sequence[int]:
    """Returns the shape of a variable or literal; () for a value that is no array, such as a token."""
    return getattr(variable.aval, "shape", ())


def scope_of(equation: Any) -> str:
    """Returns the name of the layer that an equation is computed in, such as "model/dense"; "" if it is in none."""
    # The scope of a gradient is "transpose(jvp(layer))", that of an einsum ends in its subscripts.
    scope = re.sub(r"\w+\(|\)", "", str(equation.source_info.name_stack))
    return "/".join(part for part in scope.split("/") if part and "->" not in part)


def all_equations(program: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, open or closed, and of its inner programs."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for inner in inner_jaxprs(equation.params):
            yield from all_equations(inner)


def equations_in_place_of(equation: Any, function: Callable, operands: Sequence[Any] | None = None) -> Sequence[Any]:
    """Returns equations that compute the results of another one as a function of operands does, by default of its own.

    Operands are variables that are computed before the equation, or literals.
    """
    operands = list(equation.invars if operands is None else operands)
    equations, results = equations_of(function, operands, equation.source_info)
    pairs = zip(results, equation.outvars, strict=True)
    names: dict[Any, Any] = {inner: outer for inner, outer in pairs if type(outer).__name__ != "DropVar"}
    return [renamed(each, names) for each in equations]


def equations_of(function: Callable, operands: Sequence[Any], source_info: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns equations that compute a function of operands, which are variables or literals, and its results."""
    shapes = [variable.aval for variable in operands]
    traced = jax.make_jaxpr(function)(*shapes)
    computed = {id(variable) for inner in traced.jaxpr.eqns for variable in inner.outvars}
    results = set(map(id, traced.jaxpr.outvars))
    if traced.consts or len(results) < len(traced.jaxpr.outvars) or not results <= computed:
        traced = jax.make_jaxpr(jax.jit(function))(*shapes)  # one equation, a call
    names = dict(zip(traced.jaxpr.invars, operands, strict=True))
    return [renamed(each, names, source_info) for each in traced.jaxpr.eqns], traced.jaxpr.outvars


def renamed(equation: Any, names: Mapping[Any, Any], source_info: Any = None) -> Any:
    """Returns an equation of other variables."""
    invars, outvars = (
        [each if isinstance(each, Literal) else names.get(each, each) for each in variables]
        for variables in (equation.invars, equation.outvars)
    )
    return equation.replace(invars=invars, outvars=outvars, source_info=source_info or equation.source_info)


class Values:
    """The values of the variables of an open jaxpr, as far as they are known."""

    def __init__(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]):
        self._jaxpr = jaxpr
        self.known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

    def read(self, variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else self.known[variable]

    def evaluate(self, equations: Sequence[Any]) -> None:
        if not equations:
            return
        outputs = [v for equation in equations for v in equation.outvars if type(v).__name__ != "DropVar"]
        used = dict.fromkeys(v for equation in equations for v in variables_of(equation))
        inputs = [variable for variable in used if variable in self.known]
        part = self._jaxpr.replace(eqns=list(equations), invars=inputs, outvars=outputs, constvars=[])
        self.known.update(zip(outputs, as_function(part)(*map(self.read, inputs)), strict=True))

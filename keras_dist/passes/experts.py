"""Mixtures of experts: computed for the experts that tokens choose only, on each device for its tokens."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, Var  # pyright: ignore[reportPrivateImportUsage]

from keras_dist.mixtures.choices import number_of_experts
from keras_dist.mixtures.recognition import DENSE, MixtureCall, find_mixtures
from keras_dist.passes.flattened_tokens import flattened_per_device
from keras_dist.passes.sparse_mixture import SparseMixture
from keras_dist.passes.step_program import StepProgram
from keras_dist.passes.weight_reads import Scope
from keras_dist.tracing.jaxpr_evaluation import (
    all_equations,
    equations_in_place_of,
    inlined,
    live,
    never,
    scope_of,
    shape_of,
    unless_same,
    with_programs,
)
from keras_dist.tracing.primitives import LOOPS_AND_BRANCHES, REMATERIALIZATIONS


def may_have_experts(program: ClosedJaxpr) -> bool:
    """Whether a program chooses among as many as there are experts in an input, or in an operand of a product."""
    sizes = {number_of_experts(equation) for equation in all_equations(program)} - {None}
    if not sizes:
        return False
    products = (equation for equation in all_equations(program) if equation.primitive.name == "dot_general")
    operands = itertools.chain.from_iterable(equation.invars for equation in products)
    shapes = map(shape_of, (*program.jaxpr.invars, *operands))
    return any(len(shape) > 2 and not sizes.isdisjoint(shape) for shape in shapes)


def experts(program: StepProgram) -> ClosedJaxpr:
    """Computes mixtures of experts for the pairs of a token and an expert that it chooses."""
    traced = program.jaxpr
    sizes = {number_of_experts(equation) for equation in all_equations(traced)}

    def has_weights(equation: Any) -> bool:
        return any(len(shape) == 3 and shape[0] in sizes for shape in map(shape_of, equation.invars))

    def is_in_parts(equation: Any) -> bool:
        """Whether a part is computed again that has weights of experts or their router, and not both.

        With `reshard_after_forward` each layer is such a part, for which its weights are gathered again.
        """
        if equation.primitive.name not in REMATERIALIZATIONS:
            return False
        chooses = any(number_of_experts(each) is not None for each in all_equations(equation.params["jaxpr"]))
        return has_weights(equation) != chooses

    regathers = any(is_in_parts(each) and has_weights(each) for each in all_equations(traced))
    for is_call in (is_in_parts, never) if regathers else (never,):
        program.mixtures.clear()
        whole = inlined(traced.jaxpr, traced.consts, is_call)
        rewriting = _Rewriting(replace(program, jaxpr=whole), is_call is is_in_parts)
        changed = rewriting.changed(whole.jaxpr, whole.consts)
        if changed is not None:
            return whole.replace(jaxpr=changed)
    return traced


class _Rewriting:
    """A program in which mixtures of experts are computed for chosen experts."""

    def __init__(self, program: StepProgram, regathers: bool):
        self._program, self._regathers = program, regathers
        self._gathers: dict[int, Callable[[Any], Any]] = {}  # what weights of experts are gathered by instead

    def changed(self, jaxpr: Any, constants: Sequence[Any]) -> Any:
        """Returns the program with its mixtures computed for chosen experts; None if it has none."""
        jaxpr = live(jaxpr)
        return self._changed(jaxpr, constants, Scope(jaxpr, jaxpr.invars[: self._program.num_trained]), [])

    def _changed(self, jaxpr: Any, constants: Sequence[Any], scope: Scope, figures: list[Any] | None) -> Any:
        """Returns a part of the program, with its figures as further outputs, which are added to a list; or None."""
        program = self._program
        mixtures, refused = find_mixtures(jaxpr, constants)
        for equation, num_experts, num_chosen, reason in refused:
            program.mixtures.append(MixtureCall(scope_of(equation), DENSE, reason, num_experts, num_chosen, 0, 0.0))
        if mixtures and program.placer.sequence_axes:
            jaxpr = flattened_per_device(jaxpr, program, [mixture.variables_of_tokens for mixture in mixtures])
        by_equation = {id(mixture.equations[-1]): mixture for mixture in mixtures}
        equations: list[Any] = []
        for equation in jaxpr.eqns:
            if (mixture := by_equation.get(id(equation))) is not None:
                sparse = SparseMixture(program, mixture, scope, self._regathers)
                equations += sparse.equations()
                self._gathers |= {id(gather): function for gather, function in sparse.gathers_of_others()}
                if program.figures is not None and figures is not None:
                    computing, values = sparse.figures(program.figures)
                    equations += computing
                    figures += values
            elif equation.primitive.name in REMATERIALIZATIONS:
                equations.append(self._part_changed(equation, scope, figures))
            elif equation.primitive.name in LOOPS_AND_BRANCHES:
                equations.append(with_programs(equation, lambda body: self._body_changed(body, scope, {}, None)))
            else:
                equations.append(equation)
        equations = unless_same(jaxpr.eqns, equations)
        if equations is jaxpr.eqns:
            return None
        equations = [each for one in equations for each in self._with_gather(one)]
        return live(jaxpr.replace(eqns=equations, outvars=[*jaxpr.outvars, *(figures or [])]))

    def _body_changed(self, body: Any, outer: Scope, inputs: Mapping[Any, Any], figures: list[Any] | None) -> Any:
        jaxpr = live(body)
        trained = [each for each, v in inputs.items() if not isinstance(v, Literal) and v in outer.trained]
        found = self._changed(jaxpr, (), Scope(jaxpr, trained, outer, inputs), figures)
        return body if found is None else found

    def _part_changed(self, equation: Any, scope: Scope, figures: list[Any] | None) -> Any:
        """Returns a part that is computed again, which may return figures beside its results."""
        found: list[Any] | None = None if figures is None else []
        inputs = dict(zip(equation.params["jaxpr"].invars, equation.invars, strict=True))
        changed = with_programs(equation, lambda body: self._body_changed(body, scope, inputs, found))
        if figures is None or not found:
            return changed
        results = [Var(each.aval) for each in found]
        figures += results
        return changed.replace(outvars=[*changed.outvars, *results])

    def _with_gather(self, equation: Any) -> Sequence[Any]:
        function = self._gathers.get(id(equation))
        return [equation] if function is None else equations_in_place_of(equation, function)

"""Mixtures of experts: computed for the experts that tokens choose only, on each device for its tokens."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec

from keras_dist.mixtures.choices import number_of_experts
from keras_dist.mixtures.grouped_products import ChosenForm, choose_form, grouped_product
from keras_dist.mixtures.recognition import DENSE, Mixture, MixtureCall, find_mixtures
from keras_dist.mixtures.rows import compute_mixture, tokens_first
from keras_dist.passes.step_program import StepProgram
from keras_dist.sharding.per_device import call_per_device
from keras_dist.tracing.jaxpr_evaluation import (
    all_equations,
    as_function,
    equations_in_place_of,
    inlined,
    never,
    scope_of,
    unless_same,
    with_programs,
)
from keras_dist.tracing.primitives import LOOPS_AND_BRANCHES, REMATERIALIZATIONS, UNCHANGED


def may_have_experts(program: ClosedJaxpr) -> bool:
    """Whether a program chooses among as many as there are experts in an input, or in an operand of a product."""
    sizes = {number_of_experts(equation) for equation in all_equations(program)} - {None}
    if not sizes:
        return False
    products = (equation for equation in all_equations(program) if equation.primitive.name == "dot_general")
    operands = itertools.chain.from_iterable(equation.invars for equation in products)
    shapes = (getattr(variable.aval, "shape", ()) for variable in (*program.jaxpr.invars, *operands))
    return any(len(shape) > 2 and not sizes.isdisjoint(shape) for shape in shapes)


def experts(program: StepProgram) -> ClosedJaxpr:
    """Computes mixtures of experts for the pairs of a token and an expert that it chooses."""
    traced = program.jaxpr
    sizes = {number_of_experts(equation) for equation in all_equations(traced)}

    def has_weights(equation: Any) -> bool:
        return any(len(shape) == 3 and shape[0] in sizes for shape in map(_shape, equation.invars))

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
        changed = _changed(replace(program, jaxpr=whole), whole.jaxpr, whole.consts, is_call is is_in_parts)
        if changed is not None:
            return whole.replace(jaxpr=changed)
    return traced


def _shape(variable: Any) -> Sequence[int]:
    return getattr(variable.aval, "shape", ())


def _changed(program: StepProgram, jaxpr: Any, constants: Sequence[Any], regathers: bool) -> Any:
    """Returns a part of a program with its mixtures computed for chosen experts; None if it has none."""
    jaxpr = _live(jaxpr)
    mixtures, refused = find_mixtures(jaxpr, constants)
    for equation, num_experts, num_chosen, reason in refused:
        program.mixtures.append(MixtureCall(scope_of(equation), DENSE, reason, num_experts, num_chosen, 0, 0.0))
    by_equation = {id(mixture.equations[-1]): mixture for mixture in mixtures}

    def in_body(body: Any) -> Any:
        return body if (found := _changed(replace(program, choices=None), body, (), regathers)) is None else found

    chosen: list[Any] = []
    equations: list[Any] = []
    for equation in jaxpr.eqns:
        if (mixture := by_equation.get(id(equation))) is not None:
            sparse = _SparseMixture(program, mixture, jaxpr if regathers else None)
            if not (is_dense := sparse.is_dense()) and program.choices is not None:
                program.choices.append(mixture.choice)
                chosen.append(mixture.choice.indices)
            equations += [equation] if is_dense else sparse.equations()
        elif equation.primitive.name in (*REMATERIALIZATIONS, *LOOPS_AND_BRANCHES):
            equations.append(with_programs(equation, in_body))
        else:
            equations.append(equation)
    equations = unless_same(jaxpr.eqns, equations)
    return None if equations is jaxpr.eqns else _live(jaxpr.replace(eqns=equations, outvars=[*jaxpr.outvars, *chosen]))


def _live(jaxpr: Any) -> Any:
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


class _SparseMixture:
    """Equations in place of the sum over experts of a mixture."""

    def __init__(self, program: StepProgram, mixture: Mixture, regathered_in: Any):
        self._program, self._mixture, self._regathered_in = program, mixture, regathered_in
        self._output = mixture.equations[-1].outvars[0]
        self._forms: set[ChosenForm] = set()

    def is_dense(self) -> bool:
        """Whether the layouts of operands do not allow to compute it for chosen experts; reports why."""
        mixture, axes_of = self._mixture, self._program.axes_of
        weights = [v for v in mixture.operands if mixture.places[v].tokens is None and mixture.num_tokens > 1]
        sharded = dict.fromkeys(itertools.chain.from_iterable(itertools.chain.from_iterable(map(axes_of, weights))))
        if sharded:
            self._report(ChosenForm(DENSE, f"weights are sharded over {', '.join(map(repr, sharded))}"), 0, 0.0)
        return bool(sharded)

    def equations(self) -> Sequence[Any]:
        mixture = self._mixture
        operands = [*mixture.operands, mixture.choice.indices]
        function = self._of_one_token if mixture.num_tokens == 1 else self._per_device
        if self._regathered_in is not None and mixture.num_tokens > 1:
            function, operands = self._with_weights_gathered_again(operands)
        found = equations_in_place_of(mixture.equations[-1], function, operands)
        # Of several forms, one that has a reason is reported.
        forms = sorted(self._forms, key=lambda form: form.reason is None) or [ChosenForm("chosen weights", None)]
        self._report(forms[0], self._num_rows, self._flops)
        return found

    def _report(self, form: ChosenForm, rows: int, flops: float) -> None:
        choice, layer = self._mixture.choice, scope_of(self._mixture.equations[-1])
        self._program.mixtures.append(MixtureCall(layer, *form, choice.num_experts, choice.num_chosen, rows, flops))

    def _with_weights_gathered_again(self, operands: list[Any]) -> tuple[Callable, list[Any]]:
        """Returns the function of operands as they are before their weights are gathered, and these operands."""
        jaxpr = self._regathered_in
        producers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
        chains: dict[int, Any] = {}
        operands = list(operands)
        for number, operand in enumerate(operands[: len(self._mixture.operands)]):
            if self._mixture.places[operand].tokens is not None:
                continue
            source, chain = operand, []
            while (producer := producers.get(source)) is not None and len(producer.invars) == 1:
                if producer.primitive.name not in (*UNCHANGED, "custom_jvp_call", "convert_element_type"):
                    break
                chain.insert(0, producer)
                (source,) = producer.invars
            if chain:
                chains[number] = as_function(
                    jaxpr.replace(eqns=chain, invars=[source], outvars=[operand], constvars=[])
                )
                operands[number] = source

        def computed(*values: Any) -> Any:
            found = [chains[number](each)[0] if number in chains else each for number, each in enumerate(values)]
            return self._per_device(*found)

        def is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
            return primitive.name not in ("sharding_constraint", "custom_jvp_call")  # by which weights are gathered

        return jax.checkpoint(computed, policy=is_kept), operands

    def _of_one_token(self, *values: Any) -> Any:
        self._num_rows, self._flops = self._mixture.choice.num_chosen, 0.0
        return compute_mixture(self._mixture, self._product, values[:-1], values[-1])

    def _per_device(self, *values: Any) -> Any:
        """Computes the mixture of each device's tokens, given operands and the indices of chosen experts."""
        mixture, places = self._mixture, self._mixture.places
        sizes, axes = self._tokens()
        arguments, specs, summed = [], [], []
        names = tuple(itertools.chain.from_iterable(axes))
        for variable, value in zip(mixture.operands, values, strict=False):
            tokens = places[variable].tokens
            value = value.transpose(tokens_first(places[variable], variable))
            arguments.append(value if tokens is None else value.reshape(*sizes, *value.shape[len(tokens) :]))
            specs.append(PartitionSpec() if tokens is None else PartitionSpec(*axes))
            if jnp.issubdtype(value.dtype, jnp.inexact):  # those come first
                summed.append(names if tokens is None else ())
        indices = values[-1].reshape(*sizes, mixture.choice.num_chosen)

        def on_device(*shards: Any) -> Any:
            self._num_rows, self._flops = shards[-1].size, 0.0
            return compute_mixture(mixture, self._product, shards[:-1], shards[-1])

        spec = PartitionSpec(*axes)
        output = call_per_device(
            on_device, self._program.mesh, (*arguments, indices), (*specs, spec), spec, summed_axes=summed
        )
        order = tokens_first(places[self._output], self._output)
        output = output.reshape([self._output.aval.shape[dim] for dim in order])
        return output.transpose(sorted(range(len(order)), key=order.__getitem__))

    def _tokens(self) -> tuple[list[int], list[tuple[str, ...]]]:
        """Returns the sizes of the dims of tokens, and the axes of the mesh over which they are sharded.

        Operands may have several dims of tokens, such as batch and positions, or one.
        """
        indices, places = self._mixture.choice.indices, self._mixture.places
        dims = [dim for dim, size in enumerate(indices.aval.shape[:-1]) if size > 1]
        sizes = [indices.aval.shape[dim] for dim in dims]
        axes = [self._program.axes_of(indices)[dim] for dim in dims]
        variables = [each for each in (*self._mixture.operands, self._output) if places[each].tokens is not None]
        if any([each.aval.shape[dim] for dim in places[each].tokens or ()] != sizes for each in variables):
            return [math.prod(sizes)], axes[:1]
        return sizes, axes

    def _product(self, rows: Any, weights: Any, sizes: Any) -> Any:
        dtype = jnp.promote_types(rows.dtype, weights.dtype)
        form = choose_form(self._program.device, rows.shape[0], weights.shape, dtype)
        self._forms.add(form)
        self._flops += 2.0 * rows.shape[0] * math.prod(weights.shape[1:])
        return grouped_product(rows.astype(dtype), weights.astype(dtype), sizes, form.name)

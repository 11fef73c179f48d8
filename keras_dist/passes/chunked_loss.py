"""Losses that store no logits: a large dim of each token is computed and reduced for one chunk of tokens at a time.

Where the loss is linear in what chunks return, such as a weighted mean of the losses of tokens, its gradient for each
token is known beforehand. So the loop of the forward pass computes the gradients of weights, too, in float32, and each
product once. Otherwise the backward pass computes the chunks again.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec

from keras_dist.passes.step_program import StepProgram
from keras_dist.passes.token_chunks import as_rows, evaluate_chunk, from_rows
from keras_dist.passes.token_part import LossCall, TokenPart, find_token_parts
from keras_dist.sharding.per_device import on_devices, pad_dim, pad_with_first
from keras_dist.tracing.jaxpr_evaluation import (
    Values,
    all_equations,
    inlined,
    live,
    scope_of,
    shape_of,
    variables_of,
    with_gradients,
)
from keras_dist.tracing.linearity import is_linear
from keras_dist.tracing.primitives import REMATERIALIZATIONS


def may_have_losses(program: ClosedJaxpr) -> bool:
    return any(map(_is_product, all_equations(program)))


def chunked_loss(program: StepProgram) -> ClosedJaxpr:
    """Computes losses and metrics of a large dim, such as logits, for `loss_chunk` tokens of a device at a time."""
    traced = program.jaxpr
    largest = max((each.outvars[0].aval.size for each in all_equations(traced) if _is_product(each)), default=0)

    def has_largest(equation: Any) -> bool:
        """Whether an equation is a layer that is computed again, since it gathers its weights again for example."""
        if equation.primitive.name not in REMATERIALIZATIONS:
            return False
        products = [each for each in all_equations(equation.params["jaxpr"]) if _is_product(each)]
        return [each.outvars[0].aval.size for each in products] == [largest]

    improved = replace(program, jaxpr=inlined(traced.jaxpr, traced.consts, has_largest))
    is_changed = False
    while True:
        parts, refused = find_token_parts(improved.jaxpr.jaxpr, improved.jaxpr.jaxpr.invars[program.num_state :])
        chunks = [_Chunks(improved, part) for part in parts]
        found = next((each for each in chunks if each.call.chunk is not None), None)
        if found is None:
            break
        program.losses.append(found.call)
        improved, is_changed = replace(improved, jaxpr=_with_chunks(improved, found)), True
    program.losses.extend(each.call for each in chunks)
    if not program.losses:
        for product, reason in refused:
            program.losses.append(LossCall(scope_of(product), product.outvars[0].aval.size, 0, None, 0, reason))
    return improved.jaxpr if is_changed else traced


def _is_product(equation: Any) -> bool:
    return equation.primitive.name == "dot_general"


def _with_chunks(program: StepProgram, chunks: "_Chunks") -> ClosedJaxpr:
    """Returns a program in which a part of it is computed in chunks."""
    jaxpr, constants = program.jaxpr.jaxpr, program.jaxpr.consts
    before, after = _split(jaxpr.eqns, chunks.part.product.outvars)
    made = set(map(id, chunks.part.equations))

    def computed(*inputs: Any) -> list[Any]:
        values = Values(jaxpr, constants, inputs)
        values.evaluate([each for each in before if each is not chunks.part.product])
        term = chunks.evaluate(values)
        values.evaluate([each for each in after if id(each) not in made])
        loss, *others = (values.read(variable) for variable in jaxpr.outvars)
        return [loss if term is None else loss + term, *others]

    changed = jax.make_jaxpr(computed)(*(variable.aval for variable in jaxpr.invars))
    return changed.replace(jaxpr=live(changed.jaxpr))


def _split(equations: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the equations that do not depend on variables, and those that do."""
    dependent, groups = set(variables), ([], [])
    for equation in equations:
        depends = not dependent.isdisjoint(variables_of(equation))
        groups[depends].append(equation)
        if depends:
            dependent.update(equation.outvars)
    return groups


class _Chunks:
    """A part of a program, which is computed for one chunk of the tokens after the other."""

    def __init__(self, program: StepProgram, part: TokenPart):
        self.part, self._program = part, program
        jaxpr, output = program.jaxpr.jaxpr, part.product.outvars[0]
        known_axes = program.axes_of(output)
        self._axes = [known_axes[dim] for dim in part.places[output]]
        self._shards = list(map(program.num_shards, self._axes))
        tokens = math.prod(-(-size // count) for size, count in zip(part.tokens, self._shards, strict=True))
        self._num_chunks = -(-tokens // (program.loss_chunk or tokens))
        _, after = _split(jaxpr.eqns, part.results)
        made = {id(equation) for equation in part.equations}
        after = [equation for equation in after if id(equation) not in made]
        self._tail = _LinearTail(jaxpr, after, part.results, program.num_trained)
        trained = with_gradients(jaxpr, jaxpr.invars[: program.num_trained]) if self._tail.has_gradient else ()
        self._trained = [number for number, variable in enumerate(part.operands) if variable in trained]
        self._rounded = {number for number in self._trained if self._is_rounded(part.operands[number])}
        is_again, size = self._tail.reason is not None, math.prod(part.inner_shape(output))
        chunk = -(-tokens // self._num_chunks) if self._num_chunks > 1 else None
        reason = self._tail.reason if chunk else f"a device has {tokens} tokens"
        self.call = LossCall(scope_of(part.product), size, tokens, chunk, 4 if is_again else 3, reason)

    def evaluate(self, values: Values) -> Any:
        """Computes the results, given the operands; returns a term of 0 with the gradient of the loss, or None."""
        part, operands = self.part, {}
        for number, variable in enumerate(part.operands):
            value = values.read(variable)
            operands[number] = self._rows(variable, value, pad_with_first) if part.places[variable] else value
        if not self._trained:
            term, results = None, self._loop(operands)[0]
        elif self._tail.reason is None:
            cotangents = [self._rows(v, g, pad_dim) for v, g in self._tail.cotangents(values)]
            term, results = self._with_known_gradients(operands, cotangents)
            results = jax.lax.stop_gradient(results)
        else:
            term, results = None, self._computed_again(operands)
        sizes = tuple(map(slice, part.tokens))
        for variable, result in zip(part.results, results, strict=True):
            values.known[variable] = from_rows(part, variable, result[sizes], shape_of(variable))
        return term

    def _rows(self, variable: Any, value: Any, pad: Callable) -> jax.Array:
        """Returns a value with the dims of tokens first, in shards of equal sizes."""
        rows = as_rows(self.part, variable, value, self.part.tokens)
        for dim, count in enumerate(self._shards):
            rows = pad(rows, dim, rows.shape[dim] + -rows.shape[dim] % count)
        return rows

    def _with_known_gradients(self, operands: dict[int, Any], cotangents: list[Any]) -> tuple[Any, list[Any]]:
        """Returns a term of 0, whose gradient is that of the loss, and the results."""
        # Functions of a gradient are traced later, so they must not refer to values of this trace.
        loss: Any = self._program.jaxpr.jaxpr.outvars[0].aval
        zero = partial(jnp.zeros, loss.shape, loss.dtype)

        @jax.custom_vjp
        def call(operands: dict[int, Any], cotangents: list[Any]) -> tuple[Any, list[Any]]:
            return zero(), self._loop(operands)[0]

        def forward(operands: dict[int, Any], cotangents: list[Any]) -> Any:
            results, gradients = self._loop(operands, cotangents)
            return (zero(), results), gradients

        def backward(gradients: dict[int, Any], cotangent: Any) -> Any:
            factor, _ = cotangent
            scaled = {n: each * factor.astype(each.dtype) for n, each in self._reduced(gradients).items()}
            return {number: scaled.get(number) for number in operands}, [None] * len(cotangents)

        call.defvjp(forward, backward)
        return call(operands, cotangents)

    def _computed_again(self, operands: dict[int, Any]) -> list[Any]:
        @jax.custom_vjp
        def call(operands: dict[int, Any]) -> list[Any]:
            return self._loop(operands)[0]

        def forward(operands: dict[int, Any]) -> Any:
            return call(operands), operands

        def backward(operands: dict[int, Any], cotangents: list[Any]) -> Any:
            own = [each for v, each in zip(self.part.results, cotangents, strict=True) if v in self._tail.results]
            gradients = self._reduced(self._loop(operands, own)[1])
            return ({number: gradients.get(number) for number in operands},)

        call.defvjp(forward, backward)
        return call(operands)

    def _reduced(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Returns gradients of operands, those of shared ones added up over devices. That sum can be postponed."""
        return {
            number: jax.lax.reduce_sum(each, (0,)) if self._all_axes and not self._has_tokens(number) else each
            for number, each in gradients.items()
        }

    def _is_rounded(self, variable: Any) -> bool:
        """Whether the gradient of a chunk would be rounded to the dtype of an operand, which the product alone uses."""
        product = self.part.product
        if self.part.places[variable] or [e for e in self.part.equations if variable in e.invars] != [product]:
            return False
        avals: list[Any] = [each.aval for each in (*product.invars, *product.outvars)]
        dtype, *others = {jnp.dtype(aval.dtype) for aval in avals}
        return not others and dtype != jnp.promote_types(dtype, "float32")

    def _has_tokens(self, number: int) -> bool:
        return bool(self.part.places[self.part.operands[number]])

    @property
    def _all_axes(self) -> tuple[str, ...]:
        return (*itertools.chain.from_iterable(self._axes),)

    def _loop(self, operands: dict[int, Any], cotangents: Sequence[Any] = ()) -> tuple[list[Any], dict[int, Any]]:
        """Returns the results; and, given cotangents of those that the loss depends on, the gradients of operands.

        The gradients of shared operands have one summand for each device, along a dim 0.
        """
        axes = self._all_axes
        if not axes:
            return self._loop_on_device(operands, [*cotangents])
        tokens, shared, summands = PartitionSpec(*self._axes), PartitionSpec(), PartitionSpec(axes)
        in_specs = {number: tokens if self._has_tokens(number) else shared for number in operands}
        is_given = bool(cotangents)
        out_specs = {n: tokens if self._has_tokens(n) else summands for n in self._trained if is_given}
        call = on_devices(self._loop_on_device, self._program.mesh, (in_specs, tokens), (tokens, out_specs), axes)
        return call(operands, [*cotangents])

    def _loop_on_device(self, operands: dict[int, Any], cotangents: list[Any]) -> tuple[list[Any], dict[int, Any]]:
        part, num_dims = self.part, len(self.part.tokens)
        rows = {number: value for number, value in operands.items() if self._has_tokens(number)}
        shared = {number: value for number, value in operands.items() if number not in rows}
        lead = next(iter(rows.values())).shape[:num_dims]
        num_tokens = math.prod(lead)
        size = -(-num_tokens // self._num_chunks)

        def in_chunks(pad: Callable, value: jax.Array) -> jax.Array:
            value = value.reshape(num_tokens, *value.shape[num_dims:])
            return pad(value, 0, self._num_chunks * size).reshape(self._num_chunks, size, *value.shape[1:])

        def joined(value: jax.Array) -> jax.Array:
            value = value.reshape(-1, *value.shape[2:])[:num_tokens]
            return value.reshape(*lead, *value.shape[1:])

        def compute(sums: dict[int, Any], chunk: Any) -> tuple[dict[int, Any], tuple[list[Any], dict[int, Any]]]:
            values, own_cotangents = shared | chunk[0], chunk[1]
            trained = {number: values[number] for number in self._trained if number not in self._rounded}
            totals = {number: each for number, each in sums.items() if number in self._rounded}

            def results_of(trained: dict[int, Any], totals: dict[int, Any]) -> tuple[list[Any], list[Any]]:
                by_variable = {part.operands[number]: value for number, value in (values | trained).items()}
                results = evaluate_chunk(part, by_variable, {part.operands[n]: each for n, each in totals.items()})
                own = [each for v, each in zip(part.results, results, strict=True) if v in self._tail.results]
                return own, results

            if not own_cotangents:
                return sums, (results_of(trained, {})[1], {})
            _, pull_back, results = jax.vjp(results_of, trained, totals, has_aux=True)
            gradients = dict(itertools.chain(*(each.items() for each in pull_back(own_cotangents))))
            sums = {number: each + gradients[number].astype(each.dtype) for number, each in sums.items()}
            return sums, (results, {number: each for number, each in gradients.items() if number in rows})

        chunks = jax.tree.map(partial(in_chunks, pad_with_first), rows), [in_chunks(pad_dim, g) for g in cotangents]
        summed = {number: shared[number] for number in self._trained if cotangents and number in shared}
        zeros = {n: jnp.zeros(each.shape, jnp.promote_types(each.dtype, "float32")) for n, each in summed.items()}
        sums, (results, gradients) = jax.lax.scan(compute, zeros, chunks)
        sums = {number: each.astype(summed[number].dtype) for number, each in sums.items()}
        if self._all_axes:
            sums = {number: each[None] for number, each in sums.items()}
        return jax.tree.map(joined, results), jax.tree.map(joined, gradients) | sums


class _LinearTail:
    """What is computed from the results of a part on the way to the loss."""

    def __init__(self, jaxpr: Any, after: Sequence[Any], results: Sequence[Any], num_trained: int):
        """`after`: the equations that depend on the results, in their order."""
        self._jaxpr, self.reason = jaxpr, None
        self._equations: list[Any] = []
        reached = {v for v in results if num_trained and jnp.issubdtype(v.aval.dtype, jnp.inexact)}
        dependent = {*results, *(v for equation in after for v in equation.outvars)}
        not_linear: dict[Any, str] = {}
        for equation in after:
            marked = [not isinstance(v, Literal) and v in reached for v in equation.invars]
            numbers = [v for v in equation.outvars if jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact)]
            if not any(marked) or equation.primitive.name == "stop_gradient" or not numbers:
                continue
            self._equations.append(equation)
            reached.update(numbers)
            reason = next((not_linear[v] for v in variables_of(equation) if v in not_linear), None)
            if reason is None and not _is_linear_in(equation, marked, dependent):
                reason = f"the loss is not linear in its results: {equation.primitive.name} in {scope_of(equation)}"
            if reason is not None:
                not_linear.update(dict.fromkeys(numbers, reason))
        self._loss = jaxpr.outvars[0]
        self.has_gradient = not isinstance(self._loss, Literal) and self._loss in reached
        self.reason = not_linear.get(self._loss) if self.has_gradient else None
        needed = {self._loss}
        for equation in reversed(self._equations):
            if not needed.isdisjoint(equation.outvars):
                needed.update(variables_of(equation))
        self._equations = [e for e in self._equations if not needed.isdisjoint(e.outvars)]
        self._dependent = dependent
        self.results = [v for v in results if v in reached and v in needed] if self.has_gradient else []

    def cotangents(self, values: Values) -> list[tuple[Any, Any]]:
        """Returns the results and the gradient of the loss for each, given what does not depend on results."""
        made = {v for equation in self._equations for v in equation.outvars}
        used = {v for e in self._equations for v in variables_of(e)} - made
        # Of sums with something else that depends on results, only the gradient matters.
        zeros = {v: jnp.zeros(v.aval.shape, v.aval.dtype) for v in used if v in self._dependent}
        known = {v: values.read(v) for v in used if v not in zeros}

        def loss_of(results: Sequence[Any]) -> Any:
            tail = Values(self._jaxpr.replace(constvars=[], invars=[]), (), ())
            tail.known.update(known | zeros | dict(zip(self.results, results, strict=True)))
            tail.evaluate(self._equations)
            return tail.read(self._loss)

        results = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.results]
        return [*zip(self.results, jax.grad(loss_of)(results), strict=True)]


def _is_linear_in(equation: Any, marked: Sequence[bool], dependent: set[Any]) -> bool:
    """Whether an operation is linear in its marked operands, with factors that do not depend on results of the part."""
    name = equation.primitive.name
    if name in ("add", "sub", "add_any"):
        return True
    others = (v for v, is_marked in zip(equation.invars, marked, strict=True) if not is_marked)
    if any(not isinstance(v, Literal) and v in dependent for v in others):
        return False
    if name == "dot_general":
        return sum(marked) == 1
    return not marked[0] if name == "select_n" else is_linear(equation, marked)

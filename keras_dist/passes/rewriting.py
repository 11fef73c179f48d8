"""How a pass changes the program of a step: it replaces operations by functions of the same operands.

A pass is a function with a name. It is passed an operation of the program, an equation of its jaxpr, and the program,
and returns what computes the operation's outputs in its place, or None to leave it as it is. Example: a pass that
computes sines in float32.

    def sines_in_float32(equation, program):
        if equation.primitive.name != "sin" or equation.outvars[0].aval.dtype != "bfloat16":
            return None
        return lambda sine, operand: sine(operand.astype("float32")).astype("bfloat16")

A pass may also return equations that take the place of the operation. They can have further results, which what it
returns for later operations uses.

`registry.py` lists the passes. `rewritten` asks them about each operation, also about those in loops, branches and
functions that are called. If no pass replaces anything, the program stays the same object.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]

from keras_dist.passes.step_program import StepProgram
from keras_dist.tracing.jaxpr_evaluation import bind, equations_in_place_of, scope_of, with_equations

Pass = Callable[[Any, StepProgram], Callable | Sequence[Any] | None]


class PassError(ValueError):
    """A pass could not replace an operation of a step."""


def rewritten(program: StepProgram, passes: Sequence[Pass]) -> ClosedJaxpr:
    """Returns a program with the operations that passes replace; of several passes, the first one that does."""

    if not passes:
        return program.jaxpr

    def replaced(equation: Any) -> Sequence[Any] | None:
        return next((found for each in passes if (found := _replaced(program, equation, each)) is not None), None)

    return with_equations(program.jaxpr, replaced)


_WITH_GRADIENTS_OF_THEIR_OWN = ("gather", "sort", "reduce_window_max", "reduce_window_min")
"""Operations whose gradients are computed by others, about which passes are to be asked."""


def rewritten_before_gradients(program: StepProgram, passes: Sequence[Pass]) -> ClosedJaxpr:
    """Rewrites a program that is differentiated later, and asks the passes about gradients of operations, too."""

    def gradients(equation: Any, program: StepProgram) -> Callable | None:
        if equation.primitive.name not in _WITH_GRADIENTS_OF_THEIR_OWN:
            return None
        operands = [variable.aval for variable in equation.invars]
        operation = partial(bind, program.jaxpr.jaxpr, equation)

        def pull_back(cotangents: Any, *operands: Any) -> Any:
            gradients = jax.vjp(operation, *operands)[1](cotangents)
            return [each for each in gradients if each.dtype != jax.dtypes.float0]

        cotangents = jax.tree.map(_cotangent, jax.eval_shape(operation, *operands))
        traced = jax.make_jaxpr(pull_back)(cotangents, *operands)
        unknown = [()] * len(traced.in_avals)
        unknown_program = StepProgram(traced, program.placer, program.row_axes, unknown)
        changed = rewritten(unknown_program, passes)
        if changed is traced:
            return None

        def backward(operands: Any, cotangents: Any) -> Any:
            gradients = iter(jaxpr_as_fun(changed)(*jax.tree.leaves((cotangents, operands))))
            return tuple(next(gradients) if jnp.issubdtype(each.dtype, jnp.inexact) else None for each in operands)

        computed = jax.custom_vjp(operation)
        computed.defvjp(lambda *operands: (computed(*operands), operands), backward)
        return lambda _, *operands: computed(*operands)

    return rewritten(program, [*passes, gradients]) if passes else program.jaxpr


def _cotangent(output: Any) -> Any:
    dtype = output.dtype if jnp.issubdtype(output.dtype, jnp.inexact) else jax.dtypes.float0
    return jax.ShapeDtypeStruct(output.shape, dtype)


def _replaced(program: StepProgram, equation: Any, by: Pass) -> Sequence[Any] | None:
    """Returns equations that compute what a pass returns for an operation; None if it leaves the operation as it is."""
    try:
        if (function := by(equation, program)) is None:
            return None
        if not callable(function):
            return function
        operation = partial(bind, program.jaxpr.jaxpr, equation)
        return equations_in_place_of(equation, partial(function, operation))
    except PassError:  # of a pass that was asked about the gradients of the operation
        raise
    except Exception as error:
        name = by.__name__
        layer = scope_of(equation) or "the step"
        operands = ", ".join(str(variable.aval) for variable in equation.invars)
        raise PassError(
            f"The pass {name!r} cannot replace {equation.primitive.name} of {operands} in {layer}: "
            f"{type(error).__name__}: {error}. StepOptions(without_passes={name!r}) leaves it out."
        ) from error

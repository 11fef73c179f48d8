"""Gradients of products of two activations, as in gated layers (SwiGLU, GeGLU): XLA:GPU computes both in one kernel.

A gated layer computes `(activation(gate) * up) @ down`. In the backward pass, the product with `down` gives a gradient
that is multiplied with `up` and with `activation(gate)`. XLA:GPU makes a kernel of each, and both read this gradient
and the gate, because it does not fuse the users of a matrix multiplication. Behind a barrier they are users of the
barrier, and become one kernel. With widths of 2,048 and 8,192 the layer then moves 9% fewer bytes, forward and
backward.

Both results of the kernel are in memory at once. On one device that takes none that a step has not anyway. Where XLA
delays a gradient that devices reduce, it does (7% more temporaries on 8 H100s, 15% with `remat="full"`), so the pass is
for one device.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from jax.lax import optimization_barrier

from keras_dist.passes.step_program import StepProgram
from keras_dist.tracing.jaxpr_evaluation import inner_jaxprs, variables_of

_PASSED_ON_BY = "transpose", "reshape"


def gates(equation: Any, program: StepProgram) -> Callable | None:
    """Puts a barrier behind matrix multiplications whose result is multiplied with two others, on one GPU."""
    if (
        program.mesh.size > 1
        or program.device.platform != "gpu"
        or equation.primitive.name not in ("dot_general", *_PASSED_ON_BY)
    ):
        return None
    if equation.outvars[0] not in program.found(_multiplied_twice):
        return None
    return lambda operation, *operands: optimization_barrier(operation(*operands))


def _multiplied_twice(jaxpr: Any) -> set[Any]:
    """Returns results of matrix multiplications, transposed or not, whose only users multiply them with earlier values.

    The gate's and the other product of the forward pass have two such users, too, one with a later value: the gradient.
    """
    users, found = defaultdict(list), set()
    for equation in jaxpr.eqns:
        for inner in inner_jaxprs(equation.params):
            found |= _multiplied_twice(inner)
        for variable in variables_of(equation):
            users[variable].append(equation)
    known, products = {*jaxpr.constvars, *jaxpr.invars}, set()
    for equation in jaxpr.eqns:
        result = equation.outvars[0] if equation.outvars else None
        known.update(equation.outvars)
        is_moved = equation.primitive.name in _PASSED_ON_BY and not products.isdisjoint(equation.invars[:1])
        if equation.primitive.name != "dot_general" and not is_moved:
            continue
        products.add(result)
        are_multiplications = [each.primitive.name for each in users[result]] == ["mul", "mul"]
        operands = [variable for each in users[result] for variable in variables_of(each)]
        if are_multiplications and result not in jaxpr.outvars and known.issuperset(operands):
            found.add(result)
    return found

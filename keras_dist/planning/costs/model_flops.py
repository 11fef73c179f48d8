"""FLOP of a model's step, counted before compilation."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from keras_dist.attention.attention import AttentionCall
from keras_dist.attention.sharded import KERNEL_SCOPE
from keras_dist.layout.tensor_layout import axis_names
from keras_dist.mixtures.grouped_products import grouped_product_flops
from keras_dist.mixtures.rounds import EXTRA_ROUNDS
from keras_dist.planning.hlo.instruction_costs import taps
from keras_dist.planning.hlo.kernel_costs import lstm_flops
from keras_dist.steps.step_state import Call
from keras_dist.tracing.jaxpr_evaluation import all_equations, inner_jaxprs
from keras_dist.tracing.primitives import ALL_CALLS


def count_model_flops(jaxpr: Jaxpr) -> float | None:
    """Counts the FLOP, 2 per multiply-add, of a function's dots and convolutions, on unsharded arrays.

    Operations whose results are not used count nothing. An operation that is repeated on the same values counts once,
    so that a model that recomputes activations in its backward pass (rematerialization) has the same FLOP as one that
    keeps them. The body of a scan counts once per iteration, that of a `jax.shard_map` once for each shard, and of
    several branches the most expensive one. Fused attention kernels count nothing, and of grouped products the rows
    count that they are passed. None if a loop with an unknown trip count has matrix multiplications.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B.
    """
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    flops, _ = _Counter().count(used)
    return None if math.isnan(flops) else flops


def count_step_flops(jaxpr: Jaxpr, calls: Iterable[Call], step: str) -> float | None:
    """Counts the FLOP of a traced step as `count_model_flops` does, and those of attention that kernels compute.

    `calls` are those that were recorded while the step was traced.
    """
    flops = count_model_flops(jaxpr)
    if flops is None:
        return None
    # The backward pass of a matrix multiplication is two of the same size.
    return flops + sum(call.flops for call in calls if isinstance(call, AttentionCall)) * (3 if step == "train" else 1)


def main_dtype(jaxpr: Jaxpr) -> str | None:
    """Returns the dtype of the operands with which most FLOP of dots and convolutions are computed, None without any.

    Bodies of loops count once.
    """
    flops: defaultdict[str, float] = defaultdict(float)
    for equation in all_equations(jaxpr):
        if equation.primitive.name in _FLOPS:
            operand: Any = equation.invars[0].aval
            flops[str(operand.dtype)] += _FLOPS[equation.primitive.name](equation)
    return max(flops, key=lambda dtype: flops[dtype]) if flops else None


class _Counter:
    """Numbers values such that the same operation on the same values gets the same numbers (value numbering)."""

    def __init__(self):
        self.numbers = itertools.count()
        self.known: dict[Any, list[int]] = {}

    def count(self, jaxpr: Jaxpr, inputs: Sequence[int] = ()) -> tuple[float, list[int]]:
        """Returns the FLOP of operations not seen before, and the numbers of the results.

        `inputs` are the numbers of the last variables; the others get new ones.
        """
        variables = (*jaxpr.constvars, *jaxpr.invars)
        others = [next(self.numbers) for _ in range(len(variables) - len(inputs))]
        values = dict(zip(variables, [*others, *inputs], strict=True))
        total = 0.0
        for equation in jaxpr.eqns:
            operands = [self._number(each, values) for each in equation.invars]
            flops, results = self._count_equation(equation, operands)
            total += flops
            values.update(zip(equation.outvars, results, strict=True))
        return total, [self._number(each, values) for each in jaxpr.outvars]

    def _number(self, value: Any, values: dict[Any, int]) -> int:
        if not isinstance(value, Literal):
            return values[value]
        return self._known_results(("literal", str(value.val), str(value.aval)), 1)[0]

    def _known_results(self, key: Any, count: int) -> list[int]:
        if key not in self.known:
            self.known[key] = [next(self.numbers) for _ in range(count)]
        return self.known[key]

    def _count_equation(self, equation: Any, operands: list[int]) -> tuple[float, list[int]]:
        name, inner = equation.primitive.name, inner_jaxprs(equation.params)
        if name == "pallas_call" or KERNEL_SCOPE in str(equation.source_info.name_stack):
            estimate = equation.params.get("cost_estimate")
            return float(estimate.flops) if estimate else 0.0, [next(self.numbers) for _ in equation.outvars]
        if (flops := grouped_product_flops(equation)) is not None:
            key = equation.params["name"], *operands
            is_new = key not in self.known
            return flops * is_new, self._known_results(key, len(equation.outvars))
        if name in ALL_CALLS and inner:
            return self.count(inner[0], operands)
        if name in ("rnn_fwd", "rnn_bwd"):  # cuDNN's LSTM
            arguments = equation.invars[3:5] if name == "rnn_bwd" else equation.invars[:2]
            flops = lstm_flops(*(each.aval.shape for each in arguments), is_backward=name == "rnn_bwd")
            return flops, [next(self.numbers) for _ in equation.outvars]
        if inner:
            # A loop's body is counted separately, because its values differ in every iteration.
            flops = [_Counter().count(each)[0] for each in inner]
            times = 1
            if name == "scan":
                times = equation.params["length"]
            elif name == "while" and any(flops):
                times = 0 if EXTRA_ROUNDS in str(equation.source_info.name_stack) else math.nan
            elif name == "shard_map":  # its body has the shapes of one device, and some repeat the work of others
                specs = (*equation.params["in_specs"], *equation.params["out_specs"])
                axes = {axis for spec in specs for axis in axis_names(spec)}
                times = math.prod(equation.params["mesh"].shape[axis] for axis in axes)
            total = times * (max(flops) if name == "cond" else sum(flops))
            return total, [next(self.numbers) for _ in equation.outvars]
        key = name, tuple(operands), tuple((key, str(value)) for key, value in sorted(equation.params.items()))
        is_new = key not in self.known
        results = self._known_results(key, len(equation.outvars))
        return (_FLOPS[name](equation) if is_new and name in _FLOPS else 0.0), results


def _dot_flops(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def _convolution_flops(equation: Any) -> float:
    """Counts products with elements of the image, not with padding, or with zeros that a dilation inserts."""
    image, kernel = (each.aval.shape for each in equation.invars)
    result, params = equation.outvars[0].aval.shape, equation.params
    dims = _, kernel_dims, result_dims = params["dimension_numbers"]
    shapes = zip((image, kernel, result), dims, strict=True)
    sizes = ([shape[dim] for dim in spec[2:]] for shape, spec in shapes)
    pads = [low for low, _ in params["padding"]]
    options = params["window_strides"], pads, params["lhs_dilation"], params["rhs_dilation"]
    # Each element of the result is a sum over the input features that the kernel has: those of a group.
    outputs = result[result_dims[0]] * result[result_dims[1]] * kernel[kernel_dims[1]]
    return 2.0 * outputs * math.prod(map(taps, *sizes, *options))


_FLOPS = {"dot_general": _dot_flops, "conv_general_dilated": _convolution_flops}

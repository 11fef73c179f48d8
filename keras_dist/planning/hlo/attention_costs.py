"""FLOP of fused attention kernels, of which the compiler knows only that they are called."""

import math
import re

from keras_dist.planning.hlo.parser import Computation, Instruction
from keras_dist.planning.hlo.shapes import Array
from keras_dist.strategies.attention import KERNEL_SCOPE

_FRACTION = re.compile(re.escape(KERNEL_SCOPE) + r"(\d\.\d+)")
# Matrix multiplications of all queries with all keys, whose third size is the head size of queries and keys, and those
# whose third size is that of values. A backward pass computes the logits again.
_MATMULS = {
    "splash_mha_fwd": (1, 1),
    "splash_mha_dq": (2, 1),  # logits, gradient of the weights, gradient of the queries
    "splash_mha_dkv": (2, 2),  # and gradients of keys and values
    "__cudnn$fmha": (1, 1),
    "__cudnn$fmhaBackward": (3, 2),
}


def attention_flops(computation: Computation, instruction: Instruction) -> tuple[str, float] | None:
    """Returns element type and FLOP (2 per multiply-add) of a fused attention kernel, None for anything else.

    Pairs that a causal mask or window hides do not count, although a kernel may compute some of them: its blocks are
    square. Padding counts.
    """
    target, found = instruction.target, _FRACTION.search(instruction.op_name)
    if target.startswith("__cudnn$fmha"):
        kernel = "__cudnn$fmhaBackward" if target.endswith("Backward") else "__cudnn$fmha"
    else:
        kernel = next((name for name in _MATMULS if target == "tpu_custom_call" and name in instruction.name), None)
    if kernel is None:
        return None
    shapes = (computation.operand(instruction, number).shape for number in range(len(instruction.operands)))
    operands = [shape for shape in shapes if isinstance(shape, Array) and len(shape.dims) >= 3 and "f" in shape.dtype]
    query, key, value = operands[:3]
    # (..., N, T, H) on TPUs, (..., T, N, H) on GPUs
    keys = key.dims[-3] if target.startswith("__cudnn") else key.dims[-2]
    of_heads, of_values = _MATMULS[kernel]
    size = of_heads * query.dims[-1] + of_values * value.dims[-1]
    fraction = float(found[1]) if found else 1.0
    return query.dtype, 2.0 * fraction * math.prod(query.dims[:-1]) * keys * size

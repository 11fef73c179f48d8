"""Closed forms for kernels of which the compiler knows only that they are called.

They are fused attention, cuDNN's LSTM, and grouped products in Mosaic.
"""

import math
import re
from collections.abc import Sequence

from keras_dist.attention.sharded import KERNEL_SCOPE
from keras_dist.mixtures.grouped_products import filled_rows
from keras_dist.planning.hlo.parser import Computation, Instruction
from keras_dist.planning.hlo.shapes import Array, bits, leaves

_FRACTION = re.compile(re.escape(KERNEL_SCOPE) + r"(\d\.\d+)")
# Matrix multiplications of all queries with all keys by what they add up or give: the head size of queries and keys,
# or that of values. A backward pass computes the logits again.
_MATMULS = {
    "splash_mha_fwd": (1, 1),
    "splash_mha_dq": (2, 1),  # logits, gradient of the weights, gradient of the queries
    "splash_mha_dkv": (2, 2),  # and gradients of keys and values
    "__cudnn$fmha": (1, 1),
    "__cudnn$fmhaBackward": (3, 2),
}


def kernel_flops(computation: Computation, instruction: Instruction) -> tuple[str, float] | None:
    """Returns element type and FLOP (2 per multiply-add) of a kernel; None for kernels that it does not know.

    Of attention, pairs that a causal mask or window hides do not count, although a kernel may compute some of them: its
    blocks are square. Padding counts. Of grouped products the rows count that are passed, not those that a kernel
    computes twice because a block of rows has several experts.
    """
    if kernel := attention_kernel(instruction):
        query, key, value = _attention_operands(computation, instruction)
        num_head_products, num_value_products = _MATMULS[kernel]
        size = num_head_products * query.dims[-1] + num_value_products * value.dims[-1]
        found = _FRACTION.search(instruction.op_name)
        fraction = float(found[1]) if found else 1.0
        keys = key.dims[-3 if instruction.target.startswith("__cudnn") else -2]
        return query.dtype, 2.0 * fraction * math.prod(query.dims[:-1]) * keys * size
    if instruction.target.startswith("cudnn_rnn"):
        is_backward = "bwd" in instruction.target
        inputs, state = _arrays(computation, instruction)[3 * is_backward :][:2]
        return inputs.dtype, lstm_flops(inputs.dims, state.dims, is_backward)
    if instruction.target.startswith("mosaic_gpu") and (num_rows := filled_rows(instruction.op_name)) is not None:
        return _grouped_product_flops(computation, instruction, num_rows)
    return None


def _grouped_product_flops(computation: Computation, instruction: Instruction, num_rows: float) -> tuple[str, float]:
    """Returns element type and FLOP of a grouped product, or of one of its derivatives.

    Rows (R, K) are multiplied with weights (E, K, N) or (E, N, K), or with a gradient (R, N). All take 2 R K N.
    """
    rows = next(array for array in _arrays(computation, instruction) if "f" in array.dtype)
    result = next(leaves(instruction.shape))
    return rows.dtype, 2.0 * num_rows * rows.dims[1] * result.dims[-1]


def fractions_of_grouped_product(computation: Computation, instruction: Instruction) -> tuple[float, float]:
    """Returns which fractions of its rows, and of the weights of experts, a kernel in Pallas computes with.

    Rows (R, K) are padded. Of their experts, at most one per row, it reads the weights (E, K, N) only. For kernels
    that are no grouped products they are 1.
    """
    if (num_rows := filled_rows(instruction.op_name)) is None:
        return 1.0, 1.0
    arrays = _arrays(computation, instruction)
    rows = next(array for array in arrays if "f" in array.dtype)
    num_experts = next((array.dims[0] for array in arrays if len(array.dims) == 3), 1)
    return num_rows / rows.dims[0], min(num_rows / num_experts, 1.0)


def lstm_flops(inputs: Sequence[int], state: Sequence[int], is_backward: bool) -> float:
    """Returns the FLOP of an LSTM of one layer, for inputs (B, T, features) and a state (directions, B, units).

    A step multiplies its input and the state by the kernels of four gates. A backward pass takes twice as much.
    """
    directions, _, units = state
    return 2.0 * (1 + is_backward) * directions * math.prod(inputs[:2]) * 4 * units * (inputs[2] + units)


def workspace_bytes(computation: Computation, instruction: Instruction) -> int:
    """Returns an estimate of the workspace of cuDNN's backward pass of attention; 0 for everything else.

    It has the gradient of queries in float32, a float32 for each query, and, for grouped queries, the gradients of keys
    and values for each query head. Only cuDNN on a GPU knows it exactly.

    Source: `SDPABackwardNode` of NVIDIA's cudnn-frontend.
    """
    if attention_kernel(instruction) != "__cudnn$fmhaBackward":
        return 0
    query, key, value = _attention_operands(computation, instruction)
    heads = query.dims[-2]
    size = 4 * math.prod(query.dims[:-1]) * (query.dims[-1] + 1)
    if heads != key.dims[-2]:
        size += query.dims[0] * heads * key.dims[-3] * (key.dims[-1] + value.dims[-1]) * bits(key.dtype) // 8
    return size


def attention_kernel(instruction: Instruction) -> str | None:
    """Returns the name of the fused attention kernel that an instruction calls; None if it calls none."""
    target = instruction.target
    if target.startswith("__cudnn$fmha"):
        return "__cudnn$fmhaBackward" if target.endswith("Backward") else "__cudnn$fmha"
    return next((name for name in _MATMULS if target == "tpu_custom_call" and name in instruction.name), None)


def _attention_operands(computation: Computation, instruction: Instruction) -> Sequence[Array]:
    """Returns queries, keys and values: (..., N, T, H) on TPUs, after the arrays of a mask; (B, T, N, H) on GPUs."""
    return [array for array in _arrays(computation, instruction) if len(array.dims) >= 3 and "f" in array.dtype][:3]


def _arrays(computation: Computation, instruction: Instruction) -> list[Array]:
    return [shape for shape in computation.operand_shapes(instruction) if isinstance(shape, Array)]

"""JAX's primitives by what they do: the names of operations in a traced program."""

from collections.abc import Callable, Collection

REMATERIALIZATIONS = ("remat2", "checkpoint")
"""What `jax.checkpoint` leaves in a program."""

CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Calls of functions, with a program of their own and nothing else."""

LOOPS_AND_BRANCHES = ("scan", "while", "cond")

CALLS_WITH_GRADIENTS = ("custom_jvp_call", "custom_vjp_call")
"""Calls of functions that have gradients of their own."""

ALL_CALLS = (*CALLS, *REMATERIALIZATIONS, *CALLS_WITH_GRADIENTS)

UNCHANGED = ("copy", "name", "sharding_constraint", "reshard")
"""The result has the elements of the operand, at the same indices and with the same values."""

REARRANGEMENTS = ("transpose", "broadcast_in_dim", "reshape", "squeeze", "slice", "dynamic_slice")
"""The elements of the result are elements of the operand, at other indices."""

ELEMENTWISE = {
    *("and", "not", "or", "select_n", "xor", "eq", "ge", "gt", "le", "lt", "ne", "abs", "add", "clamp"),
    *("convert_element_type", "div", "floor", "max", "min", "mul", "neg", "rem", "sub"),
}
"""Elementwise operations of which masks and positions consist. There are others."""

INDEXWISE = {
    *(*ELEMENTWISE, "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos", "cosh"),
    *("bitcast_convert_type", "nextafter", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
    *("digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "integer_pow", "is_finite", "lgamma", "log"),
    *("log1p", "log2", "logistic", "one_minus_square", "polynomial", "pow", "reduce_precision", "round", "rsqrt"),
    *("sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "tan", "tanh"),
}
"""All elementwise operations that layers use. A bitcast to a dtype of another size is none."""

REDUCTIONS = (
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
)

SUMS = ("add", "add_any", "sub")

LINEAR = (
    *(*UNCHANGED, "broadcast_in_dim", "convert_element_type", "neg"),
    *("reduce_sum", "reshape", "rev", "slice", "squeeze", "transpose"),
)
"""Linear in their only operand."""

FOLDED = {*ELEMENTWISE, "broadcast_in_dim", "iota", "reshape", "squeeze"}
"""Computed while tracing where all operands are known numbers, such as the index of a slice."""

GATHERED_DIMS: dict[str, Callable[[dict, int], Collection[int]]] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), lambda params, _: [params["axis"]]),
    **dict.fromkeys(("cholesky", "triangular_solve"), lambda _, rank: range(rank - 2, rank)),
    **dict.fromkeys(("concatenate", "sort"), lambda params, _: [params["dimension"]]),
    "top_k": lambda params, rank: [params.get("axis", rank - 1) % rank],
    "fft": lambda params, rank: range(rank - len(params["fft_lengths"]), rank),
}
"""Elementwise operations that need all of some dims: functions of parameters and rank."""

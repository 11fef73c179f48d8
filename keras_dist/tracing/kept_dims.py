"""Which dims of an operand an operation keeps: along them, each index of the result depends on that index alone."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_dist.tracing.primitives import GATHERED_DIMS, INDEXWISE, REDUCTIONS, UNCHANGED

Groups = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
"""Dims of an operand and the dims of the result that they become; several if a reshape merges or splits them."""

_JAX = os.path.dirname(jax.__file__)
_ALONG_OTHERS = ("slice", "dynamic_slice", "split", "pad", "concatenate")
"""They keep each dim that keeps its size, unless it is padded at one end and cut at the other."""


def kept_dims(equation: Any, number: int) -> Groups:
    """Returns the dims of an operand of an equation that its results keep, without those of size 1.

    Example:

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: x.reshape(6, 4).sum(1))(jax.numpy.ones((2, 3, 4))).jaxpr
    >>> [kept_dims(equation, 0) for equation in jaxpr.eqns]
    [[((0, 1), (0,)), ((2,), (1,))], [((0,), (0,))]]
    """
    name, params = equation.primitive.name, equation.params
    shapes = [getattr(variable.aval, "shape", ()) for variable in equation.invars]
    shape, results = shapes[number], [variable.aval.shape for variable in equation.outvars]
    result = results[0]
    if name in ("reshape", "squeeze"):
        groups = regrouped(shape, result) if params.get("dimensions") is None or name != "reshape" else []
        return [(tuple(before), tuple(after)) for before, after in groups if before and after]
    if name == "transpose":
        return _single(((dim, place) for place, dim in enumerate(params["permutation"])), shape, result)
    if name == "broadcast_in_dim":
        return _single(enumerate(params["broadcast_dimensions"] if number == 0 else ()), shape, result)
    if name in REDUCTIONS:
        kept = [dim for dim in range(len(shape)) if dim not in params["axes"]]
        return _single(((dim, place) for place, dim in enumerate(kept)), shape, result)
    if name == "dot_general":
        return _single(places_in_product(equation, number), shape, result)
    is_indexwise = name in INDEXWISE or name in UNCHANGED or activation(equation) is not None
    if name == "bitcast_convert_type" and shape != result:
        return []
    if is_indexwise or name in (*GATHERED_DIMS, *_ALONG_OTHERS, "rev"):
        along = () if is_indexwise else GATHERED_DIMS.get(name, _dims_along)(params, len(result))
        same = (dim for dim in range(len(shape)) if dim not in along and len({each[dim] for each in results}) == 1)
        return _single(((dim, dim) for dim in same), shape, result)
    return []


def index_dims(lookup: Any) -> list[int]:
    """Returns the dims of the result of a `gather` that are those of its indices, in their order."""
    offset_dims = lookup.params["dimension_numbers"].offset_dims
    return [dim for dim in range(len(lookup.outvars[0].aval.shape)) if dim not in offset_dims]


def interleaved_dims(params: dict, shape: Sequence[int], result: Sequence[int]) -> list[int]:
    """Returns the dims of which a slice takes every n-th element. Of shards that n divides, it takes these of each."""
    sizes = zip(params["start_indices"], params["strides"] or (), shape, result, strict=False)
    return [
        dim
        for dim, (start, stride, size, kept) in enumerate(sizes)
        if start < stride and size == stride * kept and stride > 1
    ]


_ACTIVATIONS: dict[str, Callable] = {"relu": jax.nn.relu, "logaddexp": jnp.logaddexp}  # logaddexp(x, 0) is softplus


def function_with_gradient(equation: Any) -> tuple[str, str]:
    """Returns name and file of the function, with a gradient of its own, that an equation calls; "" where it does not.

    A line number follows the file.
    """
    if equation.primitive.name != "custom_jvp_call":
        return "", ""
    called = equation.params["call_jaxpr"]
    name, _, file = str(getattr(called, "jaxpr", called).debug_info.func_src_info).partition(" at ")
    return name, file


def activation(equation: Any) -> Callable | None:
    """Returns the function of JAX, elementwise and with a gradient of its own, that an equation calls; None: another.

    The equation can be evaluated for operands of its own shapes only.
    """
    name, file = function_with_gradient(equation)
    return _ACTIVATIONS.get(name) if file.startswith(_JAX) else None


def moved(dims: Sequence[int], groups: Groups) -> tuple[int, ...] | None:
    """Returns where dims are after an operation, given the dims that it keeps; None if it does not keep them all.

    Several dims are one index, that of a token for example: they may be merged or split, in their order.
    """
    found: list[int] = []
    rest = list(dims)
    while rest:
        before, after = next(((b, a) for b, a in groups if b[0] == rest[0]), ((), ()))
        if not before or tuple(rest[: len(before)]) != before:
            return None
        found += after
        rest = rest[len(before) :]
    return tuple(found)


def moved_dim(dim: int, groups: Groups) -> int | None:
    """Returns where a dim is after an operation; None if it is not one dim there."""
    return next((after[0] for before, after in groups if before == (dim,) and len(after) == 1), None)


def reversed_groups(groups: Groups) -> Groups:
    return [(after, before) for before, after in groups]


def _single(pairs: Iterable[tuple[int, int]], shape: Sequence[int], result: Sequence[int]) -> Groups:
    return [((dim,), (place,)) for dim, place in pairs if shape[dim] == result[place] != 1]


def _dims_along(params: dict, rank: int) -> Sequence[int]:
    padded = [dim for dim, widths in enumerate(params.get("padding_config", ())) if any(widths)]
    return [*padded, *params.get("dimensions", ()), *(params[name] for name in ("axis", "dimension") if name in params)]


def places_in_product(equation: Any, number: int) -> Iterable[tuple[int, int]]:
    """Returns the dims of an operand of `dot_general` that it keeps, each with the dim of the result."""
    contracted, batch = equation.params["dimension_numbers"]
    ranks = [variable.aval.ndim for variable in equation.invars]
    left, right = ([d for d in range(ranks[i]) if d not in (*contracted[i], *batch[i])] for i in (0, 1))
    free = enumerate(right, len(batch[1]) + len(left)) if number else enumerate(left, len(batch[0]))
    return [(dim, place) for place, dim in (*enumerate(batch[number]), *free)]


def regrouped(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns the smallest groups of dims that a reshape turns into each other, without dims of size 1.

    Example:

    >>> regrouped((8, 1, 64), (8, 4, 16))
    [([0], [0]), ([2], [1, 2])]
    """
    groups, dims, out_dims = [], [], []
    rest, out_rest = ([dim for dim, size in enumerate(shape) if size != 1] for shape in (before, after))
    while rest or out_rest:
        size, out_size = math.prod(before[dim] for dim in dims), math.prod(after[dim] for dim in out_dims)
        if dims and out_dims and size == out_size:
            groups.append((dims, out_dims))
            dims, out_dims = [], []
        elif rest and (size <= out_size or not out_rest):
            dims.append(rest.pop(0))
        else:
            out_dims.append(out_rest.pop(0))
    return [*groups, (dims, out_dims)] if dims or out_dims else groups


def inverse_order(order: Sequence[int]) -> list[int]:
    """Returns the order of dims that undoes a transpose.

    >>> inverse_order([2, 0, 1])
    [1, 2, 0]
    """
    return sorted(range(len(order)), key=order.__getitem__)

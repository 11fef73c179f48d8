"""Layouts of weights that belong to another weight: LoRA factors, and what quantization stores in place of a weight."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from keras_dist._keras.quantized_weights import Dims, quantized_from
from keras_dist.layout.tensor_layout import Axes, axis_tuple

# Names that Keras gives: "lora_kernel_a", "lora_embeddings_b", "kernel_scale", "kernel_zero".
_LORA_FACTOR = re.compile(r"(?P<layer>(?:.*/)?)lora_(?P<weight>\w+)_(?P<role>[ab])")
_QUANTIZATION_PARAMETER = re.compile(r"(?P<layer>(?:.*/)?)(?P<weight>\w+)_(?:scale|zero)")


class BaseWeight(NamedTuple):
    path: str
    dims: Dims  # which of its dims each dim of the derived weight has
    shape: tuple[int, ...] | None = None  # that a rule is for, where the derived weight is all that is left of it


def base_weight_of(variable: Any) -> BaseWeight | None:
    """Returns the weight that a variable, or its spec, is derived from; None for other variables.

    A kernel of shape (inputs, heads, size) has the LoRA factors `a` of shape (inputs, heads, rank) and `b` of shape
    (rank, size). A scale or zero point of a layer that is not one of Keras's has the last dims of its weight.

    >>> from keras_dist.variables.variable_layouts import VariableSpec
    >>> base_weight_of(VariableSpec("block/dense/lora_kernel_a", (64, 4), "float32", "lora_kernel_a", True))
    BaseWeight(path='block/dense/kernel', dims=((0,), ()), shape=None)
    """
    path, rank = variable.path, len(variable.shape)
    if quantized := quantized_from(variable):
        layer = path[: path.rfind("/") + 1]
        return BaseWeight(layer + quantized.name, quantized.dims, quantized.shape)
    if match := _LORA_FACTOR.fullmatch(path):
        dims = (*[(dim,) for dim in range(rank - 1)], ()) if match["role"] == "a" else ((), (-1,))
        return BaseWeight(match["layer"] + match["weight"], dims)
    if match := _QUANTIZATION_PARAMETER.fullmatch(path):
        return BaseWeight(match["layer"] + match["weight"], tuple((dim,) for dim in range(-rank, 0)))
    return None


def paths_derived_later(path: str) -> list[str]:
    """Returns the paths of weights that a layer gets beside this one when it is quantized or given LoRA factors.

    >>> paths_derived_later("dense/bias"), paths_derived_later("dense/kernel")[:2]
    ([], ['dense/kernel_scale', 'dense/kernel_zero'])
    """
    layer, name = path[: path.rfind("/") + 1], path[path.rfind("/") + 1 :]
    if name not in ("kernel", "embeddings", "reverse_embeddings"):
        return []
    names = f"{name}_scale", f"{name}_zero", "zero_point", "g_idx", "awq_scales", f"lora_{name}_a", f"lora_{name}_b"
    return [layer + each for each in names]


def derived_axes(axes: Axes, dims: Dims, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> Axes:
    """Returns the axes of a derived weight of this shape, from the axes of its base weight.

    A dim that consists of several dims of the base weight has the axes of all of them. Axes that do not divide a dim do
    not shard it.

    >>> derived_axes((None, "model", None), ((1, 2), (0,)), (16, 32), {"model": 4})
    ('model', None)
    """

    def entry(dims_of_base: tuple[int, ...], size: int):
        names: tuple[str, ...] = ()
        for dim in dims_of_base:
            more = names + (axis_tuple(axes[dim]) if -len(axes) <= dim < len(axes) else ())
            if size > 1 and size % math.prod(axis_sizes[name] for name in more) == 0:
                names = more
        return names if len(names) > 1 else next(iter(names), None)

    return tuple(entry(*pair) for pair in zip(dims, shape, strict=True))


def axes_for_rule(axes: Axes, dims: Dims) -> Axes:
    """Returns the axes of the base weight, as a rule has them, from those of what quantization stores in its place.

    >>> axes_for_rule(("model", None), ((1, 2), (0,)))
    (None, 'model', None)
    """
    first_dims = {dims_of_base[0]: entry for dims_of_base, entry in zip(dims, axes, strict=True) if dims_of_base}
    return tuple(first_dims.get(dim) for dim in range(1 + max(dim for entry in dims for dim in entry)))

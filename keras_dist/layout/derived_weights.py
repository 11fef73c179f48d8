"""Layouts of weights that belong to another weight: LoRA factors, and the scales and zero points of quantization."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keras_dist.layout.tensor_layout import Axes, axis_tuple

# Names that Keras gives: "lora_kernel_a", "lora_embeddings_b", "kernel_scale", "kernel_zero".
_LORA_FACTOR = re.compile(r"(?P<layer>(?:.*/)?)lora_(?P<weight>\w+)_(?P<role>[ab])")
_QUANTIZATION_PARAMETER = re.compile(r"(?P<layer>(?:.*/)?)(?P<weight>\w+)_(?P<role>scale|zero)")


class BaseWeight(NamedTuple):
    """The weight that a derived weight belongs to."""

    path: str
    role: str  # of the derived weight: "a" or "b" (first or second LoRA factor), "scale" or "zero"


def base_weight_of(path: str) -> BaseWeight | None:
    """Returns the weight that the name of a derived weight refers to, None for other names.

    >>> base_weight_of("block/dense/lora_kernel_a")
    BaseWeight(path='block/dense/kernel', role='a')
    """
    match = _LORA_FACTOR.fullmatch(path) or _QUANTIZATION_PARAMETER.fullmatch(path)
    return match and BaseWeight(match["layer"] + match["weight"], match["role"])


def derived_axes(axes: Axes, base: BaseWeight, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> Axes:
    """Returns the axes of a derived weight of this shape, from the axes of its base weight.

    A kernel of shape (inputs, heads, size) has the LoRA factors `a` of shape (inputs, heads, rank) and `b` of shape
    (rank, size): `a` takes the axes of all dims but the last, `b` that of the last dim, and the rank is not sharded. A
    scale or zero point takes the axes of the last dims; that of an embedding table those of the first. A dim that its
    axes do not divide is not sharded.

    >>> base = base_weight_of("dense/lora_kernel_b")
    >>> derived_axes((None, "model"), base, (4, 64), {"model": 8})
    (None, 'model')
    """
    rank = len(shape)
    if base.role in ("scale", "zero") and 1 < rank < len(axes):
        axes = packed_axes(axes, rank)
    if base.role == "a":
        entries = [*[*axes, *[None] * rank][: rank - 1], None]
    elif base.role == "b":
        entries = [None, axes[-1] if axes else None]
    elif base.path.endswith("embeddings") and not base.path.endswith("reverse_embeddings"):
        entries = [*axes[:1], *[None] * rank][:rank]
    else:
        entries = [*[None] * rank, *axes][-rank:] if rank else []

    def divides(entry, size):
        return size > 1 and size % math.prod(axis_sizes[name] for name in axis_tuple(entry)) == 0

    return tuple(entry if divides(entry, size) else None for entry, size in zip(entries, shape, strict=True))


def packed_axes(axes: Axes, rank: int) -> Axes:
    """Returns the axes of a kernel that quantization has packed into `rank` dims, as int4 kernels are.

    >>> packed_axes(("model", None, None), 2), packed_axes((None, "model", None), 2)
    (('model', None), (None, 'model'))
    """
    return (*axes[: rank - 1], next(filter(None, axes[rank - 1 :]), None))

"""Weights that belong to another one and lie as it does: LoRA factors, and the scales of a quantized weight."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keras_dist.layout.tensor_layout import Axes, axis_tuple

# Keras's own names: "lora_kernel_a", "lora_embeddings_b", "kernel_scale", "kernel_zero".
_FACTOR = re.compile(r"(?P<layer>(?:.*/)?)lora_(?P<weight>\w+)_(?P<part>[ab])")
_SCALE = re.compile(r"(?P<layer>(?:.*/)?)(?P<weight>\w+)_(?P<part>scale|zero)")


class BaseWeight(NamedTuple):
    """The weight that another one belongs to.

    Attributes:
        path: its path.
        part: what of it the other one is: the first (`"a"`) or second (`"b"`) factor of LoRA, a `"scale"` or `"zero"`.
    """

    path: str
    part: str


def base_weight_of(path: str) -> BaseWeight | None:
    """Returns the weight that a weight of this path belongs to by its name, None where it belongs to none.

    Example:

    >>> base_weight_of("block/dense/lora_kernel_a")
    BaseWeight(path='block/dense/kernel', part='a')
    """
    found = _FACTOR.fullmatch(path) or _SCALE.fullmatch(path)
    return found and BaseWeight(found["layer"] + found["weight"], found["part"])


def derived_axes(axes: Axes, weight: BaseWeight, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> Axes:
    """Returns the axes of a weight that belongs to another one.

    A factor has the dims of its weight but the last, and the rank; the other one the rank, and the last dim. A scale
    has the last dims of its weight, with size 1 where it holds for all; that of an embedding the first one. What an
    axis does not divide is whole.

    Args:
        axes: the axes of the weight that it belongs to.
        weight: that weight, and what of it this one is.
        shape: the shape of this one.
        axis_sizes: the sizes of the mesh's axes by name.

    Example:

    >>> weight = base_weight_of("dense/lora_kernel_b")
    >>> derived_axes((None, "model"), weight, (4, 64), {"model": 8})
    (None, 'model')
    """
    rank = len(shape)
    if weight.part in ("scale", "zero") and 1 < rank < len(axes):
        axes = packed_axes(axes, rank)
    if weight.part == "a":
        entries = [*[*axes, *[None] * rank][: rank - 1], None]
    elif weight.part == "b":
        entries = [None, axes[-1] if axes else None]
    elif weight.path.endswith("embeddings") and not weight.path.endswith("reverse_embeddings"):
        entries = [*axes[:1], *[None] * rank][:rank]
    else:
        entries = [*[None] * rank, *axes][-rank:] if rank else []

    def divides(entry, size):
        return size > 1 and size % math.prod(axis_sizes[name] for name in axis_tuple(entry)) == 0

    return tuple(entry if divides(entry, size) else None for entry, size in zip(entries, shape, strict=True))


def packed_axes(axes: Axes, rank: int) -> Axes:
    """Returns the axes of a kernel that is packed into fewer dims, as one of 4-bit numbers is: rows, and columns.

    Args:
        axes: the axes of the kernel, an entry for each of its dims.
        rank: how many dims it is packed into.

    Example:

    >>> packed_axes(("model", None, None), 2), packed_axes((None, "model", None), 2)
    (('model', None), (None, 'model'))
    """
    return (*axes[: rank - 1], next(filter(None, axes[rank - 1 :]), None))

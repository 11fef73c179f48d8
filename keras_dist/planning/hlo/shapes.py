"""Shapes of HLO values, with their layouts and memory spaces."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeAlias

# A layout names the memory space if it is not main memory: S(1) is VMEM of a TPU, S(2), S(4) and S(6) are semaphores
# and scalar memory, S(5) is host memory.
_MAIN_MEMORY, _HOST_MEMORY = 0, 5


@dataclass(frozen=True)
class Array:
    """The shape of one array, of an HLO element type; `stored_elements` includes the padding of a tiled layout.

    >>> array = parse_shape("bf16[8,100]{1,0:T(8,128)(2,1)S(1)}")
    >>> str(array), array.space, array.bytes, array.stored_bytes
    ('bf16[8,100]', 1, 1600, 2048)
    """

    dtype: str
    dims: tuple[int, ...]
    space: int
    stored_elements: int

    @property
    def is_in_memory(self) -> bool:
        return self.space == _MAIN_MEMORY

    @property
    def is_on_host(self) -> bool:
        return self.space == _HOST_MEMORY

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding. Elements of 4 bits take half a byte."""
        return -(-self.elements * bits(self.dtype) // 8)

    @property
    def stored_bytes(self) -> int:
        """Size in memory in bytes, with the padding of a tiled layout."""
        return -(-self.stored_elements * bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape: TypeAlias = "Array | tuple[Shape, ...]"


@cache
def bits(dtype: str) -> int:
    """Returns the size of one element of an HLO type in bits: 16 for 'bf16', 0 for 'token'."""
    if dtype == "pred":
        return 8
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


def leaves(shape: Shape) -> Iterator[Array]:
    """Yields the arrays of a shape, which may be a nested tuple."""
    if isinstance(shape, Array):
        yield shape
    else:
        for element in shape:
            yield from leaves(element)


_SHAPE_TOKEN = re.compile(r"([()])|([a-z]\w*)\[([^\]]*)\](\{[^{}]*\})?")


@lru_cache(maxsize=16384)
def parse_shape(text: str) -> Shape:
    """Parses a shape like `f32[8,128]{1,0:T(8,128)}` or `(f32[8], (s32[], u32[]))`."""
    stack: list[list] = [[]]
    for match in _SHAPE_TOKEN.finditer(text):
        bracket, dtype, dims, layout = match.groups()
        if bracket == "(":
            stack.append([])
        elif bracket == ")" and len(stack) > 1:
            inner = tuple(stack.pop())
            stack[-1].append(inner)
        elif bracket == ")":
            stack.append([])
        else:
            # "<=5" is a bounded dynamic dim.
            sizes = tuple(int(size.strip().removeprefix("<=")) for size in dims.split(",") if size.strip())
            stack[-1].append(_array(dtype, sizes, layout or ""))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(
            f"Cannot parse the HLO shape {text!r}. Expected an array like 'f32[8,128]{{1,0}}' or a tuple of arrays."
        )
    return stack[0][0]


def _array(dtype: str, dims: tuple[int, ...], layout: str) -> Array:
    """An array with a layout like `{1,0:T(8,128)(2,1)S(1)}`: minor-to-major order, tiles, memory space."""
    order, _, rest = layout.strip("{}").partition(":")
    space, tile = re.search(r"S\((\d+)\)", rest), re.match(r"T\(([\d,]+)\)", rest)
    stored = list(dims)
    if tile:
        # The last number of the first tile belongs to the minor dim. Further tiles only reorder elements within it.
        for dim, size in zip(numbers(order), reversed(numbers(tile[1])), strict=False):
            stored[dim] = -(-dims[dim] // size) * size
    return Array(dtype, dims, int(space[1]) if space else _MAIN_MEMORY, math.prod(stored))


def numbers(text: str) -> tuple[int, ...]:
    """Returns the non-negative integers in a text."""
    return tuple(int(number) for number in re.findall(r"\d+", text))

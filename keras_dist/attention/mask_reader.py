"""Where a mask reads the values that it is made of, and what it reads there.

A mask is seen as (B, N, T, S). Each of its elements was computed from elements of other values, which are found here
through broadcasts, transposes, reshapes and slices. What is read there is a position, a constant or something else.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from keras_dist.tracing.kept_dims import regrouped
from keras_dist.tracing.primitives import ELEMENTWISE, REARRANGEMENTS, UNCHANGED
from keras_dist.tracing.traced_values import Node

BATCH, HEAD, QUERY, KEY = range(4)  # dims of a mask


class Read(NamedTuple):
    """A value, and which of its elements a mask reads.

    For each dim of the value, `view` has the dim of the mask whose index is used, or None for the same element
    everywhere, and a number that is added to the index.
    """

    node: Node
    view: tuple[tuple[int | None, int], ...]

    @property
    def mask_dims(self) -> set[int]:
        return {dim for dim, _ in self.view if dim is not None}

    def operands(self) -> list["Read"]:
        """What an elementwise operation read; operands may be numbers, or have dims of size 1 that are broadcast."""

        def view_of(operand: Node) -> tuple[tuple[int | None, int], ...]:
            places = zip(self.view, operand.shape, self.node.shape, strict=False)
            return tuple(place if size == result_size else (None, 0) for place, size, result_size in places)

        return [Read(operand, view_of(operand)) for operand in self.node.inputs]

    def source(self) -> "Read | None":
        """Returns the same elements in the value of which this is a rearrangement, if it is one."""
        node, view = self.node, self.view
        if node.primitive in UNCHANGED:
            return Read(node.inputs[0], view)
        if node.primitive not in REARRANGEMENTS:
            return None
        operand = node.inputs[0]
        source: list[tuple[int | None, int]] = [(None, 0)] * len(operand.shape)
        if node.primitive == "transpose":
            for dim, before in enumerate(node.params["permutation"]):
                source[before] = view[dim]
        elif node.primitive == "broadcast_in_dim":
            for before, dim in enumerate(node.params["broadcast_dimensions"]):
                if operand.shape[before] == node.shape[dim]:
                    source[before] = view[dim]
        elif node.primitive in ("reshape", "squeeze"):
            for before, after in regrouped(operand.shape, node.shape):
                if len(before) != 1 or len(after) != 1:
                    return None
                source[before[0]] = view[after[0]]
        else:
            starts = _starts(node)
            if starts is None:
                return None
            source = [(dim, offset + start) for (dim, offset), start in zip(view, starts, strict=True)]
        return Read(operand, tuple(source))

    def origin(self) -> "Read":
        """Returns the same elements in the value that they were taken from by rearrangements."""
        source = self.source()
        return self if source is None else source.origin()

    def placed(self, value: Any, mask_shape: Sequence[int]) -> Any:
        """Returns the elements of `value` that the mask reads, as (B, N, T, S); 1 for dims that it has not."""
        dims = [dim for dim, _ in self.view if dim is not None]
        index = [offset if dim is None else slice(offset, offset + mask_shape[dim]) for dim, offset in self.view]
        elements = value[tuple(index)].transpose(np.argsort(dims).tolist())
        return elements.reshape([size if dim in dims else 1 for dim, size in enumerate(mask_shape)])


class MaskReader:
    """Analyzes what a mask of some shape (B, N, T, S) reads."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        # A mask may use the same values in several places.
        self.affine, self.varying_dims, self.build = cache(self._affine), cache(self._varying_dims), cache(self._build)

    def number(self, read: Read) -> int | None:
        """Returns the integer that all elements are, if so."""
        affine = self.affine(read)
        return None if affine is None or any(affine[:4]) else int(affine[4])

    def _affine(self, read: Read) -> np.ndarray | None:
        """Returns integers b, n, t, s, c if the elements are exactly b * batch + n * head + t * query + s * key + c."""
        if (source := read.source()) is not None:
            return self.affine(source)
        affine = self._affine_of_operation(read)
        if affine is None:
            return None
        ends = affine[:4] * (np.array(self.shape, object) - 1)
        low, high = (affine[4] + sum(extreme(end, 0) for end in ends) for extreme in (min, max))
        return affine if _has_integers(read.node.dtype, low, high) else None

    def _affine_of_operation(self, read: Read) -> np.ndarray | None:
        node, view = read
        if node.constant is not None:
            return _affine_constant(node.constant, view)
        if node.primitive == "iota":
            return _index(*view[node.params["dimension"]])
        if node.primitive == "cumsum":
            number, axis = self.number(Read(node.inputs[0], view)), node.params["axis"]
            index = _index(*view[axis])
            counts = _number(node.shape[axis]) - index if node.params["reverse"] else index + _number(1)
            return None if number is None else number * counts
        if node.primitive not in _AFFINE_OPERATIONS:
            return None
        operands = [self.affine(operand) for operand in read.operands()]
        is_known = all(operand is not None for operand in operands)
        return _AFFINE_OPERATIONS[node.primitive](*operands) if is_known else None

    def _varying_dims(self, read: Read) -> frozenset[int]:
        """Returns dims of the mask along which the elements may vary; without needless ones if they would be T x S."""
        dims = frozenset(read.mask_dims)
        if (affine := self.affine(read)) is not None:
            return frozenset(dim for dim in range(4) if affine[dim])
        if not {QUERY, KEY} <= dims and HEAD not in dims:
            return dims
        if (source := read.source()) is not None:
            return self.varying_dims(source)
        if read.node.primitive in ELEMENTWISE:
            return frozenset[int]().union(*map(self.varying_dims, read.operands()))
        return dims

    def _build(self, read: Read, dims: frozenset[int]) -> Any:
        """Computes the elements (B, N, T, S), with size 1 for all dims but `dims`, which are those that vary."""
        node = read.node
        if read.mask_dims <= dims:
            return read.placed(jnp.asarray(node.value, node.dtype), self.shape)
        if (affine := self.affine(read)) is not None:
            result = jnp.full((1, 1, 1, 1), affine[4])
            for dim in dims:
                positions = jnp.arange(self.shape[dim]).reshape([-1 if at == dim else 1 for at in range(4)])
                result = result + affine[dim] * positions
            return result.astype(node.dtype)
        if (source := read.source()) is not None:
            return self.build(source, dims)
        return node.apply(*jnp.broadcast_arrays(*(self.build(operand, dims) for operand in read.operands())))


def _starts(node: Node) -> Sequence[int] | None:
    """Where a slice starts, if that is known and the slice leaves out nothing in between."""
    if node.primitive == "slice":
        return node.params["start_indices"] if set(node.params["strides"] or ()) <= {1} else None
    starts = [int(start.constant) for start in node.inputs[1:] if start.constant is not None]
    if len(starts) < len(node.shape):
        return None
    last = [size - length for size, length in zip(node.inputs[0].shape, node.shape, strict=True)]
    return [min(max(start, 0), end) for start, end in zip(starts, last, strict=True)]


def _number(number: int) -> np.ndarray:
    return np.array([0, 0, 0, 0, number], object)  # integers of Python, which do not overflow


def _index(dim: int | None, offset: int) -> np.ndarray:
    affine = _number(offset)
    if dim is not None:
        affine[dim] = 1
    return affine


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray | None:
    if not any(left[:4]):
        return left[4] * right
    return None if any(right[:4]) else left * right[4]


_AFFINE_OPERATIONS: dict[str, Callable[..., np.ndarray | None]] = {
    "convert_element_type": np.positive,
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": _product,
}


def _affine_constant(constant: Any, view: tuple[tuple[int | None, int], ...]) -> np.ndarray | None:
    """Returns the integers of `MaskReader.affine` for a number, or for a concrete range along one dim."""
    varying = [dim for dim, size in enumerate(np.shape(constant)) if size > 1]
    if len(varying) > 1 or not getattr(constant, "is_fully_addressable", True):
        return None
    numbers = np.asarray(constant).reshape(-1)
    if not numbers.size or not any(jnp.issubdtype(numbers.dtype, kind) for kind in (bool, jnp.integer, jnp.floating)):
        return None
    numbers = numbers.astype(float)
    first, step = numbers[0], numbers[1] - numbers[0] if varying else 0.0
    if not (first % 1 == step % 1 == 0) or not np.array_equal(numbers, first + step * np.arange(numbers.size)):
        return None  # also what is infinite or no number
    return _number(int(first)) + (int(step) * _index(*view[varying[0]]) if varying else 0)


def _has_integers(dtype: Any, low: int, high: int) -> bool:
    if jnp.issubdtype(dtype, jnp.bool_):
        return low >= 0 and high <= 1
    if jnp.issubdtype(dtype, jnp.integer):
        return low >= jnp.iinfo(dtype).min and high <= jnp.iinfo(dtype).max
    largest = 2 ** (jnp.finfo(dtype).nmant + 1) if jnp.issubdtype(dtype, jnp.floating) else -1
    return -largest <= low and high <= largest

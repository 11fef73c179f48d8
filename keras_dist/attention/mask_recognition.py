"""What an attention mask says, recognized from the operations that made it.

Fused attention kernels take causal masks and sliding windows as two numbers, and padding and packed sequences as
vectors. Keras and KerasHub pass all of these as one boolean array (B, N, T, S): batch, heads, queries, keys. It is
taken apart here by rules that hold exactly, without computing anything of size T x S.

Example: KerasHub's decoders pass `min(int(padding)[:, None, :], int(i[:, None] >= j))[:, None] != 0`.

1. The mask is the minimum of two integers, so both must be nonzero.
2. The first is `padding`, seen through a broadcast. It does not depend on the query: it says which keys are valid.
3. The second compares two ranges, seen through broadcasts: `query position - key position >= 0`. It is a band.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_dist.attention.mask import AttentionMask
from keras_dist.attention.mask_reader import BATCH, HEAD, KEY, QUERY, MaskReader, Read
from keras_dist.tracing.primitives import REARRANGEMENTS, UNCHANGED
from keras_dist.tracing.traced_values import Node, node_of

_OPPOSITES = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge", "eq": "ne", "ne": "eq"}
_BLOCK = 2**24  # elements of a concrete mask that are looked at at once


def recognize(mask: Any) -> AttentionMask:
    """Takes a mask apart into a band, padding, packed sequences, and the rest. `jnp.tril` is `AttentionMask(upper=0)`.

    The mask has booleans (B or 1, N or 1, T, S), (B or 1, T, S) or (T, S), traced or concrete. Integers of which it is
    made, such as a padding mask of zeros and ones, must not be negative. Ids of packed sequences must not be NaN.
    """
    conditions = _Conditions(mask)
    try:
        conditions.require(conditions.whole, True)
    except RecursionError:  # a mask that depends on the activations of a deep model
        return AttentionMask(dense=conditions.whole.placed(mask, conditions.reader.shape) != 0)
    return conditions.result()


def recognize_bias(bias: Any) -> AttentionMask | None:
    """Takes an additive mask apart: `(1 - mask) * -1e9` or `where(mask, 0, -inf)`. None if it is not of this form.

    It has a shape as in `recognize`. Integers of which it is made must be zeros and ones.
    """
    conditions = _Conditions(bias)
    return conditions.result() if conditions.require_no_bias(conditions.whole) else None


class _Conditions:
    """The conditions that a mask consists of, collected by following its operations backwards."""

    def __init__(self, mask: Any):
        # (B, T, S) is the same for all heads, (T, S) also for all sequences.
        dims = (BATCH, QUERY, KEY) if len(mask.shape) == 3 else range(4 - len(mask.shape), 4)
        sizes = dict(zip(dims, mask.shape, strict=True))
        self.whole = Read(node_of(mask), tuple((dim, 0) if size > 1 else (None, 0) for dim, size in sizes.items()))
        self.reader = MaskReader(tuple(sizes.get(dim, 1) for dim in range(4)))
        self.lower, self.upper, self.segments = -math.inf, math.inf, None
        self.query_valid, self.key_valid, self.dense = [], [], []
        self.required = set()

    def result(self) -> AttentionMask:
        *_, num_queries, num_keys = self.reader.shape
        return AttentionMask(
            lower=int(self.lower) if self.lower > 1 - num_queries else None,
            upper=int(self.upper) if self.upper < num_keys - 1 else None,
            query_valid=_all([array[:, 0, :, 0] for array in self.query_valid]),
            key_valid=_all([array[:, 0, 0, :] for array in self.key_valid]),
            segments=self.segments,
            dense=_all(self.dense),
        )

    def require(self, read: Read, nonzero: bool) -> None:
        """Adds the condition that what the mask reads is nonzero, or zero."""
        if (read, nonzero) in self.required:
            return
        self.required.add((read, nonzero))
        if self._require_parts(read, nonzero):
            return
        if (source := read.source()) is not None:
            self.require(source, nonzero)
        elif not self._require_concrete(read, nonzero):
            self._require_values(read, nonzero)

    def _require_values(self, read: Read, nonzero: bool) -> None:
        """Adds a condition that must be given as an array."""
        dims, shape = self.reader.varying_dims(read), self.reader.shape
        if {QUERY, KEY} <= dims or HEAD in dims:
            dims_of_array, arrays = {QUERY, KEY}, self.dense
        elif QUERY in dims or shape[KEY] == 1:
            dims_of_array, arrays = {QUERY}, self.query_valid
        else:
            dims_of_array, arrays = {KEY}, self.key_valid
        values = self.reader.build(read, dims)
        array = (values != 0) if nonzero else (values == 0)
        arrays.append(jnp.broadcast_to(array, [shape[d] if d in dims | dims_of_array else 1 for d in range(4)]))

    def _require_parts(self, read: Read, nonzero: bool) -> bool:
        """Adds conditions on the operands that together equal the one on the result, if there are such conditions."""
        node, operands, number = read.node, read.operands(), self.reader.number
        if node.primitive == "convert_element_type" and _keeps_zeros(node):
            self.require(operands[0], nonzero)
        elif node.primitive == "not" and node.dtype == bool:
            self.require(operands[0], not nonzero)
        elif node.primitive in (("and", "min", "mul") if nonzero else ("or", "max")) and _is_logical(node):
            for operand in operands:
                self.require(operand, nonzero)
        elif node.primitive == "sub" and number(operands[0]) == 1 and _is_binary(operands[1].node):
            self.require(operands[1], not nonzero)
        elif node.primitive == "sub" and not nonzero:
            return self._require_comparison("eq", *operands)
        elif node.primitive == "select_n" and node.inputs[0].dtype == bool:
            condition, if_false, if_true = operands
            return self._require_choice(condition, if_false, if_true, nonzero)
        elif node.primitive in _OPPOSITES:
            return self._require_comparison(node.primitive if nonzero else _OPPOSITES[node.primitive], *operands)
        else:
            constant = number(read)
            return constant is not None and bool(constant) == nonzero
        return True

    def _require_choice(self, condition: Read, if_false: Read, if_true: Read, nonzero: bool) -> bool:
        """Handles `where`: if one of its values is a constant that fails, the other must be chosen, and not fail."""
        for chosen, other, holds in ((if_true, if_false, True), (if_false, if_true, False)):
            number = self.reader.number(other)
            if number is not None and bool(number) != nonzero:
                self.require(condition, holds)
                self.require(chosen, nonzero)
                return True
        return False

    def _require_comparison(self, name: str, left: Read, right: Read) -> bool:
        if name in ("le", "lt"):
            return self._require_comparison({"le": "ge", "lt": "gt"}[name], right, left)
        for read, number in ((left, self.reader.number(right)), (right, self.reader.number(left))):
            if name in ("eq", "ne") and (number == 0 or (number == 1 and _is_binary(read.node))):
                self.require(read, (name == "eq") == bool(number))
                return True
        if _is_binary(left.node) and (name, self.reader.number(right)) in (("gt", 0), ("ge", 1)):
            self.require(left, True)
            return True
        if name == "ne" or (name == "eq" and self._require_same_segment(left, right)):
            return name == "eq"
        bands = self._bands(left, right, least=1 if name == "gt" else 0)
        if name == "eq":
            bands += self._bands(right, left, least=0)
        return None not in bands and all(map(self._require_band, bands))

    def _bands(self, larger: Read, smaller: Read, least: int) -> list[tuple[float, float] | None]:
        """Returns the bands in which one value, maybe an `abs`, is smaller by `least` or more; None for no band."""
        absolute = smaller.node.primitive == "abs"
        if absolute:
            (smaller,) = smaller.operands()
        large, small = self.reader.affine(larger), self.reader.affine(smaller)
        if large is None or small is None:
            return [None]
        return [_as_band(large - each, least) for each in ((small, -small) if absolute else (small,))]

    def _require_same_segment(self, left: Read, right: Read) -> bool:
        is_band = self.reader.affine(left) is not None and self.reader.affine(right) is not None
        if self.segments is not None or is_band or left.node.dtype.itemsize > 4:
            return False
        for queries, keys in ((left, right), (right, left)):
            dims, key_dims = self.reader.varying_dims(queries), self.reader.varying_dims(keys)
            if {QUERY} <= dims <= {BATCH, QUERY} and {KEY} <= key_dims <= {BATCH, KEY}:
                ids = _as_integers(self.reader.build(queries, dims)[:, 0, :, 0])
                # The same ids of both are one array: then every query sees the key of its own position.
                node, view = keys.origin()
                as_queries = Read(node, tuple((QUERY if dim == KEY else dim, offset) for dim, offset in view))
                is_same = queries.origin() == as_queries
                self.segments = ids, ids if is_same else _as_integers(self.reader.build(keys, key_dims)[:, 0, 0, :])
                return True
        return False

    def _require_concrete(self, read: Read, nonzero: bool) -> bool:
        """Adds the conditions of a concrete mask (T, S) that is a band, or blocks along the diagonal."""
        constant = read.node.constant
        if constant is None or not getattr(constant, "is_fully_addressable", True):
            return False
        if self.reader.varying_dims(read) != {QUERY, KEY}:
            return False
        values = read.placed(np.asarray(constant), self.reader.shape)[0, 0]
        visible = (values != 0) if nonzero else (values == 0)
        if self._require_band(_band(visible)):
            return True
        blocks = _blocks(visible) if self.segments is None else None
        if blocks is None:
            return False
        ids = jnp.asarray(blocks[0], jnp.int32)[None]
        self.segments = ids, ids
        return self._require_band((-math.inf, 0 if blocks[1] else math.inf))

    def _require_band(self, band: tuple[float, float] | None) -> bool:
        if band is not None:
            self.lower, self.upper = max(self.lower, band[0]), min(self.upper, band[1])
        return band is not None

    def require_no_bias(self, read: Read) -> bool:
        """Adds the condition that a bias is zero, if it is -1e9 or less elsewhere."""
        node, operands = read.node, read.operands()
        if node.primitive == "mul":
            for factor, other in (operands, operands[::-1]):
                if _is_binary(factor.node, trusts_integers=True) and _constant(other.node) <= -1e9:
                    self.require(factor, False)
                    return True
        if node.primitive == "select_n" and node.inputs[0].dtype == bool:
            condition, *choices = operands
            for holds, (zero, other) in ((True, choices[::-1]), (False, choices)):
                if self.reader.number(zero) == 0 and _constant(other.node) <= -1e9:
                    self.require(condition, holds)
                    return True
        source = operands[0] if node.primitive == "convert_element_type" else read.source()
        return source is not None and self.require_no_bias(source)


def _all(conditions: list[Any]) -> Any | None:
    return functools.reduce(operator.and_, conditions) if conditions else None


def _as_band(affine: np.ndarray, least: int) -> tuple[float, float] | None:
    """Returns limits of key position - query position where an affine function is at least a number."""
    batch, heads, query, key, constant = affine
    if batch or heads or not key or query != -key:
        return None
    # key * distance + constant >= least
    return (-((constant - least) // key), math.inf) if key > 0 else (-math.inf, (constant - least) // -key)


def _band(visible: np.ndarray) -> tuple[int, int] | None:
    """Returns the limits of key position - query position in a concrete mask (T, S), or None if it is no band."""
    num_queries, num_keys = visible.shape
    rows = max(1, _BLOCK // num_keys)
    blocks = [visible[start : start + rows] for start in range(0, num_queries, rows)]
    count = np.concatenate([block.sum(1) for block in blocks])
    first = np.concatenate([block.argmax(1) for block in blocks])
    last = num_keys - 1 - np.concatenate([block[:, ::-1].argmax(1) for block in blocks])
    if not count.any():
        return None
    queries = np.arange(num_queries)
    lower, upper = (first - queries)[count > 0].min(), (last - queries)[count > 0].max()
    begin, end = np.maximum(queries + lower, 0), np.minimum(queries + upper, num_keys - 1)
    is_band = (count == np.maximum(end - begin + 1, 0)) & ((count == 0) | (first == begin) & (last == end))
    return (int(lower), int(upper)) if is_band.all() else None


def _blocks(visible: np.ndarray) -> tuple[np.ndarray, bool] | None:
    """Returns the block of each position, and whether it sees no later ones, if a concrete mask (T, T) has blocks only.

    Example: positions 0 and 1 see each other, and 2 sees itself.

    >>> _blocks(np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], bool))
    (array([0, 0, 2]), False)
    """
    if len(set(visible.shape)) > 1 or not visible.diagonal().all():
        return None
    first = visible.argmax(1)  # the first position that each one sees is the one where its block begins
    same = first[:, None] == first
    for is_causal in (False, True):
        if np.array_equal(visible, np.tril(same) if is_causal else same):
            return first, is_causal
    return None


def _as_integers(ids: Any) -> jax.Array:
    """Returns integers that are equal where ids are, which may be numbers of any kind of at most 32 bits."""
    if not jnp.issubdtype(ids.dtype, jnp.floating):
        return ids.astype(jnp.int32)
    ids = ids.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(jnp.where(ids == 0, 0, ids), jnp.int32)  # zero has two signs


def _is_logical(node: Node) -> bool:
    """Whether an operation on numbers is one on truth values; `recognize` says that integers are not negative."""
    is_integer = jnp.issubdtype(node.dtype, jnp.integer) and node.primitive in ("min", "mul", "max")
    return is_integer or all(map(_is_binary, node.inputs))


def _is_binary(node: Node, trusts_integers: bool = False) -> bool:
    """Whether all values are 0 or 1, as far as the operations show it."""
    if node.dtype == bool or (trusts_integers and jnp.issubdtype(node.dtype, jnp.integer)):
        return True
    if node.constant is not None:
        return _constant(node) in (0, 1)
    if node.primitive in ("convert_element_type", *UNCHANGED, *REARRANGEMENTS):
        return _is_binary(node.inputs[0], trusts_integers)
    if node.primitive == "sub":
        ones, binary = node.inputs
        return _constant(ones) == 1 and _is_binary(binary, trusts_integers)
    parts = node.inputs[1:] if node.primitive == "select_n" else node.inputs
    is_logical = node.primitive in ("and", "or", "min", "max", "mul", "select_n")
    return is_logical and all(_is_binary(part, trusts_integers) for part in parts)


def _keeps_zeros(node: Node) -> bool:
    """Whether a conversion makes zeros of zeros only; one to fewer bits may make them of other numbers."""
    before, after = node.inputs[0].dtype, node.dtype
    if jnp.issubdtype(after, jnp.bool_) or _is_binary(node.inputs[0]):
        return True
    keeps_size = jnp.issubdtype(after, jnp.floating) or before.itemsize <= after.itemsize
    return keeps_size and jnp.issubdtype(before, jnp.integer)


def _constant(node: Node) -> float:
    """Returns the number that all values are, NaN if it is not known."""
    while node.primitive in ("broadcast_in_dim", "convert_element_type", "reshape") and node.constant is None:
        node = node.inputs[0]
    is_known = node.constant is not None and np.size(node.constant) == 1
    return float(np.asarray(node.constant).item()) if is_known else math.nan

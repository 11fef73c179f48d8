"""What Keras stores in place of a float weight when it quantizes a layer: packed weights, scales, zero points."""

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from keras_dist._keras.internals import global_state, stored_dtype
from keras_dist._keras.model_structure import direct_variables

Dims = tuple[tuple[int, ...], ...]
_LAYERS = keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding
_BY_ROW = "g_idx", "awq_scales"  # one entry for each row that a kernel multiplies with
_BY_COLUMN = "kernel_scale", "kernel_zero", "zero_point"  # and perhaps for each group of rows


class FloatWeight(NamedTuple):
    """The float weight whose values a variable of a quantized layer stores, or belongs to."""

    name: str  # in its layer
    shape: tuple[int, ...] | None  # if the variable stores its values
    # Of each dim of the variable, the dims of the float weight that it consists of. Only the first of several is
    # contiguous: a shard of another one is not the same part of the float weight.
    dims: Dims


def quantized_from(variable: Any) -> FloatWeight | None:
    """Returns the float weight of a variable (or of its spec) that quantization created, None for other variables."""
    return getattr(variable, "quantized_from", None)


def record_creation(variable: keras.Variable) -> None:
    """Records the float weight of a variable that is being created by a layer, if it has one."""
    scopes = global_state.get_global_attribute("name_scope_stack")
    if scopes:
        _record(scopes[-1].caller, variable)


def record_variables(model: keras.Layer) -> None:
    for layer in model._flatten_layers():
        if isinstance(layer, _LAYERS) and getattr(layer, "_is_quantized", False):
            for variable in direct_variables(layer):
                _record(layer, variable)


def _record(layer: Any, variable: Any) -> None:
    if isinstance(layer, _LAYERS) and quantized_from(variable) is None:
        name, shape, dtype = variable.name, tuple(variable.shape), stored_dtype(variable)
        describe = _table_parts if isinstance(layer, keras.layers.Embedding) else _kernel_parts
        if weight := describe(layer, name, shape, dtype):
            variable.quantized_from = weight


def _table_parts(layer: Any, name: str, shape: tuple[int, ...], dtype: str) -> FloatWeight | None:
    is_reverse = name.startswith("reverse_")
    weight = "reverse_embeddings" if is_reverse else "embeddings"
    if name == weight and dtype == "int8":  # of int4 values, two in a byte
        whole = (layer.output_dim, shape[1]) if is_reverse else (shape[0], layer.output_dim)
        return FloatWeight(weight, whole, ((0,), (1,))) if whole != shape else None
    if name in (f"{weight}_scale", f"{weight}_zero"):
        return FloatWeight(weight, None, ((0,), (1,)) if len(shape) == 2 else ((int(is_reverse),),))
    return FloatWeight(weight, None, ((1,),)) if name == "g_idx" else None


def _kernel_parts(layer: Any, name: str, shape: tuple[int, ...], dtype: str) -> FloatWeight | None:
    is_transposed = dtype == "uint8" or hasattr(layer, "quantized_kernel")  # by GPTQ and AWQ
    is_kernel = name == "kernel" and dtype in ("int8", "uint8")
    if not is_kernel and (name not in (*_BY_ROW, *_BY_COLUMN) or not shape):
        return None
    if isinstance(layer, keras.layers.Dense):
        whole, rows, columns = (shape[-1] if is_transposed else shape[0], layer.units), (0,), (1,)
    elif is_transposed or hasattr(layer, "_int4_rows"):
        whole = tuple(layer.original_kernel_shape)
        first, last = (shape[-1], shape[0]) if is_transposed else (shape[0], shape[-1])
        num_rows = math.prod(whole) // last if name in _BY_COLUMN else first
        rows, columns = _rows_and_columns(whole, num_rows)
    elif is_kernel:  # as it was
        return None
    else:
        # The scale has the dims that are not summed over, in the order of the layer's outputs. Each is numbered here.
        numbers = layer._get_kernel_scale_shape(range(2, 2 + len(layer._kernel.shape)))
        return FloatWeight("kernel", None, tuple((n - 2,) if n > 1 else () for n in numbers))
    if name in _BY_ROW:
        dims = (rows,)
    elif not is_kernel and len(shape) == 1:
        dims = (columns,)
    else:
        dims = (columns, rows) if is_transposed else (rows, columns)
    return None if is_kernel and whole == shape else FloatWeight("kernel", whole if is_kernel else None, dims)


def _rows_and_columns(shape: Sequence[int], rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns which dims of a tensor become rows and which become columns when it is reshaped to a matrix.

    >>> _rows_and_columns((32, 4, 8), 32), _rows_and_columns((4, 8, 32), 32)
    (((0,), (1, 2)), ((0, 1), (2,)))
    """
    steps = itertools.accumulate(shape[:-1], operator.mul, initial=1)  # how many parts each dim repeats in
    outer = [dim for dim, step in enumerate(steps) if step < rows]
    return tuple(outer), tuple(range(len(outer), len(shape)))

"""Tensors in files of safetensors as views of mapped files, which are read when a variable takes its shards.

A converter of KerasHub only moves data: it transposes, reshapes, slices, stacks and concatenates tensors of a
checkpoint, and assigns the results. NumPy's transposes, reshapes and slices of a view are views, too, and views that
are stacked or concatenated are a lazy tensor here. So a converter runs unchanged, and nothing is read before a variable
is assigned. Example, the experts of Mixtral:

    with safe_open("model.safetensors", "np") as file:
        experts = [file.get_tensor(f"experts.{i}.w1.weight") for i in range(8)]  # 8 views of shape (14336, 4096)
        kernels = np.stack([np.transpose(expert) for expert in experts])  # lazy, of shape (8, 4096, 14336)
        variable.assign(kernels)  # sharded over dim 0 of 8 devices: each reads one view
"""

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from keras_dist.variables.lazy_tensor import Bounds, LazyTensor, overlap, shape_of, within

# Source: https://github.com/huggingface/safetensors, enum `Dtype`. JAX registers the names of types that NumPy lacks.
DTYPES = {
    **{"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64"},
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}


class SafetensorsFile:
    """What `safetensors.safe_open` returns, except that its tensors are views of the file.

    Pages of the file are copied when they are written to, so the file does not change.
    """

    def __init__(self, path: str | os.PathLike, opened: Any = None):
        self._path, self._opened = path, opened  # the reader of safetensors, which has checked the file
        self.header, self._start = read_header(path)
        self._bytes: np.ndarray | None = np.memmap(path, mode="c")

    def get_tensor(self, name: str) -> np.ndarray:
        """Returns a tensor as a view of the file; raises KeyError if the file does not contain it."""
        entry = self.header.get(name)
        if entry is None:
            raise KeyError(f"{os.fspath(self._path)} contains no tensor {name!r}.")
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None or self._bytes is None:  # which the reader reports
            return self._opened.get_tensor(name)
        start, end = (self._start + offset for offset in entry["data_offsets"])
        return self._bytes[start:end].view(dtype).reshape(entry["shape"]).view(FileView)

    def __enter__(self) -> "SafetensorsFile":
        self._opened.__enter__()
        return self

    def __exit__(self, *error) -> Any:
        self._bytes = None  # which tensors keep open
        return self._opened.__exit__(*error)

    def __getattr__(self, name: str):
        return getattr(self._opened, name)


def views_of(files: Iterable[SafetensorsFile]) -> dict[str, np.ndarray]:
    """Returns the tensors of files by their names, of which nothing is read yet."""
    return {name: file.get_tensor(name) for file in files for name in file.header}


def read_header(path: str | os.PathLike) -> tuple[dict[str, dict], int]:
    """Returns what a file says of each of its tensors, and where the first one starts.

    Raises ValueError if the file is not one of safetensors, or not all of one.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = 8 + struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
        if size < 8 or size < start:
            raise _damaged(path, f"it has {size} bytes, but its header ends at byte {start}")
        try:
            header = json.loads(file.read(start - 8))
            header.pop("__metadata__", None)
            end = start + max((each["data_offsets"][1] for each in header.values()), default=0)
        except (ValueError, TypeError, AttributeError, LookupError):
            raise _damaged(path, f"its header, the {start - 8} bytes from byte 8 on, is not one of tensors") from None
    if size < end:
        raise _damaged(path, f"it has {size} bytes, but its last tensor ends at byte {end}")
    return header, start


def _damaged(path: str | os.PathLike, fault: str) -> ValueError:
    return ValueError(
        f"{os.fspath(path)!r} is no complete file of safetensors: {fault}. Copy or download the file again."
    )


class FileView(np.ndarray):
    """A tensor in a mapped file, or a view of one. What NumPy computes from it is an ordinary array."""

    def __array_function__(self, func, types, args, kwargs):
        return _call(func, types, args, kwargs)

    def __array_wrap__(self, array, context=None, return_scalar=False):
        if array is self:  # the output of an operation in place
            return self
        if _is_mapped(array):  # `squeeze` wraps a view
            return array.view(type(self))
        return array[()] if return_scalar else np.asarray(array)

    def astype(self, *args, **kwargs):
        return np.asarray(self).astype(*args, **kwargs)


class JoinedViews(LazyTensor):
    """Views of files that are stacked or concatenated: `_source`, pairs of bounds in the result and a view.

    To transpose it, and to join several, reads nothing.
    """

    def _read(self, bounds: Bounds) -> np.ndarray:
        result = np.empty(shape_of(bounds), self.dtype)
        for of_view, view in self._source:
            if (both := overlap(bounds, of_view)) is not None:
                result[within(bounds, both)] = view[within(of_view, both)]
        return result

    def transpose(self, *axes: Any) -> LazyTensor:
        order = np.empty(range(self.ndim)).transpose(*axes).shape  # of an array whose dim i has size i
        parts = [(tuple(bounds[dim] for dim in order), view.transpose(order)) for bounds, view in parts_of(self)]
        return JoinedViews(parts, [self.shape[dim] for dim in order], self.dtype)

    @property
    def T(self) -> LazyTensor:
        return self.transpose()

    def __array_function__(self, func, types, args, kwargs):
        return _call(func, types, args, kwargs)


def _call(function: Callable, types: Iterable[type], args: Iterable, kwargs: Mapping) -> Any:
    """Calls a function of NumPy. Views, and what is joined of them, are joined without being read."""
    if function in (np.stack, np.concatenate):
        joined = _joined(function is np.stack, *args, **kwargs)
        if joined is not None:
            return joined
    others = [each for each in types if not issubclass(each, (FileView, JoinedViews))]
    return np.empty(0).__array_function__(function, others, args, kwargs)  # as without these classes


def _joined(is_stack: bool, arrays: Sequence, axis: Any = 0, *args, **kwargs) -> JoinedViews | None:
    """Stacks or concatenates views; None if these are other arrays or options, or do not fit, which NumPy reports."""
    arrays = list(arrays)
    if not arrays or args or kwargs or not isinstance(axis, int) or not all(map(is_view, arrays)):
        return None
    axis = normalize_axis_index(axis, arrays[0].ndim + is_stack)
    shapes = {each.shape if is_stack else (each.ndim, each.shape[:axis], each.shape[axis + 1 :]) for each in arrays}
    if len(shapes) > 1 or len({each.dtype for each in arrays}) > 1:
        return None
    parts, end = [], 0
    for array in arrays:
        start, end = end, end + (1 if is_stack else array.shape[axis])
        for bounds, view in parts_of(array):
            first, last = (0, 1) if is_stack else bounds[axis]
            joined = (*bounds[:axis], (start + first, start + last), *bounds[axis + (not is_stack) :])
            parts.append((joined, np.expand_dims(view, axis) if is_stack else view))
    shape = arrays[0].shape
    return JoinedViews(parts, (*shape[:axis], end, *shape[axis + (not is_stack) :]), arrays[0].dtype)


def is_view(array: Any) -> bool:
    return isinstance(array, JoinedViews) or (isinstance(array, FileView) and _is_mapped(array))


def _is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


def parts_of(array: Any) -> list[tuple[Bounds, np.ndarray]]:
    """Returns the views that an array consists of, with their bounds in it."""
    if isinstance(array, JoinedViews):
        if array._array is None:
            return array._source
        array = array._array
    return [(tuple((0, size) for size in array.shape), array)]

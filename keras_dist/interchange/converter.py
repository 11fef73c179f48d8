"""Which elements of the tensors of Hugging Face each variable of a model has: KerasHub's converter shows it.

A converter of KerasHub only moves data from tensors to variables: it transposes, reshapes, slices, stacks and
concatenates. It runs here on a model without values, and on tensors that are views of an empty file. What a variable is
assigned is then a view, too, whose position and strides in that file are those of its elements in the tensor. Example,
the query kernel of GPT-2, of shape (768, 12, 64), which is a third of a fused tensor of shape (768, 2304) in float32:

    kernel.assign(np.reshape(file.get_tensor("h.0.attn.c_attn.weight")[:, :768], (768, 12, 64)))
    -> Elements(bounds=((0, 768), (0, 12), (0, 64)), tensor="h.0.attn.c_attn.weight", offset=0,
                shape=(768, 12, 64), strides=(9216, 256, 4))
"""

import bisect
import contextlib
import functools
import itertools
import math
import mmap
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_dist._keras.deferred_variables import give_value
from keras_dist.variables.lazy_tensor import Bounds
from keras_dist.variables.safetensors_files import DTYPES, FileView, is_view, parts_of


class TensorType(NamedTuple):
    """A tensor in a file of safetensors."""

    code: str  # of the dtype, as safetensors names it
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.code])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Elements(NamedTuple):
    """Elements of a tensor, as NumPy describes a view of it, that are a part of a variable."""

    bounds: Bounds  # of the part
    tensor: str
    offset: int  # of the first element, bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes


def elements_of_variables(convert: Any, variables: Iterable[Any], types: Mapping[str, TensorType]) -> dict[int, list]:
    """Runs `convert` on a loader of KerasHub, and returns the `Elements` of each variable by its id.

    The variables have no values, and get none. One whose value the converter computes has an empty list.
    """
    found: dict[int, list] = {}
    with tempfile.TemporaryFile() as file:
        tensors = _Tensors(file, types)
        for variable in variables:
            variable.assign = functools.partial(_record, found, tensors, variable)
        convert(_loader(tensors))
    return found


def read_values(convert: Any, variables: Iterable[Any], tensors: Mapping[str, np.ndarray], use: Callable) -> None:
    """Runs `convert` on tensors that have values, and calls `use` with each variable and the value that it is assigned.

    Tensors are views of files. Variables read what they are assigned where they are used: from some of them, a
    converter computes others.
    """

    def assign(variable: Any, value: Any) -> Any:
        give_value(variable, value)
        use(variable, value)
        return value

    for variable in variables:
        variable.assign = functools.partial(assign, variable)
    convert(_loader(_OpenFiles(tensors)))


def _record(found: dict[int, list], tensors: "_Tensors", variable: Any, value: Any) -> Any:
    if tuple(value.shape) != tuple(variable.shape):
        raise ValueError(
            f"{variable.path!r} has the shape {tuple(variable.shape)}, but what KerasHub reads for it in these tensors "
            f"has the shape {tuple(value.shape)}."
        )
    found[id(variable)] = tensors.elements(value) if is_view(value) else []
    return value


class _Tensors:
    """Stands for an open file of safetensors: one without values, which takes no space on the disk."""

    def __init__(self, file: Any, types: Mapping[str, TensorType]):
        self._types, self._names = types, list(types)
        self._indices = dict(zip(types, range(len(types)), strict=True))
        self._starts = list(itertools.accumulate((each.nbytes for each in types.values()), initial=0))
        file.truncate(max(1, self._starts[-1]))
        self._bytes = np.ndarray((self._starts[-1],), "uint8", mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._address = self._bytes.__array_interface__["data"][0]

    def keys(self) -> Any:
        return self._types.keys()

    def get_tensor(self, name: str) -> np.ndarray:
        index = self._indices[name]  # a KeyError tells some converters that a checkpoint lacks a tensor
        data = self._bytes[self._starts[index] : self._starts[index + 1]]
        return data.view(self._types[name].dtype).reshape(self._types[name].shape).view(_Tensor)

    def elements(self, value: Any) -> list[Elements]:
        found = []
        for bounds, view in parts_of(value):
            position = view.__array_interface__["data"][0] - self._address
            index = bisect.bisect_right(self._starts, position) - 1
            offset = position - self._starts[index]
            found.append(Elements(bounds, self._names[index], offset, view.shape, view.strides))
        return found


class _OpenFiles:
    """Stands for an open file that has the tensors of several."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = tensors

    def keys(self) -> Any:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]


class _Tensor(FileView):
    """A tensor whose dtype is that of the file: a converter that casts it writes back what the variable holds."""

    def astype(self, *args, **kwargs):
        return self


def _loader(tensors: _Tensors | _OpenFiles) -> Any:
    """Returns a loader of KerasHub that finds all tensors in one open file."""
    from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

    loader = SafetensorLoader.__new__(SafetensorLoader)  # whose __init__ looks for files
    contextlib.ExitStack.__init__(loader)
    loader.preset, loader.prefix, loader.fname = "", None, None
    loader.safetensor_config = {"weight_map": dict.fromkeys(tensors.keys(), "model.safetensors")}
    loader.safetensor_files = {"model.safetensors": tensors}
    return loader

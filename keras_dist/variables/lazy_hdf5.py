"""A tensor in an h5 file that is read where and when it is used, so that a process reads the parts that it holds."""

import io
import os
import struct
import weakref
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

Bounds = tuple[tuple[int, int], ...]  # where a part begins and ends in each dim

_SMALL = 2**20  # bytes up to which a tensor is read at once: it costs less than to read it later
_BAND = 2**24  # bytes that are read at a time where parts do not lie in one piece


class StoredTensor(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for the array that a dataset holds. What is done with it is done with the array, which is read for it.

    Only `read_parts` reads less than all.

    Args:
        dataset: an `h5py.Dataset`.
        dtype: the dtype of the array, where the file cannot tell.
    """

    __slots__ = ("__weakref__", "_array", "_dataset", "dtype", "shape")

    def __init__(self, dataset: Any, dtype: Any = None):
        self._dataset: Any = dataset
        self._array: np.ndarray | None = None
        self.shape: tuple[int, ...] = tuple(dataset.shape)
        self.dtype = np.dtype(dataset.dtype if dtype is None else dtype)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def settle(self) -> np.ndarray:
        """Reads the array, and needs the file no longer."""
        if self._array is None:
            self._array, self._dataset = self._read(tuple((0, size) for size in self.shape)), None
        return self._array

    def read_parts(self, parts: Sequence[Bounds]) -> Iterator[tuple[int, np.ndarray]]:
        """Yields parts of the array, of all dims each.

        Parts that lie in one piece in the file are read one after the other. Others are read together, in rows that
        lie in one piece, since a file is slow at many small pieces.

        Args:
            parts: where each of them begins and ends.

        Yields:
            The number of a part, and a new array.
        """
        if self._array is not None:
            yield from ((number, self._array[_slices(part)].copy()) for number, part in enumerate(parts))
        elif self._dataset.chunks is None and all(map(self._is_in_one_piece, parts)):
            yield from ((number, self._read(part)) for number, part in enumerate(parts))
        else:
            together = self._read_together(parts)
            yield from ((number, together.popleft()) for number in range(len(parts)))  # which keeps none for longer

    def _is_in_one_piece(self, part: Bounds) -> bool:
        sizes = [end - start for start, end in part]
        cut = [dim for dim, size in enumerate(sizes) if size != self.shape[dim]]
        return not cut or all(size == 1 for size in sizes[: cut[-1]])

    def _read_together(self, parts: Sequence[Bounds]) -> deque[np.ndarray]:
        results = [np.empty([end - start for start, end in part], self.dtype) for part in parts]
        around = [(min(start for start, _ in dim), max(end for _, end in dim)) for dim in zip(*parts, strict=True)]
        row = max(1, self.nbytes // max(1, self.shape[0]))
        step = max(1, _BAND // row)
        if self._dataset.chunks is not None:  # whole chunks, which may be compressed
            step = -(-step // self._dataset.chunks[0]) * self._dataset.chunks[0]
        for first in range(around[0][0] // step * step, around[0][1], step):
            rows = max(first, around[0][0]), min(first + step, around[0][1])
            band = self._read((rows, *around[1:]))
            for part, result in zip(parts, results, strict=True):
                start, end = max(rows[0], part[0][0]), min(rows[1], part[0][1])
                if start < end:
                    inner = [slice(s - a[0], e - a[0]) for (s, e), a in zip(part[1:], around[1:], strict=True)]
                    result[start - part[0][0] : end - part[0][0]] = band[
                        (slice(start - rows[0], end - rows[0]), *inner)
                    ]
        return deque(results)

    def _read(self, part: Bounds) -> np.ndarray:
        result = np.empty([end - start for start, end in part], self.dtype)
        if result.size:
            self._dataset.read_direct(result, _slices(part))
        return result

    def __array__(self, dtype=None, copy=None):
        array = self._array
        if array is None:
            array, copy = self._read(tuple((0, size) for size in self.shape)), None
        return np.array(array, dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if "out" in options:
            options["out"] = tuple(map(_settled, options["out"]))
        return getattr(ufunc, method)(*map(_settled, inputs), **options)

    def __jax_array__(self):
        return jnp.asarray(self.settle())

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.settle(), name)

    def __getitem__(self, key):
        return self.settle()[key]

    def __setitem__(self, key, value):
        self.settle()[key] = value

    def __len__(self) -> int:
        return len(self.settle())

    def __iter__(self):
        return iter(self.settle())

    def __contains__(self, value) -> bool:
        return value in self.settle()

    def __bool__(self) -> bool:
        return bool(self.settle())

    def __repr__(self) -> str:
        return repr(self.settle())

    def __reduce__(self):
        return np.asarray, (self.settle(),)


def _settled(value):
    return value.settle() if isinstance(value, StoredTensor) else value


def _slices(part: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in part)


def stored_tensor(dataset: Any) -> StoredTensor | None:
    """Returns a dataset as a tensor that is read later; None where it is small, or not of numbers.

    Args:
        dataset: an `h5py.Dataset`. That it holds bfloat16 stands in its attributes, as Keras writes it.
    """
    is_bfloat16 = dataset.attrs.get("dtype") == "bfloat16"
    if dataset.shape is None or (dataset.dtype.kind not in "biufc" and not is_bfloat16):
        return None
    tensor = StoredTensor(dataset, ml_dtypes.bfloat16 if is_bfloat16 else None)
    return tensor if tensor.ndim and tensor.nbytes > _SMALL else None


class Handed:
    """The tensors that a file has handed out and that live: they are read before it is closed."""

    def __init__(self):
        self._tensors: list[weakref.ref[StoredTensor]] = []

    def add(self, tensor: StoredTensor) -> None:
        """Takes a tensor down."""
        self._tensors = [reference for reference in self._tensors if reference() is not None]
        self._tensors.append(weakref.ref(tensor))

    def settle(self) -> None:
        """Reads all that somebody still holds."""
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None:
                tensor.settle()
        self._tensors = []


# ----------------------------------------------------------------------------------------------- a file in an archive


class _Section(io.RawIOBase):
    """A part of a file, to be read as a file."""

    def __init__(self, path: str, start: int, size: int):
        super().__init__()
        self._file, self._start, self._size, self._at = open(path, "rb"), start, size, 0  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def lies_plain(archive: zipfile.ZipFile, name: str) -> bool:
    """Whether a member of an archive on disk is neither compressed nor encrypted, so that parts of it can be read."""
    if name not in archive.NameToInfo or not isinstance(archive.filename, str) or not os.path.isfile(archive.filename):
        return False
    info = archive.getinfo(name)
    return info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1


def open_member(archive: zipfile.ZipFile, name: str) -> io.RawIOBase:
    """Opens a member of an archive of which `lies_plain` holds: any part of it is read as fast as of a file.

    Args:
        archive: the archive.
        name: the name of the member.

    Returns:
        A file to read from.
    """
    info, path = archive.getinfo(name), archive.filename
    assert path is not None
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        header = file.read(_HEADER.size)
    *_, name_length, extra_length = _HEADER.unpack(header)
    return _Section(path, info.header_offset + _HEADER.size + name_length + extra_length, info.file_size)


_HEADER = struct.Struct("<4s5H3L2H")  # of a member, as it stands before its name

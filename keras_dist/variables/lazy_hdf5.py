"""Tensors in HDF5 files as lazy tensors."""

import io
import os
import struct
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from keras_dist.variables.lazy_tensor import Bounds, LazyTensor, overlap, shape_of, slices_of, within

_MIN_LAZY_BYTES = 2**20  # tensors up to this size are read at once, which costs less than to defer it
_BAND_BYTES = 2**24  # read at a time where shards are not contiguous in the file


class LazyDataset(LazyTensor):
    """Stands for the array in an `h5py.Dataset`."""

    def __init__(self, dataset: Any, dtype: Any = None):
        super().__init__(dataset, dataset.shape, dataset.dtype if dtype is None else dtype)

    def _read_shards(self, shards: Sequence[Bounds]) -> Iterator[tuple[Bounds, np.ndarray]]:
        """Reads shards that are contiguous in the file one by one.

        Others are read together, in bands of full rows, because many small reads are slow.
        """
        if self._source.chunks is None and all(map(self._is_contiguous, shards)):
            yield from super()._read_shards(shards)
        else:
            arrays = self._read_in_bands(shards)
            yield from ((shard, arrays.popleft()) for shard in shards)  # frees each as soon as the caller does

    def _is_contiguous(self, shard: Bounds) -> bool:
        lengths = shape_of(shard)
        split = [dim for dim, size in enumerate(lengths) if size != self.shape[dim]]
        return not split or all(size == 1 for size in lengths[: split[-1]])

    def _read_in_bands(self, shards: Sequence[Bounds]) -> deque[np.ndarray]:
        arrays = [np.empty(shape_of(shard), self.dtype) for shard in shards]
        box = [(min(start for start, _ in dim), max(end for _, end in dim)) for dim in zip(*shards, strict=True)]
        rows = max(1, _BAND_BYTES // max(1, self.nbytes // max(1, self.shape[0])))
        if self._source.chunks is not None:  # full chunks, which may be compressed
            rows = -(-rows // self._source.chunks[0]) * self._source.chunks[0]
        start, end = box[0]
        for first in range(start // rows * rows, end, rows):
            band_bounds = ((max(first, start), min(first + rows, end)), *box[1:])
            band = self._read(band_bounds)
            for shard, array in zip(shards, arrays, strict=True):
                if (both := overlap(band_bounds, shard)) is not None:
                    array[within(shard, both)] = band[within(band_bounds, both)]
        return deque(arrays)

    def _read(self, bounds: Bounds) -> np.ndarray:
        result = np.empty(shape_of(bounds), self.dtype)
        if result.size:
            self._source.read_direct(result, slices_of(bounds))
        return result


def lazy_tensor(dataset: Any) -> LazyTensor | None:
    """Returns an `h5py.Dataset` as a lazy tensor, None if it is small or does not hold numbers."""
    is_bfloat16 = dataset.attrs.get("dtype") == "bfloat16"  # Keras records it there, because HDF5 lacks it
    if dataset.shape is None or (dataset.dtype.kind not in "biufc" and not is_bfloat16):
        return None
    tensor = LazyDataset(dataset, ml_dtypes.bfloat16 if is_bfloat16 else None)
    return tensor if tensor.ndim and tensor.nbytes > _MIN_LAZY_BYTES else None


# ----------------------------------------------------------------------------------------------- a file in an archive


def is_seekable(archive: zipfile.ZipFile, name: str) -> bool:
    """Whether a member of an archive on disk is neither compressed nor encrypted, so that any part can be read."""
    if name not in archive.NameToInfo or not isinstance(archive.filename, str) or not os.path.isfile(archive.filename):
        return False
    info = archive.getinfo(name)
    return info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1


# Local file header, which precedes a member's name. Source: PKWARE, ".ZIP File Format Specification", 4.3.7.
_HEADER = struct.Struct("<4s5H3L2H")


class OpenMember(io.BufferedReader):
    """A member of an archive, for which `is_seekable` holds, as a file with fast random access.

    `zipfile` before Python 3.12 seeks backwards by reading again from the start.
    """

    def __init__(self, archive: zipfile.ZipFile, name: str):
        assert archive.filename is not None
        super().__init__(io.FileIO(archive.filename))
        info = archive.getinfo(name)
        super().seek(info.header_offset)
        *_, name_length, extra_length = _HEADER.unpack(self.read(_HEADER.size))
        self._start, self._size = super().tell() + name_length + extra_length, info.file_size
        self.seek(0)

    def tell(self) -> int:
        return super().tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: self._start, os.SEEK_CUR: super().tell(), os.SEEK_END: self._start + self._size}[whence]
        return super().seek(origin + offset) - self._start

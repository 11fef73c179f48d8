"""Files of safetensors that are written in any order, each by one process.

Several processes do not write one file: network file systems lose bytes where two hosts write the same page of it.
"""

import contextlib
import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_dist._keras.internals import file_utils
from keras_dist._report.units import bytes_text
from keras_dist.interchange.converter import Elements, TensorType
from keras_dist.multihost import messaging
from keras_dist.variables.global_reads import run_on_every_process

INDEX = "model.safetensors.index.json"


class OutputFile(NamedTuple):
    """A file to be written."""

    name: str
    types: dict[str, TensorType]
    process: int  # which writes it


def planned_files(types: Mapping[str, TensorType], max_bytes: int, processes: int) -> list[OutputFile]:
    """Divides tensors, in their order, into files of at most `max_bytes` each, and the files among processes by bytes.

    A tensor that is larger has a file of its own. There are as many files as processes if tensors are small enough.
    """
    max_bytes = min(max_bytes, -(-sum(each.nbytes for each in types.values()) // processes))
    groups: list[dict[str, TensorType]] = []
    size = 0
    for name, each in types.items():
        if not groups or size + each.nbytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = each
        size += each.nbytes
    count, given = len(groups), [0] * processes
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files = []
    for name, group in zip(names if count > 1 else ["model.safetensors"], groups, strict=True):
        process = given.index(min(given))
        given[process] += sum(each.nbytes for each in group.values())
        files.append(OutputFile(name, group, process))
    return files


def index_of(files: Iterable[OutputFile]) -> dict:
    """Returns what a file with the name `INDEX` says about these files."""
    total = sum(each.nbytes for file in files for each in file.types.values())
    return {"metadata": {"total_size": total}, "weight_map": {name: file.name for file in files for name in file.types}}


class NewFolder:
    """A folder that several processes fill under a hidden name, next to its target, which it becomes when complete.

    A target that exists stays, since it may be a mounted file system: the hidden folder is in it, and its content is
    moved up, with config.json last. All processes must call the same methods. If one raises an exception, all do.
    """

    def __init__(self, directory: str | os.PathLike):
        given = os.fspath(directory)
        if file_utils.is_remote_path(given):
            raise ValueError(
                f"{given!r} is not on a file system of this machine, and files are mapped to be written. Pass a local "
                "directory, which all processes share, and copy it."
            )
        self.target = os.path.realpath(given)
        parent, name = os.path.split(self.target)
        part = f".{name}.part"
        self._is_in_target = os.path.isdir(self.target)
        if os.path.isfile(self.target) or (self._is_in_target and set(os.listdir(self.target)) - {part}):
            raise FileExistsError(f"{given!r} is not empty. Delete it, or pass another directory.")
        self.path = os.path.join(self.target if self._is_in_target else parent, part)

    def run(self, work: Callable[[], None], everywhere: bool = True) -> None:
        """Runs a function on all processes, or on process 0."""
        is_idle = not everywhere and messaging.process_index() > 0
        run_on_every_process(f"write {self.target!r}", (lambda: None) if is_idle else work)

    def create(self) -> None:
        def create() -> None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.makedirs(self.path)

        self.run(create, everywhere=False)

    def complete(self, write_others: Callable[[], None]) -> None:
        """Lets process 0 write what is left, and then moves the folder, or its content to one that there was."""

        def move() -> None:
            write_others()
            if not self._is_in_target:
                os.rename(self.path, self.target)
                return
            for name in sorted(os.listdir(self.path), key=lambda name: (name == "config.json", name)):
                os.rename(os.path.join(self.path, name), os.path.join(self.target, name))
            os.rmdir(self.path)

        self.run(move, everywhere=False)

    def remove(self) -> None:
        if messaging.process_index() == 0:
            shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def new_folder(directory: str | os.PathLike) -> Iterator[NewFolder]:
    """Provides a folder to fill; what is left of it is deleted if the block raises an exception."""
    folder = NewFolder(directory)
    try:
        yield folder
    except BaseException:
        folder.remove()
        raise


def write_json(folder: str, name: str, content: Any) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)


class FileWriter:
    """Creates a file in a folder, with space for its tensors, and writes elements of them.

    Raises OSError if there is not enough space, before anything is written.
    """

    def __init__(self, folder: str, file: OutputFile):
        self._types = file.types
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        for name, each in file.types.items():
            starts[name], end = end, end + each.nbytes
            header[name] = {"dtype": each.code, "shape": each.shape, "data_offsets": (starts[name], end)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        self._starts = {name: start + offset for name, offset in starts.items()}
        with open(os.path.join(folder, file.name), "w+b") as output:
            _reserve(output.fileno(), folder, start + end)
            output.write(struct.pack("<Q", len(text)) + text)
            output.flush()
            self._bytes = np.memmap(output, mode="r+")

    def write(self, name: str, values: np.ndarray, elements: Elements | None = None) -> None:
        """Writes a tensor, or some of its elements, converted to its dtype."""
        (_, shape), strides, start = self._types[name], None, self._starts[name]
        if elements is not None:
            shape, strides, start = elements.shape, elements.strides, start + elements.offset
        output: np.ndarray = np.ndarray(shape, self._types[name].dtype, self._bytes, start, strides)
        with np.errstate(over="ignore"):  # reported below
            output[...] = values
        if output.dtype == np.float16 and values.dtype != np.float16 and np.any(np.isinf(output) > np.isinf(values)):
            raise ValueError(
                f"{name!r} has values that are too large for float16, whose largest is 65,504. Pass dtype='bfloat16'."
            )

    def close(self) -> None:
        """Waits until everything is on the disk."""
        self._bytes.flush()


def _reserve(file: int, folder: str, size: int) -> None:
    """Takes space for a file. A full disk would kill a process that writes to a mapped file."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        os.truncate(file, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = bytes_text(shutil.disk_usage(folder).free)
        raise OSError(
            error.errno,
            f"{os.path.dirname(folder)} has {free} of free space, but a file of the export takes {bytes_text(size)}. "
            "Free some space, or choose a directory on a larger file system",
        ) from None

"""Checksums of the files of a checkpoint: damage is found before a value is read from them.

TensorStore has checksums of indices and small values, but neither of the data of arrays nor of Orbax's metadata. Each
process sums the files that it wrote, in parallel, before Orbax renames the checkpoint to its final name, so a complete
checkpoint always has its checksums.
"""

import asyncio
import errno
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import Any

from keras_dist.multihost import messaging

_NAME = "checksums.process_{}.json"  # size and checksum of each file, by path from this folder, and their own checksum
_CHUNK = 1 << 22  # bytes
# Errors that say that a file is damaged, not that this machine cannot read it now: a bad sector, a folder in its place.
_OF_DAMAGE = (errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ENOENT)
# Those of an object store that cannot be read now have no number.
_OF_SERVICES = "UNAVAILABLE|PERMISSION_DENIED|UNAUTHENTICATED|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED"


def write(folder: Any, files: Iterable[Any]) -> None:
    """Writes the checksums of files that this process wrote into a folder, which is a path of Etils, as they are."""
    names = {_name(file, folder): file for file in files}
    with futures.ThreadPoolExecutor() as executor:
        sums = dict(zip(names, executor.map(_size_and_sum, names.values()), strict=True))
    content = {"files": sums, "checksum": _own_checksum(sums)}
    (folder / _NAME.format(messaging.process_index())).write_text(json.dumps(content))


def is_of_damage(error: BaseException) -> bool:
    """Returns whether an error of reading comes from what is read: an OSError, or one of TensorStore, a ValueError."""
    code = re.search(r"os_error_code='?(\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(code[1]) if code else None
    return not re.search(_OF_SERVICES, str(error)) if number is None else number in _OF_DAMAGE


def array_handler(ocp: Any) -> type:
    """Returns Orbax's handler of arrays with checksums. `ocp` is Orbax's module."""
    orbax_handler = ocp.handlers.PyTreeHandler

    class Handler(orbax_handler):
        # A checkpoint has the name of the class that reads it, which is Orbax's.
        __module__, __qualname__ = orbax_handler.__module__, orbax_handler.__qualname__

        async def _background_save(self, *arguments, commit_futures, **options):
            """Waits for the other processes no longer than messages do; Orbax's barriers would do so for minutes."""
            for future in commit_futures:  # the writes of this process
                await asyncio.to_thread(future.result)
            await asyncio.to_thread(messaging.exchange, "writing of a checkpoint", None)
            await super()._background_save(*arguments, commit_futures=commit_futures, **options)

        async def _finalize(self, directory):
            """Is called between two barriers: all processes have written, and none may commit the checkpoint yet."""
            await super()._finalize(directory)  # process 0 merges the indices of all
            if messaging.process_index() == 0:
                await asyncio.to_thread(_describe_as_host_arrays, directory / "_METADATA")
            await asyncio.to_thread(lambda: write(directory, _written_by_this_process(directory)))
            await asyncio.to_thread(messaging.exchange, "checksums of a new checkpoint", None)

    return Handler


def _describe_as_host_arrays(metadata: Any) -> None:
    """Changes what Orbax reads if it is not told what to: NumPy's arrays, on any machine.

    Plain Keras without a distribution reads so. Orbax would look for the devices that the arrays were on.
    """
    content = json.loads(metadata.read_text())
    for entry in content["tree_metadata"].values():
        if entry["value_metadata"]["value_type"] == "jax.Array":
            entry["value_metadata"]["value_type"] = "np.ndarray"
    metadata.write_text(json.dumps(content))


def damage(checkpoint: Any) -> str | None:
    """Compares the files of a checkpoint, a path of Etils, with their checksums. All processes share the work.

    Returns what is wrong with a file, the same on all processes. None if nothing is, or if the checkpoint has no
    checksums: those that Keras or an earlier version of this package saved. Raises OSError on all processes if one
    cannot read a file for another reason, such as a missing permission.
    """
    found, failure = None, None
    sums: list[tuple[Any, int, int]] = []
    try:
        for file in sorted(checkpoint.glob(f"*/{_NAME.format('*')}")):
            expected = _read(file)
            if expected is None:
                found = f"file {_name(file, checkpoint)} has changed since it was saved"
            sums += [(file.parent / name, *size_and_sum) for name, size_and_sum in (expected or {}).items()]
        mine = sums[messaging.process_index() :: messaging.process_count()]
        with futures.ThreadPoolExecutor() as executor:
            found = found or next(filter(None, executor.map(lambda each: _problem(checkpoint, *each), mine)), None)
    except OSError as error:
        failure = str(error.strerror or error)
    all_found = messaging.exchange("checksums of a checkpoint", [found, failure])
    for process, (_, failure) in enumerate(all_found):
        if failure is not None:
            raise OSError(f"Process {process} cannot read checkpoint {checkpoint}: {failure}. Let all hosts read it.")
    return next((found for found, _ in all_found if found is not None), None)


def _read(file: Any) -> dict[str, tuple[int, int]] | None:
    """Returns what a file of checksums contains, None if it is damaged."""
    try:
        content = json.loads(file.read_text())
        return content["files"] if content["checksum"] == _own_checksum(content["files"]) else None
    except (ValueError, TypeError, KeyError, OSError) as error:  # not JSON any more, or not of that form
        if not is_of_damage(error):
            raise
        return None


def _own_checksum(sums: dict) -> int:
    return zlib.crc32(json.dumps(sums).encode())


def _problem(checkpoint: Any, file: Any, size: int, checksum: int) -> str | None:
    if not file.exists():
        return f"file {_name(file, checkpoint)} is missing"
    try:
        found = _size_and_sum(file)
    except OSError as error:
        if not is_of_damage(error):
            raise
        return f"file {_name(file, checkpoint)} cannot be read ({error.strerror})"
    if found[0] != size:
        return f"file {_name(file, checkpoint)} has {found[0]} bytes instead of {size}"
    if found[1] != checksum:
        return f"file {_name(file, checkpoint)} has changed since it was saved"
    return None


def _size_and_sum(file: Any) -> tuple[int, int]:
    size = checksum = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum


def _written_by_this_process(folder: Any) -> Iterator[Any]:
    """Returns the files in the folder that TensorStore has for this process; of process 0 also all that is shared."""
    own = f"ocdbt.process_{messaging.process_index()}"
    for path in folder.iterdir():
        if path.name == own or (messaging.process_index() == 0 and not path.name.startswith("ocdbt.process_")):
            yield from _files(path)


def _files(path: Any) -> Iterator[Any]:  # Etils has no recursive `glob`
    if path.is_dir():
        for inner in path.iterdir():
            yield from _files(inner)
    else:
        yield path


def _name(file: Any, folder: Any) -> str:
    return file.relative_to(folder).as_posix()

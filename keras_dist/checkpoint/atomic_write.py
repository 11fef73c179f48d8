"""A file is written whole or not at all: under another name, beside its place, and then moved there."""

import os
import tempfile
from collections.abc import Callable
from typing import Any


def write_whole(path: str | os.PathLike, write: Callable[[str], Any]) -> Any:
    """Lets a function write a file, a folder or a file and others beside it, and puts all in place when it is done.

    A process that is killed leaves what was there before, and a folder beside it whose name begins with a dot. Files
    are put in place one by one, JSON last, since that names the others; other files of a folder stay.

    Args:
        path: where it belongs.
        write: writes to the path that it is given, which has the same name in another folder.

    Returns:
        What the function returns.

    Raises:
        OSError: what belongs there cannot be written or put in place. Where the folder of the path is missing or must
            not be written to, the function is called with the path itself.

    Example:

    >>> import pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "notes.txt")
    ...     write_whole(path, lambda other: pathlib.Path(other).write_text("whole"))
    ...     path.read_text(), os.listdir(folder)
    5
    ('whole', ['notes.txt'])
    """
    given = os.path.basename(os.fspath(path))
    folder, name = os.path.split(os.path.realpath(path))  # a link stays one
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return write(os.fspath(path))  # which makes the folder, or says what is wrong
    with tempfile.TemporaryDirectory(prefix=f".{name}.part-", dir=folder) as part:
        result = write(os.path.join(part, given))
        if given != name:
            os.rename(os.path.join(part, given), os.path.join(part, name))
        _move_all(part, folder)
    return result


def _move_all(source: str, target: str) -> None:
    for name in sorted(os.listdir(source), key=lambda name: (name.endswith(".json"), name)):
        here, there = os.path.join(source, name), os.path.join(target, name)
        if os.path.isdir(here) and os.path.isdir(there):
            _move_all(here, there)
        else:
            os.replace(here, there)

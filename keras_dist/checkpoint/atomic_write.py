"""Writes files completely or not at all: under a temporary name next to the target, then renamed."""

import os
import tempfile
from collections.abc import Callable
from typing import Any


def write_atomically(path: str | os.PathLike, write: Callable[[str], Any]) -> Any:
    """Lets a function write a file, a folder, or a file and others next to it, and moves all into place at the end.

    The function is called with a path that has the target's name in another folder, or with the target itself if its
    folder is missing or not writable, to create that or to raise its own error. Its result is returned. A process that
    is killed leaves the previous files, and a folder next to them whose name starts with a dot. Files are moved one by
    one, JSON last because it names the others; other files in a target folder stay.
    """
    path = os.fspath(path).rstrip(os.sep)  # of a folder, it may end in one
    given_name = os.path.basename(path)
    folder, name = os.path.split(os.path.realpath(path))  # a symbolic link stays one
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return write(path)
    with tempfile.TemporaryDirectory(prefix=f".{name}.part-", dir=folder) as part:
        result = write(os.path.join(part, given_name))
        if given_name != name:
            os.rename(os.path.join(part, given_name), os.path.join(part, name))
        _move_all(part, folder)
    return result


def _move_all(source: str, target: str) -> None:
    for name in sorted(os.listdir(source), key=lambda name: (name.endswith(".json"), name)):
        moved, destination = os.path.join(source, name), os.path.join(target, name)
        if os.path.isdir(moved) and os.path.isdir(destination):
            _move_all(moved, destination)
        else:
            os.replace(moved, destination)

"""What can be known about a directory before anything is saved in it: whether it is writable, large enough and free."""

import os
import shutil
import socket
import sys
import tempfile
from typing import IO

from keras_dist._report.units import bytes_text

_LOCK = ".in_use"  # the file that a running job has locked; what is in it says which job


def why_not_writable(directory: str, size: int) -> str | None:
    """Creates a directory of this machine's file systems, and returns why a checkpoint cannot be written, or None."""
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return f"{directory} is not writable ({error.strerror}). Choose a directory that this process may write to."
    free = shutil.disk_usage(directory).free
    if free < size:
        return (
            f"{directory} has {bytes_text(free)} of free space, but a checkpoint of this model takes "
            f"{bytes_text(size)}. Free some space, or choose a directory on a larger file system."
        )
    return None


class DirectoryLock:
    """Keeps other jobs out of a directory until `release`, or until the process ends.

    Locks of POSIX `fcntl` belong to a process: the system releases them when it is killed, and child processes do not
    inherit them. Where a file system has none, nothing is locked.
    """

    def __init__(self, directory: str):
        self.problem: str | None = None  # which other job has the directory
        self._file: IO | None = None
        if sys.platform == "win32":
            return
        import fcntl

        self._file = open(os.path.join(directory, _LOCK), "a+")  # noqa: SIM115 (closed by `release`)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._file.seek(0)
            self.problem = (
                f"{directory} is used by another job that is running: {self._file.read().strip() or 'unknown'}. Wait "
                "until it has ended, or choose another directory."
            )
            self.release()
            return
        except OSError:  # the file system has no locks
            return
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Lets other jobs use the directory. Closing a file releases its locks."""
        if self._file is not None:
            self._file.close()
            self._file = None

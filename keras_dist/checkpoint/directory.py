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
        self.problem: str | None = None  # why the directory cannot be used, such as which other job has it
        self._path = os.path.join(directory, _LOCK)
        self._file: IO | None = None
        self.lock()

    def lock(self) -> bool:
        """Locks the directory, again if it was removed. Returns False if this has locked it already."""
        if sys.platform == "win32" or self._is_locked():
            return False
        import fcntl

        self.release()
        directory = os.path.dirname(self._path)
        try:
            os.makedirs(directory, exist_ok=True)
            self._file = open(self._path, "a+", errors="replace")  # noqa: SIM115 (closed by `release`)
        except OSError as error:
            self.problem = (
                f"{self._path} cannot be opened ({error.strerror}), so this job cannot tell whether another one uses "
                f"{directory}. Delete that file if none does, or choose another directory."
            )
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._file.seek(0)
            self.problem = (
                f"{directory} is used by another job that is running: {self._file.read().strip() or 'unknown'}. Wait "
                f"until it has ended, or choose another directory. If no such job runs, delete {self._path}, which its "
                "file system keeps locked."
            )
            self.release()
        except OSError:
            pass  # the file system has no locks
        else:
            self._file.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=self._file, flush=True)
        return True

    def _is_locked(self) -> bool:
        """Whether the file that this has opened is still the one in the directory."""
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        """Lets other jobs use the directory. Closing a file releases its locks."""
        if self._file is not None:
            self._file.close()
            self._file = None

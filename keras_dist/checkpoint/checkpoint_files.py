"""The checkpoints in a directory: what all processes together open, read, write and close. Orbax writes the files."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from keras_dist._keras.training_state import lent
from keras_dist._report.units import counted
from keras_dist._report.user_warnings import warn
from keras_dist.checkpoint import checksums, model_description, restore
from keras_dist.checkpoint.directory import DirectoryLock, why_not_writable
from keras_dist.multihost import messaging

PROGRESS = "progress"  # the folder of a checkpoint with one file of each process, next to the variables
_MARKERS = {PROGRESS, restore.ARRAYS, "_CHECKPOINT_METADATA", "commit_success.txt"}  # each checkpoint has some of them


class CheckpointFiles:
    """The checkpoints of one `fit`, by the number of batches before them, in a directory that all processes share.

    `model` decides how much space one takes. With `on_background`, `save` returns before all is written.
    """

    def __init__(self, directory: str, model: Any, max_to_keep: int | None, on_background: bool):
        self.waiting_time = 0.0  # seconds that `save` and `close` took
        is_local = "://" not in directory
        self._directory = restore.etils_path(os.path.abspath(directory) if is_local else directory)
        self._max_to_keep, self._on_background = max_to_keep, on_background
        self._lock: DirectoryLock | None = None
        self._writing: _Writing | None = None
        self._model: str | None = None  # its description
        try:
            if is_local:
                self._reserve(model)
            self._saved = [int(step) for step in reversed(restore.steps(str(self._directory)))]
            self._require_same_newest()
            folders = self._named_as_checkpoints() if messaging.process_index() == 0 else []
            _require_checkpoints(folders)
            if messaging.process_index() == 0:
                self._remove_unfinished(folders)
                self._model = model_description.describe(model)
        except BaseException:
            self.close()
            raise

    def _reserve(self, model: Any) -> None:
        size = sum(array.nbytes for array in jax.tree.leaves(restore.state_tree(model)))
        problem = why_not_writable(str(self._directory), size)
        if problem is None and messaging.process_index() == 0:
            self._lock = DirectoryLock(str(self._directory))
            problem = self._lock.problem
        _raise_on_all_processes(problem)

    def _keep_lock(self) -> None:
        """Locks the directory again if it was removed: another job may have it by now."""
        if self._lock is not None and self._lock.lock() and self._lock.problem is None:
            warn(
                f"{self._directory}, or .in_use in it, was removed while this job uses it. It is created again, and "
                "the next checkpoint is saved in it. Remove it only when training has ended.",
            )
        _raise_on_all_processes(None if self._lock is None else self._lock.problem)

    def _named_as_checkpoints(self) -> list[Any]:
        """Returns the folders that have the name of a checkpoint, or of one that is being written."""
        paths = self._directory.iterdir() if self._directory.exists() else ()
        return [path for path in paths if re.fullmatch(r"\d+(\.orbax-checkpoint-tmp.*)?", path.name) and path.is_dir()]

    def _remove_unfinished(self, folders: list[Any]) -> None:
        """Removes what a killed job has left: a folder of another name, or at an object store one that lacks a file."""
        complete = {str(step) for step in self._saved}
        for path in folders:
            if path.name not in complete:
                _remove(path)

    def _require_same_newest(self) -> None:
        steps = messaging.exchange("TrainingCheckpoint", self._saved[-1] if self._saved else None)
        if len({*steps}) > 1:
            found = ", ".join(
                f"{'none' if other is None else 'the one after ' + counted(other, 'batch')} on process {process}"
                for process, other in enumerate(steps)
            )
            raise ValueError(
                f"Processes find different newest checkpoints in {self._directory}: {found}. Choose a directory on a "
                "file system that all hosts share."
            )

    def restore(self, model: Any) -> tuple[int, dict] | None:
        """Restores a model from the newest undamaged checkpoint; None if the directory has none.

        Returns the number of batches before it, and what this process saved as `progress` or, if the number of
        processes has changed, what process 0 saved. Damaged ones that are newer are renamed.
        """
        if not self._saved:
            return None
        directory, steps = str(self._directory), list(map(str, reversed(self._saved)))
        restored = restore.restore(model, directory, steps, read_progress=self._progress)
        if restored.damaged:
            renamed = self._rename_damaged(list(restored.damaged))
            self._saved = [step for step in self._saved if str(step) not in restored.damaged]
            warn(
                f"{restore.damage_text(directory, restored.damaged)}. Training continues from "
                f"{self._directory / restored.step}. What is damaged is renamed to {', '.join(renamed)}; delete it "
                "when nothing in it is needed.",
            )
        return int(restored.step), restored.progress

    def _rename_damaged(self, steps: list[str]) -> list[str]:
        """Renames checkpoints, and returns their names, which Orbax does not take for those of checkpoints."""
        directory, problem, renamed = self._directory, None, []
        for step in steps if messaging.process_index() == 0 else []:
            names = itertools.chain([f"{step}.damaged"], (f"{step}.{count}.damaged" for count in itertools.count(1)))
            name = next(name for name in names if not (directory / name).exists())
            try:
                (directory / step).rename(directory / name)
            except OSError as error:
                problem = f"{directory / step} is damaged and cannot be renamed ({error.strerror}). Delete it."
                break
            renamed.append(name)
        problem, renamed = messaging.exchange("renaming of checkpoints", [problem, renamed])[0]
        if problem is not None:
            raise OSError(problem)
        return renamed

    def save(self, batches: int, model: Any, progress: dict) -> None:
        """Saves all variables of a model, and what JSON can represent, for each process its own.

        Raises OSError if this checkpoint or the one before could not be written, ProcessFailure if another process
        failed.
        """
        with self._waiting():
            self._finish()
            self._keep_lock()  # all wait here for one that still deletes a checkpoint, longer than Orbax would
            arrays = jax.tree.map(lent, restore.state_tree(model))
            files = {_file_name(): json.dumps(progress), model_description.FILE: self._model}
            content = {restore.ARRAYS: arrays, PROGRESS: _ProcessFiles(files)}
            self._saved.append(batches)
            obsolete = [] if self._max_to_keep is None else self._saved[: -self._max_to_keep]
            self._saved = self._saved[len(obsolete) :]
            self._writing = _Writing(self._directory, batches, content, obsolete)
            _wait_for(self._writing.is_copied.is_set, self._writing.is_copied.wait)
            if not self._on_background:
                self._finish()

    def raise_failure(self) -> None:
        """Raises what `save` raises, if the last checkpoint is known to fail. Does not wait."""
        if self._writing is not None and (self._writing.error is not None or messaging.known_failure is not None):
            self._finish()

    def close(self) -> None:
        """Waits until everything is written, and lets other jobs use the directory. May be called again."""
        lock, self._lock = self._lock, None
        try:
            with self._waiting():
                self._finish()
        finally:
            if lock is not None:
                lock.release()

    def _finish(self) -> None:
        """Waits until the last checkpoint is written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            _wait_for(lambda: not writing.is_alive(), writing.join)
            if writing.error is not None:
                raise writing.error

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.waiting_time += time.perf_counter() - begin

    def _progress(self, path: str) -> dict:
        folder = restore.etils_path(path) / PROGRESS
        file = folder / _file_name()
        if file.exists():
            return json.loads(file.read_text())
        files = [*folder.glob("process_0-of-*.json")]
        if not files:
            raise restore.DamageError(f"file {PROGRESS}/process_0-of-*.json is missing, which TrainingCheckpoint saves")
        progress = json.loads(files[0].read_text())
        if not _is_of_all_processes(progress, [json.loads(each.read_text()) for each in folder.glob("process_*.json")]):
            progress["data"]["source"] = None
            before = counted(files[0].name.removesuffix(".json").rpartition("-")[2], "process")
            warn(
                f"{self._directory} was saved by {before}, not {messaging.process_count()}, so its states of Grain "
                "iterators, which are not known to be equal, cannot be restored. The finished batches of this epoch "
                "are read again and dropped, and rows may come in another order. To restore the states, start "
                f"{before}.",
            )
        return progress


def _require_checkpoints(folders: list[Any]) -> None:
    """Raises ValueError for a folder of something else, since those that are not needed are deleted."""
    other = next((path for path in folders if path.name.isdecimal() and not _is_checkpoint(path)), None)
    _raise_on_all_processes(
        other
        and f"{other} has the name of a checkpoint, but is none. TrainingCheckpoint deletes checkpoints that are no "
        "longer needed, so pass a directory of its own."
    )


def _is_checkpoint(path: Any) -> bool:
    """Returns whether a folder is a checkpoint, or what is left of one that was not written or deleted to the end."""
    names = {each.name for each in path.iterdir()}
    return path.name == str(int(path.name)) and (not names or not names.isdisjoint(_MARKERS))


def _is_of_all_processes(progress: dict, saved: Iterable[dict]) -> bool:
    """Returns whether a process that finds the state of a Grain iterator continues where all processes were.

    It does if the states of all processes that saved them are equal, and the rows of a global batch are known.
    """
    if progress["data"] is None or progress["data"]["source"] is None:
        return True
    states = {(data["source"], data.get("rows")) for data in (each["data"] for each in saved)}
    return len(states) == 1 and progress["data"].get("rows") is not None


def _raise_on_all_processes(problem: str | None) -> None:
    for found in messaging.exchange("TrainingCheckpoint directory", problem):
        if found is not None:
            raise ValueError(found)


def _wait_for(is_done: Callable[[], bool], wait: Callable[[float], Any]) -> None:
    """Waits for what may need other processes; raises ProcessFailure when one of them has failed."""
    while not is_done():
        wait(messaging.TICK)
        failure = messaging.known_failure
        if failure is not None and not is_done():
            raise messaging.ProcessFailure(failure)


class _Writing(threading.Thread):
    """Writes a checkpoint, and then deletes others.

    Processes wait for one another in Orbax, without an end where one of them could not write. Threads that Orbax starts
    are daemons since this one is, so none keeps a program from ending.
    """

    def __init__(self, directory: Any, batches: int, content: dict[str, Any], obsolete: list[int]):
        super().__init__(name="keras_dist_checkpoint", daemon=True)
        self.is_copied = threading.Event()  # set when the values may change
        self.error: Exception | None = None  # why the checkpoint is not complete
        self._directory, self._batches, self._content, self._obsolete = directory, batches, content, obsolete
        self.start()

    def run(self) -> None:
        orbax = restore.orbax()
        registry = orbax.handlers.local_registry()
        registry.add(checksums.array_handler(orbax), checkpointable_name=restore.ARRAYS)
        context = orbax.Context()
        context.checkpointables.registry = registry
        # By default threads that nothing ends wait minutes for a folder that could not be created.
        context.asynchronous.create_directories_asynchronously = False
        context.asynchronous.timeout_secs = max(context.asynchronous.timeout_secs, int(messaging.timeout))
        try:
            with context:
                response = orbax.save_checkpointables_async(self._directory / str(self._batches), self._content)
            del self._content
            self.is_copied.set()
            response.result()
        except Exception as error:
            self.error = _explained(error, self._directory)
            messaging.report_failure(self.error)  # the others wait for this process, which may be in a step
        else:
            for batches in self._obsolete if messaging.process_index() == 0 else ():
                _remove(self._directory / str(batches))
        finally:
            self.is_copied.set()


def _remove(path: Any) -> None:
    try:
        path.rmtree(missing_ok=True)
    except OSError as error:
        warn(f"{path} is no longer needed and cannot be deleted ({error.strerror}). Delete it.")


def _explained(error: Exception, directory: Any) -> Exception:
    """Returns an OSError for an error of files: one of Python, or one of TensorStore, which is a ValueError."""
    if not (isinstance(error, OSError) and error.errno is not None) and "os_error_code" not in str(error):
        return error
    explained = OSError(
        f"A checkpoint could not be written to {directory}: {' '.join(str(error).split())[:300]}. The complete ones "
        "before it are not changed. Free some space or repair the file system, and start the program again to continue "
        "from the newest."
    )
    explained.__cause__ = error
    return explained


class _ProcessFiles:
    """Lets Orbax write files of each process into a checkpoint: texts by name, of which some may be None."""

    def __init__(self, texts: dict[str, str | None]):
        self.texts = {name: text for name, text in texts.items() if text is not None}

    async def save(self, directory):
        # At once: what is written later may come after another process has committed the checkpoint.
        await asyncio.to_thread(self._write, await directory.await_creation())
        return asyncio.sleep(0)  # nothing is left to be done in the background

    def _write(self, folder) -> None:
        for name, text in self.texts.items():
            (folder / name).write_text(text)
        checksums.write(folder, [folder / name for name in self.texts])

    async def load(self, directory):
        raise NotImplementedError  # a process may read the file of another one


def _file_name() -> str:
    return f"process_{messaging.process_index()}-of-{messaging.process_count()}.json"

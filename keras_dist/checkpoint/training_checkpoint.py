"""`TrainingCheckpoint`: training that is interrupted at any moment resumes as if it had not been."""

import asyncio
import json
import os
import warnings
from typing import Any, Literal

import keras

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import active_distribution
from keras_dist.checkpoint import restore
from keras_dist.data.position import DataPosition, RandomState, current_position, resume_next_epoch
from keras_dist.multihost import messaging

_PROGRESS = "progress"  # the folder of a checkpoint with one file of each process, next to the variables


class TrainingCheckpoint(keras.callbacks.Callback):
    """Saves the state of training, and resumes from the newest complete checkpoint when `fit` starts.

    A program that is restarted with the same arguments continues exactly where it was interrupted, also in the middle
    of an epoch: with the same batches in the same order, the same random numbers and the same losses. It may restart
    on another mesh, with another strategy or with another number of processes; each device then reads its own shards.

    **What is saved:** all variables of the model, its optimizer and its metrics; the states of random generators (of
    layers, Keras's global one, Python's `random`, NumPy's global one); the epoch, the number of batches done in it, and
    the position in the data. Saving runs in the background. A checkpoint counts only when it is complete, so a process
    that is killed while it writes loses at most that checkpoint. `model.load_weights(directory)` reads it too.

    **How data resumes:** arrays and `keras.utils.PyDataset` skip the batches that are done. Grain datasets and loaders
    restore the state of their iterators, which each process saves for itself. A `tf.data.Dataset`, a generator or a
    PyTorch loader is read from its beginning, and the batches that are done are dropped; if it shuffles, give it a
    fixed seed.

    **What is not saved:** the state of other callbacks (`EarlyStopping`, `ReduceLROnPlateau` and the history that `fit`
    returns start anew), and what a `PyDataset` keeps in its own attributes, such as an order that it shuffles in
    `on_epoch_end`.

    Args:
        directory: where to save. All processes must share it, and each `fit` of a program needs its own. A `fit` that
            had reached its last epoch has nothing left to do when it is restarted.
        save_freq: `"epoch"`, or a number of batches.
        max_to_keep: number of newest checkpoints to keep, None for all.
        save_on_background: whether training continues while a checkpoint is written. Either way, the state of the step
            at which saving started is written.

    Raises:
        ImportError: Orbax is not installed (`pip install 'keras-dist[checkpoint]'`).
        ValueError: an argument is out of range. When `fit` starts: no distribution of keras_dist is installed, the
            processes find different checkpoints, or the checkpoint is of another model.

    Example:

    >>> import tempfile
    >>> import numpy as np
    >>> import keras_dist as kd
    >>> def train(directory, epochs):
    ...     with kd.DataParallel().scope():
    ...         keras.utils.set_random_seed(1)
    ...         model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...         model.compile("adam", "mse")
    ...         rows = np.ones((64, 4), "float32")
    ...         callbacks = [kd.TrainingCheckpoint(directory)]
    ...         return model.fit(rows, rows[:, :1], epochs=epochs, callbacks=callbacks, verbose=0).epoch
    >>> directory = tempfile.mkdtemp()
    >>> train(directory, epochs=2)
    [0, 1]
    >>> train(directory, epochs=3)  # the program is restarted
    [2]
    """

    def __init__(
        self,
        directory: str,
        save_freq: int | Literal["epoch"] = "epoch",
        max_to_keep: int | None = 1,
        save_on_background: bool = True,
    ):
        super().__init__()
        if save_freq != "epoch" and (not isinstance(save_freq, int) or isinstance(save_freq, bool) or save_freq < 1):
            raise ValueError(f"save_freq={save_freq!r} is neither 'epoch' nor a number of batches of at least 1.")
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep={max_to_keep!r} is less than 1. Pass None to keep all checkpoints.")
        self.directory = str(directory)
        self.save_freq = save_freq
        self._interval = None if isinstance(save_freq, str) else save_freq  # batches
        self.max_to_keep = max_to_keep
        self.save_on_background = save_on_background
        restore.orbax()
        self._checkpointer: Any = None
        self._epoch = self._batches = 0  # the current epoch, and the batches done in it
        self._batches_before_epoch = self._saved_at = 0  # batches in all: before this epoch, and at the last save
        self._progress: dict | None = None  # what was restored and is not used yet

    def on_train_begin(self, logs=None):
        """Restores the newest complete checkpoint, if there is one."""
        if active_distribution() is None:
            raise ValueError(
                "TrainingCheckpoint needs a distribution of keras_dist, but none is active in this thread. Call "
                "keras_dist.set_distribution(keras_dist.DataParallel()) before building the model, even with one "
                "device."
            )
        model: Any = self.model
        self._close()  # the checkpointer of a fit that ended with an exception
        self._checkpointer = self._open()
        self._epoch = self._batches = self._batches_before_epoch = self._saved_at = 0
        self._progress = None
        step = self._newest_step()
        if step is None:
            internals.set_initial_epoch(model, None)
            return
        progress = self._read_progress(step)
        restore.restore(model, str(self._checkpointer.directory / str(step)), with_metrics=True)
        internals.set_global_seed(progress["seed"])
        self._saved_at, self._batches_before_epoch = step, step - progress["batches"]
        self._progress = progress | {"metrics": [(variable, variable.value) for variable in model.metrics_variables]}
        internals.set_initial_epoch(model, progress["epoch"])

    def on_epoch_begin(self, epoch, logs=None):
        """Starts an epoch, or resumes in the middle of one."""
        internals.set_initial_epoch(self.model, None)  # for the next fit; this one has begun
        self._epoch, self._batches = epoch, 0
        progress, self._progress = self._progress, None
        if progress is None:
            resume_next_epoch(0)
            return
        if progress["batches"]:
            for variable, value in progress["metrics"]:  # Keras has reset them
                variable.assign(value)
        RandomState.from_json(progress["random"]).restore()
        position = None if progress["data"] is None else DataPosition.from_json(progress["data"])
        resume_next_epoch(progress["batches"], position)

    def on_train_batch_end(self, batch, logs=None):
        """Saves after every `save_freq` batches."""
        self._batches, position = current_position()
        since_save = self._batches_before_epoch + self._batches - self._saved_at
        if self._interval is not None and since_save >= self._interval:
            self._save(self._epoch, self._batches, position)

    def on_test_begin(self, logs=None):
        """Saves if training was stopped in the middle of an epoch, before validation overwrites the metrics."""
        self._save_if_stopped()

    def _save_if_stopped(self) -> None:
        batches, position = current_position()
        if batches:
            self._save(self._epoch, batches, position)

    def on_epoch_end(self, epoch, logs=None):
        """Saves at the end of each epoch with `save_freq="epoch"`, and at the end of training."""
        self._save_if_stopped()
        batches, position = current_position()
        self._batches_before_epoch += self._batches
        parameters: Any = self.params
        is_due = self._interval is None or epoch + 1 >= parameters["epochs"]
        if is_due and batches == 0:
            self._save(epoch + 1, 0, position)

    def on_train_end(self, logs=None):
        """Waits until the last checkpoint is written."""
        internals.set_initial_epoch(self.model, None)
        self._close()

    def _close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    # ------------------------------------------------------------------------------------------------------- files

    def _open(self) -> Any:
        training = restore.orbax().training
        directory = self.directory if "://" in self.directory else os.path.abspath(self.directory)
        keep = None if self.max_to_keep is None else training.preservation_policies.LatestN(self.max_to_keep)
        return training.Checkpointer(
            directory,
            preservation_policy=keep,
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            cleanup_tmp_directories=True,
        )

    def _newest_step(self) -> int | None:
        """Returns the number of batches before the newest complete checkpoint, which all processes must agree on."""
        latest = self._checkpointer.latest
        step = None if latest is None else latest.step
        steps = messaging.exchange("TrainingCheckpoint", step)
        if any(other != step for other in steps):
            found = ", ".join(
                f"{'none' if other is None else f'the one after {other} batches'} on process {process}"
                for process, other in enumerate(steps)
            )
            raise ValueError(
                f"Processes find different newest checkpoints in {self.directory}: {found}. Choose a directory on a "
                "file system that all hosts share."
            )
        return step

    def _save(self, epoch: int, batches: int, position: DataPosition | None) -> None:
        """Saves, unless that was done at the same batch."""
        total = self._batches_before_epoch + batches
        if total <= self._saved_at:
            return
        progress = {
            "epoch": epoch,
            "batches": batches,
            "data": None if position is None else position.as_json(),
            "random": RandomState.capture().as_json(),
            "seed": internals.global_seed(),
        }
        model: Any = self.model
        content = {restore.ARRAYS: restore.state_tree(model), _PROGRESS: _ProcessFile(json.dumps(progress))}
        if self.save_on_background:
            self._checkpointer.save_checkpointables_async(total, content)
        else:
            self._checkpointer.save_checkpointables(total, content)
        self._saved_at = total

    def _read_progress(self, step: int) -> dict:
        """Returns what this process saved or, if the number of processes has changed, what process 0 saved."""
        folder = self._checkpointer.directory / str(step) / _PROGRESS
        file = folder / _file_name()
        if file.exists():
            return json.loads(file.read_text())
        (file,) = folder.glob("process_0-of-*.json")
        progress = json.loads(file.read_text())
        if progress["data"] is not None and progress["data"]["source"] is not None:
            progress["data"]["source"] = None
            before = file.name.removesuffix(".json").rpartition("-")[2]
            warnings.warn(
                f"{self.directory} was saved by {before} processes, not {messaging.process_count()}, so its states of "
                "Grain iterators cannot be restored. The finished batches of this epoch are read again and dropped, "
                f"and rows may come in another order. To restore the states, start {before} processes.",
                stacklevel=2,
            )
        return progress


class _ProcessFile:
    """Lets Orbax write one file of each process into a checkpoint."""

    def __init__(self, text: str):
        self.text = text

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            await asyncio.to_thread((path / _file_name()).write_text, self.text)

        return write()

    async def load(self, directory):
        """Is not called: a process may read the file of another one."""
        raise NotImplementedError


def _file_name() -> str:
    return f"process_{messaging.process_index()}-of-{messaging.process_count()}.json"

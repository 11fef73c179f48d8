"""`TrainingCheckpoint`: training that is cut off at any moment goes on as if it had not been."""

import asyncio
import json
import os
import warnings
from typing import Any, Literal

import keras

from keras_dist._keras import internals
from keras_dist._patches import epoch_iterator
from keras_dist._patches.resumable_iterator import RandomState, SourceState
from keras_dist.checkpoint import restore
from keras_dist.multihost import messaging

_PROGRESS = "progress"  # what each process knows, next to the variables in a checkpoint


class TrainingCheckpoint(keras.callbacks.Callback):
    """Saves training as it goes, and at the begin of `fit` goes on where the newest complete checkpoint was saved.

    A program that is started again with the same arguments trains on as if it had never ended: the same batches in the
    same order, the same random numbers, the same losses, in the middle of an epoch as well. It may be started on
    another mesh, under another strategy and as another number of processes; every device then reads its own part.

    A checkpoint holds all variables of the model, its optimizer and its metrics, the states of random generators
    (layers', Keras's global one, Python's `random`, numpy's global one), the epoch and the number of batches done in
    it, and where the data stand. Arrays and `keras.utils.PyDataset` go on without reading what was done; grain's
    datasets and loaders from the state of their iterators, which each process writes for itself; a `tf.data.Dataset`,
    a generator or a PyTorch loader is read from its beginning, and what was done is dropped. It is written while
    training goes on, and counts only when it is complete: a process that is killed while it writes loses nothing but
    that one. `model.load_weights(directory)` reads it as well.

    What other callbacks remember is not in it: `EarlyStopping` and `ReduceLROnPlateau` begin anew, and so does the
    history that `fit` returns. Nor is what a `PyDataset` keeps of itself, such as an order that it shuffles in
    `on_epoch_end`. Data whose shuffling is seeded by the program (tf.data, PyTorch) must be seeded the same each time.
    A `fit` that had come to its last epoch has nothing to do when it is started again; each `fit` of a program needs a
    directory of its own.

    Args:
        directory: where to save; every process must see it. One for each `fit` of a program.
        save_freq: `"epoch"`, or after how many batches.
        max_to_keep: how many of the newest checkpoints to keep, None for all.
        save_on_background: whether training goes on while a checkpoint is written. What is written is the state of the
            step at which it was begun either way.

    Raises:
        ImportError: Orbax is not installed (`pip install 'keras-dist[checkpoint]'`).
        ValueError: at the begin of `fit`, no distribution of this package is installed, processes see different
            checkpoints, or the model is not the one that was saved.

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
    >>> train(directory, epochs=3)  # the program is started again
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
            raise ValueError(f"save_freq is 'epoch' or a number of batches of at least 1. Received: {save_freq!r}.")
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep is at least 1, or None for all. Received: {max_to_keep!r}.")
        self.directory = str(directory)
        self.save_freq = save_freq
        self._every = None if isinstance(save_freq, str) else save_freq  # batches
        self.max_to_keep = max_to_keep
        self.save_on_background = save_on_background
        restore.orbax()
        self._checkpointer: Any = None
        self._epoch = self._batches = 0  # the epoch, and how many batches of it are done
        self._before_epoch = self._saved_at = 0  # how many were done before it, and when it was saved last
        self._found: dict | None = None  # what was restored and is not used yet
        self._metrics: list[tuple] = []

    def on_train_begin(self, logs=None):
        """Restores the newest complete checkpoint, if there is one."""
        epoch_iterator.require_ours("TrainingCheckpoint")
        model: Any = self.model
        self._close()  # that of a fit which an exception has ended
        self._checkpointer = self._open()
        self._epoch = self._batches = self._before_epoch = self._saved_at = 0
        self._found = None
        step = self._agree_on_step()
        if step is None:
            internals.begin_at_epoch(model, None)
            return
        found = self._progress(step)
        restore.restore(model, str(self._checkpointer.directory / str(step)), exactly=True)
        internals.set_global_seed(found["seed"])
        self._saved_at, self._before_epoch = step, step - found["batches"]
        self._found = found
        self._metrics = [(variable, variable.value) for variable in model.metrics_variables]
        internals.begin_at_epoch(model, found["epoch"])

    def on_epoch_begin(self, epoch, logs=None):
        """Begins an epoch, or goes on in the middle of one."""
        internals.begin_at_epoch(self.model, None)  # for the next fit; this one has begun
        self._epoch, self._batches = epoch, 0
        found, self._found = self._found, None
        if found is None:
            epoch_iterator.resume_next_epoch(0)
            return
        if found["batches"]:
            for variable, value in self._metrics:  # which Keras has reset
                variable.assign(value)
        self._metrics = []
        RandomState.from_json(found["random"]).set()
        state = None if found["data"] is None else SourceState.from_json(found["data"])
        epoch_iterator.resume_next_epoch(found["batches"], state)

    def on_train_batch_end(self, batch, logs=None):
        """Saves after every `save_freq` batches."""
        self._batches, data = epoch_iterator.current_position()
        total = self._before_epoch + self._batches
        if self._every is not None and total - self._saved_at >= self._every:
            self._save(total, self._epoch, self._batches, data)

    def on_test_begin(self, logs=None):
        """Saves where training was stopped in the middle of an epoch, before metrics are those of the validation."""
        self._save_if_stopped()

    def _save_if_stopped(self) -> None:
        batches, data = epoch_iterator.current_position()
        total = self._before_epoch + self._batches
        if batches and total > self._saved_at:
            self._save(total, self._epoch, batches, data)

    def on_epoch_end(self, epoch, logs=None):
        """Saves at the end of each epoch with `save_freq="epoch"`, and where training ends."""
        self._save_if_stopped()
        batches, data = epoch_iterator.current_position()
        self._before_epoch += self._batches
        parameters: Any = self.params
        epochs: int = parameters["epochs"]
        is_due = self._every is None or epoch + 1 >= epochs
        if is_due and batches == 0 and self._before_epoch > self._saved_at:
            self._save(self._before_epoch, epoch + 1, 0, data)

    def on_train_end(self, logs=None):
        """Waits until the last checkpoint is written."""
        internals.begin_at_epoch(self.model, None)
        self._close()

    def _close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    # ---------------------------------------------------------------------------------------- what lies on the disk

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

    def _agree_on_step(self) -> int | None:
        """Returns after how many batches the newest complete checkpoint was saved, which all processes must see."""
        latest = self._checkpointer.latest
        step = None if latest is None else latest.step
        steps = messaging.exchange("TrainingCheckpoint", step)
        if any(other != step for other in steps):
            raise ValueError(
                "All processes see the same directory of checkpoints. Received: the newest one in "
                f"{self.directory} is that after {dict(enumerate(steps))} batches, by process. Choose a directory on a "
                "file system that all hosts share."
            )
        return step

    def _save(self, total: int, epoch: int, batches: int, data: SourceState | None) -> None:
        progress = {
            "epoch": epoch,
            "batches": batches,
            "data": None if data is None else data.as_json(),
            "random": RandomState.now().as_json(),
            "seed": internals.global_seed(),
        }
        model: Any = self.model
        arrays = restore.state_tree(model)
        content = {restore.ARRAYS: arrays, _PROGRESS: _Progress(json.dumps(progress))}
        if self.save_on_background:
            self._checkpointer.save_checkpointables_async(total, content)
        else:
            self._checkpointer.save_checkpointables(total, content)
        self._saved_at = total

    def _progress(self, step: int) -> dict:
        """Returns what this process has written, or, where there were others than now, what process 0 has."""
        directory = self._checkpointer.directory / str(step) / _PROGRESS
        file = directory / _name_of_file()
        if file.exists():
            return json.loads(file.read_text())
        (file,) = directory.glob("process_0-of-*.json")
        found = json.loads(file.read_text())
        if found["data"] is not None and found["data"]["source"] is not None:
            found["data"]["source"] = None
            warnings.warn(
                "A grain iterator goes on from where it stood as part of the same number of processes. Received: "
                f"{self.directory} was written by another number than {messaging.count()}. The first batches of the "
                "epoch are read and dropped, and its rows may come in another order.",
                stacklevel=2,
            )
        return found


class _Progress:
    """What Orbax lets each process write into a checkpoint for itself."""

    def __init__(self, text: str):
        self.text = text

    async def save(self, directory):
        """Writes it, once the directory is there."""

        async def write():
            path = await directory.await_creation()
            await asyncio.to_thread((path / _name_of_file()).write_text, self.text)

        return write()

    async def load(self, directory):
        """Is not called: a process may read what another one has written."""
        raise NotImplementedError


def _name_of_file() -> str:
    return f"process_{messaging.index()}-of-{messaging.count()}.json"

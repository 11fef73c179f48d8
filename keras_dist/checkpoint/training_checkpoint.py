"""`TrainingCheckpoint`: training that is interrupted at any moment resumes as if it had not been."""

import contextlib
import math
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import keras
import numpy as np

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import active_distribution
from keras_dist._keras.global_state import global_seed, set_global_seed
from keras_dist._keras.running_fit import at_end_of_fit
from keras_dist._report.units import counted
from keras_dist._report.user_warnings import warn
from keras_dist.checkpoint import restore
from keras_dist.checkpoint.checkpoint_files import CheckpointFiles
from keras_dist.checkpoint.preemption import Preemption, valid_signals
from keras_dist.data import prefetch
from keras_dist.data.position import DataPosition, RandomState, Start, current_position, resume_next_epoch
from keras_dist.multihost import messaging
from keras_dist.multihost.launcher import STATUS_VARIABLE, STOP_SIGNALS

_running: "weakref.WeakSet[TrainingCheckpoint]" = weakref.WeakSet()  # and some whose fit has ended


class TrainingCheckpoint(keras.callbacks.Callback):
    """Saves the state of training, and resumes from the newest complete checkpoint when `fit` starts.

    A program that is restarted with the same arguments continues exactly where it was interrupted, also in the middle
    of an epoch: with the same batches in the same order, the same random numbers and the same losses. It may restart
    on another mesh, with another strategy or with another number of processes; each device then reads its own shards.

    Saved are all variables of the model, its optimizer and its metrics, the states of random generators, the epoch, its
    logs, and the position in the data; not the state of other callbacks. The seed of a shuffle in `tf.data` or PyTorch
    must be fixed. A checkpoint counts only when it is complete and undamaged. `model.load_weights(directory)` and
    `keras.saving.load_model(directory)` read it, too.

    When a process receives SIGTERM (schedulers, clouds and `kill` send it) or SIGUSR1 (Slurm, if a job asks for it),
    all processes finish the same step, save it completely, and leave with `SystemExit(exit_status)`.

    Args:
        directory: Where to save. All processes must share it, and each `fit` of a program needs its own. If a `fit`
            that had reached its last epoch is restarted, it has nothing left to do.
        save_freq: `"epoch"`, or a number of batches: a multiple of the model's `steps_per_execution`.
        max_to_keep: Number of newest checkpoints to keep, None for all.
        save_on_background: Whether training continues while a checkpoint is written. Either way, the state of the step
            at which saving started is written.
        signals: Numbers of the signals that end training as described above, while `fit` runs in the main thread; `()`
            for none. After `fit`, their previous handlers are restored.
        exit_status: The status with which a preempted program ends. Choose a value for which the scheduler starts it
            again. By default the value of the environment variable `KERAS_DISTRIBUTION_STOPPED_STATUS`, which
            `keras-dist launch --elastic` sets, or 0.

    Raises:
        ImportError: Orbax, of the extra `checkpoint`, is not installed.
        ValueError: An argument is out of range. When `fit` starts: no distribution of keras_dist is installed; the
            directory is not writable, has too little space or is used by another running job; the processes find
            different checkpoints; all of them are damaged; the checkpoint is of another model or of another number of
            batches in an epoch; or `fit` has two TrainingCheckpoints.
        OSError: A checkpoint cannot be written, for example because the disk is full. Complete checkpoints stay. If one
            of several processes cannot write its part, the others raise a `ProcessFailure` that names it, or end.
        SystemExit: In `fit`, after a signal.

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

    params: Any

    def __init__(
        self,
        directory: str,
        save_freq: int | Literal["epoch"] = "epoch",
        max_to_keep: int | None = 1,
        save_on_background: bool = True,
        signals: Sequence[int] = STOP_SIGNALS,
        exit_status: int | None = None,
    ):
        super().__init__()
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(
                f"directory must be the path of a folder, but got {directory!r} of type {type(directory).__name__}. "
                "Pass, for example, 'checkpoints'."
            )
        if save_freq != "epoch" and not _is_positive_integer(save_freq):
            raise ValueError(f"save_freq={save_freq!r} is neither 'epoch' nor a number of batches of at least 1.")
        if max_to_keep is not None and not _is_positive_integer(max_to_keep):
            raise ValueError(f"max_to_keep={max_to_keep!r} is not a number of at least 1. Pass None to keep all.")
        name, status = "exit_status", exit_status
        if status is None:
            name, text = STATUS_VARIABLE, os.environ.get(STATUS_VARIABLE, "0")
            status = int(text) if text.isdecimal() else text
        if not isinstance(status, int) or not 0 <= status <= 255:
            raise ValueError(f"{name}={status!r} is not an exit status from 0 to 255.")
        self.directory = str(directory)
        self.save_freq = save_freq
        self._interval = None if isinstance(save_freq, str) else save_freq  # batches
        self.max_to_keep = max_to_keep
        self.save_on_background = save_on_background
        restore.orbax()
        self.signals = valid_signals(signals)
        self.exit_status = status
        self._files: CheckpointFiles | None = None
        self._preemption: Preemption | None = None
        self._has_begun = False  # the first epoch of this fit
        self._is_stopping = False  # all processes stop here, and the state is saved
        self._epoch = self._batches = 0  # the current epoch, and the batches done in it
        self._batches_before_epoch = self._saved_at = 0  # batches in all: before this epoch, and at the last save
        self._progress: dict | None = None  # what was restored and is not used yet
        self._trained: _Place | None = None  # after the last batch, while an epoch is not at its end
        self._logs: dict[str, float] = {}  # of that batch; for an own `train_step`, they are not what metrics contain

    @property
    def waiting_time(self) -> float:
        """Seconds for which checkpoints have stopped training since `fit` started.

        Training stops while the state is copied to the host, while the previous checkpoint is not written yet, and at
        the end of training.
        """
        return 0.0 if self._files is None else self._files.waiting_time

    def on_train_begin(self, logs=None):
        """Restores the newest undamaged checkpoint, if there is one."""
        if active_distribution() is None:
            raise ValueError(
                "TrainingCheckpoint needs a distribution of keras_dist, but none is active in this thread. Call "
                "keras_dist.set_distribution(keras_dist.DataParallel()) before building the model, even with one "
                "device."
            )
        for other in _running:
            if other.model is self.model and other._preemption is not None:
                raise ValueError(
                    f"fit has two TrainingCheckpoints, for {other.directory} and {self.directory}, of which each would "
                    "restore its own state. Pass one. For copies that training does not continue from, use "
                    "keras.callbacks.ModelCheckpoint."
                )
        self._require_executions(self.model)
        _running.add(self)
        at_end_of_fit(self._abandon)
        self._preemption = Preemption(self.signals)
        model: Any = self.model
        self._epoch = self._batches = self._batches_before_epoch = self._saved_at = 0
        self._progress, self._trained, self._is_stopping, self._has_begun = None, None, False, False
        self._files = CheckpointFiles(self.directory, model, self.max_to_keep, self.save_on_background)
        restored = self._files.restore(model)
        if restored is None:
            internals.set_initial_epoch(model, None)
            return
        batches, progress = restored
        self._require_same_epochs(progress)
        set_global_seed(progress["seed"])
        self._saved_at, self._batches_before_epoch = batches, batches - progress["batches"]
        self._progress = progress | {"metrics": [(variable, variable.value) for variable in model.metrics_variables]}
        internals.set_initial_epoch(model, progress["epoch"])
        done, epochs = progress["epoch"], self.params["epochs"]
        if done >= epochs:
            warn(
                f"fit of {model.name!r} trains nothing: the checkpoint in {self.directory!r} is that of epoch {done}, "
                f"and epochs={epochs}. Pass more epochs to continue, or another directory to start anew."
            )

    def _require_executions(self, model: Any) -> None:
        """Raises ValueError if a save is due in the middle of an execution of several steps."""
        size = model.steps_per_execution
        if self._interval is not None and self._interval % size:
            raise ValueError(
                f"TrainingCheckpoint cannot save after every {self._interval} batches (save_freq={self._interval}): "
                f"{model.name!r} was compiled with steps_per_execution={size}, and callbacks are called after every "
                f"{size} batches. Pass save_freq={-(-self._interval // size) * size}, or compile the model with "
                f"steps_per_execution={math.gcd(self._interval, size)}."
            )

    def on_epoch_begin(self, epoch, logs=None):
        """Starts an epoch, or resumes in the middle of one."""
        internals.set_initial_epoch(self.model, None)  # for the next fit; this one has begun
        if not self._has_begun:  # later epochs begin where the one before has been saved, if it had to be
            self._is_stopping, self._has_begun = self._is_due(), True
        self._exit_if_stopping()
        self._epoch, self._batches = epoch, 0
        progress, self._progress = self._progress, None
        if progress is None:
            resume_next_epoch(self.model, Start(0, None, 0, {}))
            return
        if progress["batches"]:
            for variable, value in progress["metrics"]:  # Keras has reset them
                variable.assign(value)
        RandomState.from_json(progress["random"]).restore()
        position = None if progress["data"] is None else DataPosition.from_json(progress["data"])
        logs = progress.get("logs", {})  # older checkpoints have none
        resume_next_epoch(self.model, Start(progress["batches"], position, epoch, logs))

    def on_train_batch_begin(self, batch, logs=None):
        """Leaves if the batch before was the last one, since only now have all callbacks seen its end."""
        self._exit_if_stopping()

    def on_train_batch_end(self, batch, logs=None):
        """Saves after every `save_freq` batches, and after the last one before an exit."""
        assert self._files is not None
        self._files.raise_failure()
        self._trained = _Place.now()
        self._logs = {name: value for name, value in (logs or {}).items() if isinstance(value, float)}
        self._batches = self._trained.batches
        model: Any = self.model
        if not self._batches:
            raise ValueError(
                f"TrainingCheckpoint does not know at which batch {model.name!r} is, so it cannot resume there. "
                "A train step of your own must come from super().make_train_function()."
            )
        self._is_stopping = self._is_due()
        since_save = self._batches_before_epoch + self._batches - self._saved_at
        if self._is_stopping or (self._interval is not None and since_save >= self._interval):
            self._save(self._epoch, self._trained)

    def on_test_begin(self, logs=None):
        """Saves if training was stopped in the middle of an epoch, before validation overwrites the metrics."""
        self._exit_if_stopping()
        if self._trained is None:
            return  # evaluate outside of fit
        self._save_if_stopped()
        model: Any = self.model
        self._trained_metrics = [(each, each.value) for each in model.metrics_variables]  # before validation

    def on_test_batch_begin(self, batch, logs=None):
        """Leaves validation if it must, with the state before validation."""
        if self._trained is not None and self._is_due():
            assert self.model is not None  # Keras gives variables the values of the last step when it is asked for
            for variable, value in self._trained_metrics:
                variable.assign(value)
            self._save(self._epoch, self._trained)
            self._exit()

    def _save_if_stopped(self) -> None:
        place = _Place.now()
        if place.batches:
            self._save(self._epoch, place)

    def on_epoch_end(self, epoch, logs=None):
        """Saves at the end of each epoch with `save_freq="epoch"`, and at the end of training."""
        self._save_if_stopped()
        self._trained = None
        self._batches_before_epoch += self._batches
        self._is_stopping = self._is_due() or self._is_stopping
        model: Any = self.model
        is_last = epoch + 1 >= self.params["epochs"] or model.stop_training
        is_due = self._interval is None or self._is_stopping or is_last
        place = _Place.now()
        if is_due and place.batches == 0:
            self._save(epoch + 1, place)

    def on_train_end(self, logs=None):
        """Waits until the last checkpoint is written."""
        internals.set_initial_epoch(self.model, None)
        assert self._preemption is not None
        if not self._is_stopping:
            self._close()  # while signals are still noted, of which one would end the program before all is written
        if self._is_stopping or self._preemption.close():
            self._exit()
        self._preemption = None

    # ---------------------------------------------------------------------------------------------------- leaving

    def _is_due(self) -> bool:
        return self._preemption is not None and self._preemption.is_due()

    def _exit_if_stopping(self) -> None:
        if self._is_stopping:
            self._exit()

    def _exit(self) -> NoReturn:
        """Ends the program, and leaves signals without effect, since the scheduler may send more of them."""
        assert self._preemption is not None
        self._close()
        messaging.exchange("end of TrainingCheckpoint", None)  # a scheduler may kill the rest when one process has left
        self._preemption.ignore_signals()
        prefetch.stop_all()
        if messaging.process_index() == 0:
            received = self._preemption.signal
            print(
                f"\nkeras_dist: training stops, since {'another process' if received is None else 'this process'} "
                f"received {'a signal' if received is None else received.name}. "
                f"{counted(self._saved_at, 'batch', 'is', 'are')} saved in {self.directory}; training has waited "
                f"{self.waiting_time:.2g} s for checkpoints. Start the program again to continue.",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(self.exit_status)

    def _abandon(self) -> None:
        """Ends with a fit that raised an exception."""
        preemption, self._preemption = self._preemption, None
        try:
            if preemption is not None:
                preemption.abandon()
            with contextlib.suppress(messaging.ProcessFailure):  # which is known, and perhaps why fit ends
                self._close()
        finally:
            if preemption is not None:
                preemption.pass_on()

    def _close(self) -> None:
        if self._files is not None:
            self._files.close()

    # ----------------------------------------------------------------------------------------------------- saving

    def _save(self, epoch: int, place: "_Place") -> None:
        """Saves, unless that was done at the same batch."""
        total = self._batches_before_epoch + place.batches
        if total <= self._saved_at:
            return
        progress = {
            "epoch": epoch,
            "batches": place.batches,
            "batches_of_epoch": self.params["steps"],
            "data": None if place.data is None else place.data.as_json(),
            "random": place.random.as_json(),
            "logs": self._logs,
            "seed": global_seed(),
        }
        assert self._files is not None
        self._files.save(total, self.model, progress)
        self._saved_at = total

    def _require_same_epochs(self, progress: dict) -> None:
        before, now = progress.get("batches_of_epoch"), self.params["steps"]  # None where Keras does not know it
        if progress["batches"] and None not in (before, now) and before != now:
            raise ValueError(
                f"{self.directory} has a checkpoint after batch {progress['batches']} of {before} of an epoch, but "
                f"an epoch of this fit has {now}. Pass the data and the batch_size with which it was saved, or use "
                "another directory."
            )


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 1


class _Place(NamedTuple):
    """A place in the data of an epoch, and the random state there."""

    batches: int  # done in the epoch
    data: DataPosition | None
    random: RandomState

    @classmethod
    def now(cls) -> "_Place":
        return cls(*current_position(), RandomState.capture())

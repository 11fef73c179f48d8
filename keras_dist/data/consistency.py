"""Compares batches, models and seeds among processes, before devices would wait for one another in vain.

Each process describes what it has in a short message. All processes read all messages and reach the same conclusion.
"""

import contextlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from keras_dist._report.units import counted
from keras_dist.data.batch_placement import is_global, is_sparse
from keras_dist.multihost import messaging
from keras_dist.multihost.value_comparison import SAMPLE, digest_of

# The methods of a model by their steps; without one, a method reads the shapes of its first batch to build the model.
METHODS = {"train": "fit", "test": "evaluate", "predict": "predict", None: "the start of fit, evaluate or predict"}


class BatchComparison:
    """Compares the batches that the processes read, one after the other, until one has no more or there is an error.

    `topic` identifies the data in messages: it is the same on all processes, and used once. `step` is None if only the
    shapes of batches are used. `is_abandoned` is asked while waiting: whether the data is no longer wanted.
    """

    def __init__(
        self,
        topic: str,
        auto_shard_dataset: bool,
        step: str | None = None,
        steps_per_epoch: int | None = None,
        is_abandoned: Callable[[], bool] = lambda: False,
    ):
        self._topic, self._auto_shard_dataset, self._is_abandoned = topic, auto_shard_dataset, is_abandoned
        self._has_step, self._method = step is not None, METHODS.get(step, "train_on_batch or predict_on_batch")
        self._is_of_single_batches = step not in METHODS  # Keras may place one of them twice, so they have no numbers
        self._settings = {"method": self._method, "steps_per_epoch": steps_per_epoch}
        self._batches, self._has_ended = 0, False
        self._warnings: list[str] = []

    def take_warnings(self) -> tuple[str, ...]:
        found, self._warnings = self._warnings, []
        return tuple(found)

    def compare_batch(self, batch: Any) -> list[list[int]] | None:
        """Returns the rows of each process for each leaf of a batch; None if another process has no more batches.

        Raises ValueError on all processes if what must be equal differs, ProcessFailure if another could not read.
        """
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        rows = [np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in leaves]
        digest = _digest(leaves, SAMPLE if self._batches else None)
        return self._compare({"spec": _spec(leaves, structure), "rows": rows, "digest": digest})

    def compare_some(self, batch: Any) -> None:
        """As `compare_batch`, for the 1st, 2nd, 4th, 8th batch and so on: a message may take longer than a step."""
        number = self._batches + 1
        if number & (number - 1):
            self._batches = number
        else:
            self.compare_batch(batch)

    def report_end(self) -> None:
        """Tells others that the data ends here; raises ValueError if theirs does not, though all pass one dataset."""
        if not self._has_ended:
            self._compare({"end": True})

    def report_error(self, error: Exception) -> None:
        """Tells the other processes that this one cannot read its next batch."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if not self._has_ended:
            with contextlib.suppress(messaging.ProcessFailure):  # the caller raises its own error in any case
                messaging.exchange(self._topic, self._settings | {"failed": text}, self._is_abandoned, self._method)
        self._has_ended = True

    def _compare(self, message: dict[str, Any]) -> list[list[int]] | None:
        self._has_ended = True  # also if an error is raised below
        messages = messaging.exchange(self._topic, self._settings | message, self._is_abandoned, self._method)
        for process, other in enumerate(messages):
            if "failed" in other:
                who = messaging.describe([process]).capitalize()
                raise messaging.ProcessFailure(f"{who} could not read batch {self._batches}: {other['failed']}")
        ended = [process for process, other in enumerate(messages) if "end" in other]
        if 0 < len(ended) < len(messages):
            who = messaging.describe(ended).capitalize()
            text = f"{who} ran out of data after {counted(self._batches, 'batch')}"
            if self._auto_shard_dataset:
                raise ValueError(f"{text}, but others have more. {_SAME_DATASET}")
            text += ", so the epoch ends for all processes. The remaining data of others is not used."
            self._warnings.append(text)
        if ended:
            return None
        _require_equal(
            messages, "method", "Processes run different methods of a model at the same time", messaging.SAME_CALLS
        )
        _require_equal(messages, "steps_per_epoch", "steps_per_epoch differs between processes")
        where = "a single batch" if self._is_of_single_batches else f"batch {self._batches}"
        fix = _SAME_RUN if self._auto_shard_dataset else _SAME_SHAPES
        _require_equal(messages, "spec", f"Structure, dtypes or shapes of {where} differ between processes", fix)
        if self._has_step and self._auto_shard_dataset:  # without a step, nothing is computed from the rows
            _require_equal(messages, "rows", f"Numbers of rows of {where} differ between processes", _SAME_DATASET)
            _require_equal(messages, "digest", f"Digests of the rows of {where} differ between processes", _SAME_ORDER)
        elif self._has_step and self._batches == 0:
            self._warn_of_equal_rows(messages)
        self._batches += 1
        self._has_ended = False
        return [list(counts) for counts in zip(*(other["rows"] for other in messages), strict=True)]

    def _warn_of_equal_rows(self, messages: list[dict[str, Any]]) -> None:
        seen: dict[str, int] = {}
        for process, other in enumerate(messages):
            first = seen.setdefault(other["digest"], process)
            if first != process and any(other["rows"]):
                self._warnings.append(
                    f"Processes {first} and {process} passed the same rows in their first batch. With "
                    "auto_shard_dataset=False these count twice: pass different rows in each process, or use "
                    "auto_shard_dataset=True if all pass the same global dataset."
                )
                return


_SAME_RUN = "Run the same program with the same arguments in all processes."
_SAME_SHAPES = (
    "With auto_shard_dataset=False the rows of all processes are joined to one batch, so only their number may differ. "
    "Pad sequences to the same length in all processes."
)
_SAME_DATASET = (
    "With auto_shard_dataset=True every process must pass the same global dataset; use auto_shard_dataset=False if "
    "each passes its own rows."
)
_SAME_ORDER = (
    f"{_SAME_DATASET} To get the same order, call keras.utils.set_random_seed with the same seed in all processes, and "
    "seed sources that shuffle by themselves (tf.data, PyTorch, Grain)."
)


def _require_equal(messages: list[dict[str, Any]], key: str, problem: str, fix: str = _SAME_RUN) -> None:
    """Raises a ValueError if two processes have different values for a key."""
    first = messages[0][key]
    for process, other in enumerate(messages):
        if other[key] != first:
            raise ValueError(f"{problem}: {first} on process 0, {other[key]} on process {process}. {fix}")


def _spec(leaves: list, structure: Any) -> str:
    """Describes the structure of a batch without its rows; scalars with their values."""

    def describe(leaf):
        if np.ndim(leaf) == 0:
            return repr(leaf)
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        return f"{dtype}[..., {', '.join(map(str, np.shape(leaf)[1:]))}]"

    return f"{str(structure).removeprefix('PyTreeDef(')[:-1]} of {', '.join(map(describe, leaves))}"


def _digest(leaves: Sequence[Any], limit: int | None) -> str:
    arrays = jax.tree.leaves(leaves)
    return digest_of((np.asarray(array) for array in arrays if not is_global(array)), limit)


# ------------------------------------------------------------------------------------------------- models and seeds


def require_same_model(step: str, name: str, variables: Sequence[tuple[str, Any]], facts: dict[str, Any]) -> None:
    """Compares a model with those of the others, before its step is compiled; raises ValueError on all if they differ.

    `variables` are pairs of a path and what must be equal: shape, dtype, layout, replicated values.
    """
    rows = [f"{path} {description}" for path, description in variables]
    method = METHODS.get(step, step)
    message = {"method": method, "variables": f"{zlib.crc32(chr(10).join(rows).encode()):08x}"} | facts
    messages = messaging.exchange("model", message, method=method)
    _require_equal(
        messages, "method", "Processes run different methods of a model at the same time", messaging.SAME_CALLS
    )
    for fact in facts:
        fix = "Call keras.utils.set_random_seed with the same number in all processes." if "seed" in fact else _SAME_RUN
        _require_equal(messages, fact, f"The {fact} differs between processes", fix)
    if len({other["variables"] for other in messages}) == 1:
        return
    models = messaging.exchange("model in full", rows)
    process, other = next((process, other) for process, other in enumerate(models) if other != models[0])
    pairs = itertools.zip_longest(map(repr, models[0]), map(repr, other), fillvalue="no variable")
    mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"Model {name!r} differs between processes: {counted(len(models[0]), 'variable')} on process 0, {len(other)} "
        f"on process {process}. First difference: {mine} on process 0, {theirs} on process {process}. Build the "
        "model with the same code and the same seed (keras.utils.set_random_seed) in all processes, load the same "
        "weights, and pass the same batches to train_on_batch."
    )


def order_of_devices(mesh: jax.sharding.Mesh) -> str:
    """Returns the ids of a mesh's devices, the first of them in full and all as a checksum."""
    ids = [int(device.id) for device in mesh.devices.flat]
    rest = f" and {len(ids) - 64} more with checksum {zlib.crc32(repr(ids).encode()):08x}" if len(ids) > 64 else ""
    return f"{ids[:64]}{rest}"

"""Whether all processes were given what fits together: batches, models, seeds. Found out before devices wait in vain.

Each process describes what it has in a short message; all read the messages of all, and so come to the same answer.
"""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from keras_dist.data.batch_placement import is_global, is_sparse
from keras_dist.multihost import messaging

_SAMPLE = 4096  # bytes of an array that are compared in a batch after the first


class BatchAgreement:
    """Compares the batches that the processes read, one after the other.

    Args:
        topic: names the data in messages; the same on all processes, and used once.
        is_whole: whether each process is given the whole of each batch, and not a part of it.
        step: what the batches are for, as `"train"`; None where only their shapes are looked at.
        steps: how many batches an epoch has been said to have, if that was said.
        given_up: whether nobody wants the data any more.

    Attributes:
        has_ended: whether there is nothing more to compare.
    """

    def __init__(
        self,
        topic: str,
        is_whole: bool,
        step: str | None = None,
        steps: int | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ):
        self._topic, self._is_whole, self._given_up = topic, is_whole, given_up
        self._settings = {"for": step, "steps_per_epoch": steps}
        self._batches = 0
        self._warnings: list[str] = []
        self.has_ended = False

    def take_warnings(self) -> tuple[str, ...]:
        """Returns what works, but was probably not meant, once."""
        found, self._warnings = self._warnings, []
        return tuple(found)

    def on_batch(self, batch: Any) -> list[list[int]] | None:
        """Compares a batch with those of the others.

        Args:
            batch: the batch that this process has read.

        Returns:
            For each array of the batch, in the order of `jax.tree.leaves`, how many rows each process brings; None
            where another process has no more.

        Raises:
            ValueError: the processes were given what does not fit together; raised on all of them.
            ProcessFailure: the data of another process raised an error.
        """
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        message: dict[str, Any] = {"spec": _spec(leaves, structure), "rows": [_rows(leaf) for leaf in leaves]}
        message["digest"] = _digest(leaves, _SAMPLE if self._batches else None)
        return self._compare(message)

    def on_end(self) -> None:
        """Tells the others that this process has no more batches.

        Raises:
            ValueError: others have, though all were given the same dataset.
        """
        self._compare({"end": True})

    def on_error(self, error: Exception) -> None:
        """Tells the others that this process cannot read its next batch."""
        words = " ".join(f"{type(error).__name__}: {error}".split())
        self.has_ended = True
        messaging.exchange(self._topic, self._settings | {"failed": words}, self._given_up)

    def _compare(self, message: dict[str, Any]) -> list[list[int]] | None:
        self.has_ended = True  # unless there is no error
        said = messaging.exchange(self._topic, self._settings | message, self._given_up)
        for process, of_other in enumerate(said):
            if "failed" in of_other:
                raise messaging.ProcessFailure(
                    f"Batch {self._batches} cannot be had on {messaging.describe([process])}: {of_other['failed']}"
                )
        _require_same(said, "for", "All processes call the same method of a model at the same time.", "for a step of")
        _require_same(said, "steps_per_epoch", "All processes pass the same number of steps.", "steps")
        ended = [process for process, of_other in enumerate(said) if "end" in of_other]
        if ended:
            if len(ended) < len(said):
                self._on_shortage(ended)
            return None
        _require_same(said, "spec", "All processes pass arrays of the same dtypes and shapes, but for rows.", "arrays")
        if self._settings["for"] is None:
            pass  # nothing is computed from it
        elif self._is_whole:
            where = f"in batch {self._batches}"
            rule = "With auto_shard_dataset=True every process passes the same global dataset."
            _require_same(said, "rows", rule, f"numbers of rows {where}")
            _require_same(said, "digest", rule, f"rows whose digest {where} is", _SAME_ROWS)
        elif self._batches == 0:
            self._note_equal_parts(said)
        self._batches += 1
        self.has_ended = False
        return [list(of_leaf) for of_leaf in zip(*(of_other["rows"] for of_other in said), strict=True)]

    def _on_shortage(self, ended: list[int]) -> None:
        what = f"{messaging.describe(ended).capitalize()} ran out of data after {self._batches} batches"
        if self._is_whole:
            raise ValueError(
                f"With auto_shard_dataset=True every process passes the same global dataset. {what}, while others have "
                "more. Pass the same data to all, or auto_shard_dataset=False where each passes a part of its own."
            )
        self._warnings.append(f"{what}, so the epoch ends for all processes; what the others have left is not used.")

    def _note_equal_parts(self, said: list[dict[str, Any]]) -> None:
        seen: dict[str, int] = {}
        for process, of_other in enumerate(said):
            first = seen.setdefault(of_other["digest"], process)
            if first != process and any(of_other["rows"]):
                self._warnings.append(
                    "With auto_shard_dataset=False each process passes a part of its own. Processes "
                    f"{first} and {process} passed the same rows in their first batch, which then count twice. Pass "
                    "other rows in each process, or auto_shard_dataset=True where all pass the whole dataset."
                )
                return


_SAME_ROWS = (
    "Pass the same rows in the same order: give keras.utils.set_random_seed the same number in all processes, and "
    "a source that shuffles by itself (torch, tf.data, Grain) a seed; or pass auto_shard_dataset=False."
)


def _require_same(said: list[dict[str, Any]], key: str, rule: str, what: str, way_out: str = "") -> None:
    for process, of_other in enumerate(said):
        if of_other.get(key) != said[0].get(key) and "end" not in of_other and "end" not in said[0]:
            raise ValueError(
                f"{rule} Received: {what} {said[0].get(key)} on process 0, but {of_other.get(key)} on process "
                f"{process}. {way_out or 'Run the same program with the same arguments in all processes.'}"
            )


def _spec(leaves: list, structure: Any) -> str:
    """A structure in words, without numbers of rows; numbers that are no arrays with their values."""
    words = [f"{leaf!r}" if np.ndim(leaf) == 0 else f"{_dtype(leaf)}[..., {_row_shape(leaf)}]" for leaf in leaves]
    return f"{structure} of {', '.join(words)}".removeprefix("PyTreeDef(")


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)


def _row_shape(leaf: Any) -> str:
    return ", ".join(map(str, np.shape(leaf)[1:]))


def _rows(leaf: Any) -> int:
    return np.shape(leaf)[0] if np.ndim(leaf) else 0


def _digest(leaves: Sequence[Any], limit: int | None) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        parts = jax.tree.leaves(leaf) if is_sparse(leaf) else [leaf]
        for part in parts:
            if not is_global(part):
                digest.update(_sample(np.asarray(part), limit))
    return digest.hexdigest()


def _sample(array: np.ndarray, limit: int | None) -> bytes:
    """The bytes of an array, or of elements spread evenly over it."""
    if limit is not None and array.nbytes > limit:
        array = array.reshape(-1)[:: -(-array.nbytes // limit)]
    return np.ascontiguousarray(array).tobytes()


# ------------------------------------------------------------------------------------------------- models and seeds


def agree_on_model(step: str, name: str, variables: Sequence[tuple[str, Any]], facts: dict[str, Any]) -> None:
    """Compares a model with those of the other processes, before its step is compiled.

    Args:
        step: the step, as `"train"`.
        name: the model's name.
        variables: the path of each variable, and what must be the same of it: shape, dtype, layout.
        facts: what else must be the same, in words, as the random seed.

    Raises:
        ValueError: something differs; raised on all processes.
    """
    rows = [f"{path} {what}" for path, what in variables]
    message = {"step": step, "variables": f"{zlib.crc32(chr(10).join(rows).encode()):08x}"} | facts
    said = messaging.exchange("model", message)
    _require_same(said, "step", "All processes call the same method of a model at the same time.", "for a step of")
    for fact in facts:
        way_out = "Give keras.utils.set_random_seed the same number in all processes." if "seed" in fact else ""
        _require_same(said, fact, f"All processes must have the same {fact}.", f"the {fact}", way_out)
    if len({of_other["variables"] for of_other in said}) > 1:
        _say_which_differs(name, messaging.exchange("model in full", rows))


def _say_which_differs(name: str, said: list[list[str]]) -> None:
    for process, of_other in enumerate(said):
        if of_other == said[0]:
            continue
        number = next((n for n, pair in enumerate(zip(said[0], of_other, strict=False)) if pair[0] != pair[1]), None)
        number = min(len(said[0]), len(of_other)) if number is None else number
        first, other = (rows[number] if number < len(rows) else "none" for rows in (said[0], of_other))
        raise ValueError(
            f"All processes must make the same model with the same values. Received: {name!r} with "
            f"{len(said[0])} variables on process 0 and {len(of_other)} on process {process}; the first that differs "
            f"is '{first}' on process 0 and '{other}' on process {process}. Make the model by the same code in all, "
            "under the same seed (keras.utils.set_random_seed), and load the same weights."
        )

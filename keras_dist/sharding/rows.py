"""Over which axes the rows of a batch are split while a step is traced."""

from keras_dist._keras.thread_value import ThreadValue
from keras_dist.data.batch_placement import BatchPlacer

rows_are_split: ThreadValue[bool | None] = ThreadValue(None)
"""Whether the step that is being traced in this thread has unequal shards of rows; None without a step."""


def axes_for_rows(placer: BatchPlacer, rows: int) -> tuple[str, ...]:
    """Returns the batch axes over which the step that is being traced splits a number of rows."""
    is_split = rows_are_split.value and placer.can_split_unequally(rows)
    return placer.batch_axes if is_split else placer.axes_for(rows)

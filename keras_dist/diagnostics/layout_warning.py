"""`LayoutMapWarning`: reports likely mistakes in a layout map before the first step; `findings.py` has their texts."""

from typing import Any

import keras

from keras_dist._report.units import counted
from keras_dist._report.user_warnings import warn
from keras_dist.diagnostics.coverage import numbered_lines
from keras_dist.diagnostics.explain import explain
from keras_dist.sharding.shard_dim import MIN_SHARD_BYTES

_MAX_FINDINGS = 5


class LayoutMapWarning(UserWarning):
    """A layout map probably has a mistake.

    `warnings.simplefilter("ignore", keras_dist.LayoutMapWarning)` silences it.
    """


def check_rules(model: keras.Model, distribution: Any, strict: bool) -> None:
    """Warns of the likely mistakes that `explain` finds in a layout map, or raises them as a ValueError if `strict`.

    Not of replicas of few bytes: FullyShardedDataParallel would not shard them either.
    """
    found = explain(model, distribution).findings
    findings = tuple(each for each in found if each.kind != "replicated" or each.bytes > MIN_SHARD_BYTES)
    if not findings:
        return
    lines = numbered_lines(findings, _MAX_FINDINGS, "keras_dist.explain(model, distribution).findings")
    text = f"{counted(len(findings), 'possible problem')} in the layout map for {model.name!r}:\n"
    text += "\n".join([*lines, "print(keras_dist.explain(model, distribution)) shows the layout of each variable."])
    if strict:
        raise ValueError(text)
    text += (
        " To make this an error, pass strict=True to the distribution. To silence it, call "
        "warnings.simplefilter('ignore', keras_dist.LayoutMapWarning)."
    )
    warn(text, LayoutMapWarning)

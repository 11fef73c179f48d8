"""The guard: what of a layout map is probably not meant is said before the first step, or refused."""

import sys
import warnings
from typing import Any

import keras

from keras_dist.diagnostics.explain import explain

_MOST_FINDINGS = 5


class LayoutMapWarning(UserWarning):
    """Rules of a layout map lay a model out in a way that is probably not meant.

    Where it is meant, `warnings.simplefilter("ignore", keras_dist.LayoutMapWarning)` silences it.
    """


def check_rules(model: keras.Model, distribution: Any, strict: bool) -> None:
    """Warns of what `keras_dist.explain` finds wrong with the rules of a distribution, or raises it.

    Args:
        model: a built model.
        distribution: a distribution with a layout map.
        strict: whether to raise.

    Raises:
        ValueError: there is something to say, and `strict` is set.
    """
    findings = explain(model, distribution).findings
    if not findings:
        return
    lines = [f"{number}. {finding.message}" for number, finding in enumerate(findings[:_MOST_FINDINGS], 1)]
    rest = len(findings) - len(lines)
    text = "\n".join(
        [
            f"A layout map must lay out the model as it is meant. Received: {len(findings)} thing"
            f"{'s' * (len(findings) > 1)} in the rules for {model.name!r} that probably "
            f"{'are' if len(findings) > 1 else 'is'} not:",
            *lines,
            *([f"... and {rest} more."] if rest else []),
            "print(keras_dist.explain(model, distribution)) shows how each variable lies.",
        ]
    )
    if strict:
        raise ValueError(text)
    text += " strict=True makes this an error; to silence it, ignore keras_dist.LayoutMapWarning."
    warnings.warn(text, LayoutMapWarning, stacklevel=_frames_to_the_user())


def _frames_to_the_user() -> int:
    """How many frames up the code is that called Keras or this package."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("keras", "keras_dist"):
        frame, count = frame.f_back, count + 1
    return count

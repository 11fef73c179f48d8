"""Warnings that point at the user's code, from wherever Keras, JAX or this package called what warns."""

import sys
import warnings

# Code that calls this package for the user, and what lies between its frames.
_LIBRARIES = {"jax", "keras", "keras_dist", "keras_dist_cli", "keras_hub", "orbax"}
_BETWEEN = {"concurrent", "contextlib", "functools", "importlib", "threading"}


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's code that is running: the innermost one of this thread.

    In a thread that runs none, such as one of Keras's, at the line that calls this function. Python 3.12's
    `skip_file_prefixes` is for this, too.
    """
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES | _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=2 if frame is None else level)

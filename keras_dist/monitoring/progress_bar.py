"""Keeps Keras's progress bar short, although other callbacks find all figures in the logs of an epoch."""

from collections.abc import Callable, Iterable
from typing import Any

import keras


class ShortProgressBar:
    """Removes names from the logs of an epoch after `History` has recorded them.

    Keras passes one dict of logs to all callbacks, and adds two of its own at the end: first `History`, then the
    progress bar, which shows all that it finds. So the method of the history is the place where its fields are known.
    """

    def __init__(self, history: keras.callbacks.History, hidden: Callable[[], Iterable[str]]):
        self._history: Any = history
        record = self._history.on_epoch_end

        def on_epoch_end(epoch: int, logs: dict[str, Any] | None = None) -> None:
            record(epoch, logs)
            if logs is not None:
                for name in hidden():
                    logs.pop(name, None)

        self._history.on_epoch_end = on_epoch_end

    def close(self) -> None:
        """Gives the history its own method back."""
        vars(self._history).pop("on_epoch_end", None)

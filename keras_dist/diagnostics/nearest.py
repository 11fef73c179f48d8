"""Which of many texts is most like another one, in a time that does not grow out of hand."""

from collections import defaultdict
from collections.abc import Iterable
from difflib import SequenceMatcher

import numpy as np

_COMPARED = 8  # texts that are compared letter by letter


class Nearest:
    """Texts, found by those that are like them.

    Comparing letter by letter is slow. Those that share most runs of three letters are found first, and only these are
    compared.

    Args:
        texts: the texts.

    Example:

    >>> Nearest(["block/attention/kernel", "block/mlp/kernel"]).to("blok/atention/kernel")
    'block/attention/kernel'
    """

    def __init__(self, texts: Iterable[str]):
        self._texts = list(dict.fromkeys(texts))
        holders: dict[str, list[int]] = defaultdict(list)
        self._counts = np.zeros(len(self._texts))
        for number, text in enumerate(self._texts):
            runs = _runs(text)
            self._counts[number] = len(runs)
            for run in runs:
                holders[run].append(number)
        self._holders = {run: np.array(numbers) for run, numbers in holders.items()}

    def to(self, text: str, least: float = 0.6) -> str | None:
        """Returns the text that is most like another one, None where none is.

        Args:
            text: the other one.
            least: the least likeness, from 0 to 1: the part of all letters that are the same, in the same order.
        """
        runs, shared = _runs(text), np.zeros(len(self._texts))
        for run in runs & self._holders.keys():
            shared[self._holders[run]] += 1
        likeness = 2 * shared / (self._counts + len(runs))
        best, best_ratio = None, least
        for number in np.argsort(-likeness, kind="stable")[:_COMPARED]:
            ratio = SequenceMatcher(None, text, self._texts[number], autojunk=False).ratio()
            if shared[number] and ratio >= best_ratio and (best is None or ratio > best_ratio):
                best, best_ratio = self._texts[number], ratio
        return best


def _runs(text: str) -> set[str]:
    padded = f"  {text}  "
    return {padded[start : start + 3] for start in range(len(padded) - 2)}

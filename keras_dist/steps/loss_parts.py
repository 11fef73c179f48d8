"""Losses of parts of a batch, such that gradients of the parts add up to those of the batch."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


class TotalsNeededError(Exception):
    """A loss is a mean whose divisor depends on all rows of the batch, and that is not known yet."""


class LossParts:
    """The losses of one trace of a model, which computes a part of a batch.

    A gradient is the sum of those of its parts, each times the fraction of the rows that it has. That is right for
    means over rows. A mean over unmasked elements is divided by their number in the part instead of the batch, a mean
    over sample weights by their sum in the part, and a sum by nothing. `corrected` changes them accordingly.

    `totals` has the divisor of each loss of the undivided batch, in the order of the calls, None for means over rows;
    it is empty if they are not known. Without `totals`, no loss is changed, and `divisors` become those totals. `rows`
    is the number of rows of the part.
    """

    def __init__(self, fraction: float = 1.0, totals: Sequence[Any] | None = None, rows: int | None = None):
        self._fraction, self._totals, self._rows = fraction, totals, rows
        self.divisors: list = []  # of the losses so far

    def corrected_sum(self, total: Any, shape: Sequence[int]) -> Any:
        """Returns the sum of a loss that a layer adds, corrected if its shape has a number for each row."""
        return self.corrected(total, "sum", None) if self._rows in shape[:1] else total

    def corrected(self, loss: Any, reduction: str | None, divisor: Any) -> Any:
        """Returns a loss such that the sum over all parts of each times its fraction is the loss of the batch.

        `reduction` is Keras's name. `divisor` is what the loss was divided by, None if that is known while tracing.
        """
        self.divisors.append(divisor)
        if self._totals is not None and reduction == "sum":
            return loss / self._fraction
        if self._totals is None or divisor is None:
            return loss
        if not self._totals:
            raise TotalsNeededError
        if len(self.divisors) > len(self._totals):  # that of a metric, which come after all losses
            return loss
        return loss * jnp.nan_to_num(divisor / self._totals[len(self.divisors) - 1]) / self._fraction

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

    `totals` has the divisor of each loss of the undivided batch, in the order of the calls, None for means over rows,
    and the number of values of one that a layer adds; it is empty if they are not known. Without `totals`, no loss is
    changed, and `divisors` become those totals.
    """

    def __init__(self, fraction: float = 1.0, totals: Sequence[Any] | None = None):
        self._fraction, self._totals = fraction, totals
        self.divisors: list = []  # of the losses so far

    def corrected(self, loss: Any, reduction: str | None, divisor: Any) -> Any:
        """Returns a loss such that the sum over all parts of each times its fraction is the loss of the batch.

        `reduction` is Keras's name. `divisor` is what the loss was divided by, None if that is known while tracing.
        """
        total = self._total_of(divisor)
        if self._totals is not None and reduction == "sum":
            return loss / self._fraction
        return loss if total is None else loss * jnp.nan_to_num(divisor / total) / self._fraction

    def corrected_sum(self, loss: Any, size: int) -> Any:
        """Returns the sum of the `size` numbers of a loss that a layer adds.

        Where the undivided batch has more of them, one for each row or token, the parts are added up; otherwise, where
        they are those of experts for example, averaged.
        """
        total = self._total_of(float(size))
        return loss if total is None else loss * (total / size)

    def _total_of(self, divisor: Any) -> Any:
        """Returns what has this divisor's place for the undivided batch; None where no loss is corrected by it."""
        self.divisors.append(divisor)
        if self._totals is None or divisor is None:
            return None
        if not self._totals:
            raise TotalsNeededError
        if len(self.divisors) > len(self._totals):  # that of a metric, which come after all losses
            return None
        return self._totals[len(self.divisors) - 1]

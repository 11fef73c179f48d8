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

    Args:
        fraction: The fraction of the rows that the part has.
        totals: The divisor of each loss of the undivided batch, in the order of the calls; None for means over rows.
            Empty if they are not known.
    """

    def __init__(self, fraction: float, totals: Sequence[Any]):
        self._fraction, self._totals, self._number_of_losses = fraction, totals, 0

    def corrected(self, loss: Any, reduction: str | None, divisor: Any) -> Any:
        """Returns a loss such that the sum over all parts of each times its fraction is the loss of the batch.

        Args:
            loss: The loss of the part.
            reduction: Keras's name of its reduction.
            divisor: What it was divided by, if that is not known while tracing; else None.
        """
        number, self._number_of_losses = self._number_of_losses, self._number_of_losses + 1
        if reduction == "sum":
            return loss / self._fraction
        if divisor is None:
            return loss
        if not self._totals:
            raise TotalsNeededError
        return loss * jnp.nan_to_num(divisor / self._totals[number]) / self._fraction


class LossTotals(LossParts):
    """Collects the divisors of the losses of an undivided batch."""

    def __init__(self):
        super().__init__(1.0, ())
        self.divisors: list = []

    def corrected(self, loss: Any, reduction: str | None, divisor: Any) -> Any:
        self.divisors.append(divisor)
        return loss

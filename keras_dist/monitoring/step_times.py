"""When steps ran and what they processed, and the figures that follow. Knows no clock: every time is an argument."""

import operator
import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from keras_dist.monitoring.batches import BatchShape

NEWEST = 4096  # steps of which median, p95 and deviation are computed, so that memory is bounded


class Execution(NamedTuple):
    """One call of the train function as the host saw it, in seconds of one clock."""

    begin: float  # when Keras began it, before it asked for data
    dispatched: float  # when the host had handed it to the devices
    waits: Sequence[tuple[float, float]] = ()  # for data, as pairs of begin and end
    waits_for_others: Sequence[tuple[float, float]] = ()  # the part in which only other processes had no data yet
    batches: Sequence[BatchShape] = ()  # that it took: one, or `steps_per_execution`
    is_compiled: bool = False  # whether something was compiled for it
    follows: bool = True  # whether neither the end of an epoch nor validation was between it and the one before it


class Step(NamedTuple):
    """What one execution took, in seconds."""

    seconds: float  # from the end of the step before it, or from its own begin if that was later, to its end
    data_seconds: float  # of these, devices had nothing to do because the host waited for data
    others_seconds: float  # of `data_seconds`, for data of other processes
    host_seconds: float  # devices had nothing to do because of the host: it waited for data, or did other work
    gap_seconds: float  # before it, while callbacks ran


def measure(execution: Execution, ended: float, ended_before: float | None) -> Step:
    """Returns what an execution took, given when it and the one before it ended on the devices.

    The host hands steps to the devices ahead of time. So a step starts when the step before it ends, or when Keras
    begins it, whichever is later; and the time that the host waits for data, or works, counts as far as the devices
    have nothing to do.

    Example: the step before ended at 10. Keras began this one at 8, waited for data from 9 to 13, handed it to the
    devices at 14, and it ended at 20. It took 10 seconds; for 3 of them the devices waited for data, and for 4 for the
    host, data included.

    >>> measure(Execution(begin=8, dispatched=14, waits=[(9, 13)]), ended=20, ended_before=10)
    Step(seconds=10, data_seconds=3, others_seconds=0, host_seconds=4, gap_seconds=0)
    """
    before = execution.begin if ended_before is None or not execution.follows else ended_before
    started = max(before, execution.begin)

    def idle(waits: Sequence[tuple[float, float]]) -> float:
        return sum(max(0, min(end, ended) - max(begin, started)) for begin, end in waits)

    data = idle(execution.waits)
    host = max(data, min(execution.dispatched, ended) - started)
    return Step(max(0, ended - started), data, idle(execution.waits_for_others), host, started - before)


@dataclass
class StepTimes:
    """Sums over steps. Those for which something was compiled are only counted."""

    steps: int = 0  # without those that compiled
    compiled: int = 0
    total: Step = field(default_factory=lambda: Step(0.0, 0.0, 0.0, 0.0, 0.0))
    batches: Counter[BatchShape] = field(default_factory=Counter)
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))

    def add(self, execution: Execution, step: Step) -> None:
        count = len(execution.batches) or 1
        if execution.is_compiled:
            self.compiled += count
            return
        self.steps += count
        self.total = Step(*map(operator.add, self.total, step))
        self.batches.update(execution.batches)
        self.newest.append(step.seconds / count)

    def per_second(self, amount: Callable[[BatchShape], float | None]) -> float | None:
        """Returns the sum of an amount over all batches per second of steps; None if it is unknown for any batch."""
        total = 0.0
        for batch, count in self.batches.items():
            if (each := amount(batch)) is None:
                return None
            total += each * count
        return total / self.total.seconds if self.batches and self.total.seconds else None

    def figures(self) -> dict[str, Any]:
        """Returns the figures that follow, by their names in `Summary`: None without a step."""
        seconds, data, others, host, gaps = self.total
        ordered = sorted(self.newest)

        def share(part: float, of: float = seconds) -> float | None:
            return min(1.0, part / of) if of else None

        return {
            "median": statistics.median(ordered) if ordered else None,
            "percentile_95": ordered[-(-95 * len(ordered) // 100) - 1] if ordered else None,  # by nearest rank
            "deviation": float(np.std(ordered)) if len(ordered) > 1 else None,
            "samples_per_second": self.per_second(lambda batch: batch.rows),
            "tokens_per_second": self.per_second(lambda batch: batch.tokens),
            "data_wait": share(data),
            "others_wait": share(others),
            "host_work": share(host - data),
            "host_wait": share(host - others + gaps, seconds + gaps),
        }

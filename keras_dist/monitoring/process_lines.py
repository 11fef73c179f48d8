"""One line for all processes: each posts its figures, and process 0 prints them with the slowest process named.

Training never waits for that: a thread sends the figures, and in process 0 collects those of the others.
"""

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from keras_dist._report.units import percent_text
from keras_dist.monitoring.summary import Summary
from keras_dist.multihost import messaging

INTERVAL = 0.05  # seconds between two looks at what other processes have posted
PATIENCE = 5.0  # seconds that process 0 waits for the last figures of the others when fit ends

_numbers = itertools.count()  # of the runs of a program, which are the same ones in all processes


def summary_of_all(summaries: Mapping[int, Summary], processes: int) -> tuple[Summary, str]:
    """Returns the figures of process 0 with the highest peak memory of all, and text that names the slowest process.

    Devices wait for one another in each step, so that a step takes as long in all processes. The slowest process is
    the one whose devices wait most for their own host. All processes wait until each has read its batch, so data that
    others have to read do not count.

    >>> fast = Summary(8, 8, median=0.1, host_wait=0.01, data_wait=0.3, others_wait=0.29)
    >>> slow = Summary(8, 8, median=0.1, host_wait=0.4, data_wait=0.3, others_wait=0.0)
    >>> summary_of_all({0: fast, 1: slow}, processes=2)[1]
    'slowest process 1 of 2 (its devices waited 40% of the time for their host, data wait 30%)'
    """
    peak = max((each.peak_memory for each in summaries.values() if each.peak_memory is not None), default=None)
    missing = sorted({*range(processes)} - {*summaries})
    slowest = max(summaries, key=lambda process: summaries[process].host_wait or 0.0)
    found = summaries[slowest]
    texts = []
    if found.host_wait is not None:
        data = percent_text((found.data_wait or 0.0) - (found.others_wait or 0.0))
        waited = f"its devices waited {percent_text(found.host_wait)} of the time for their host, data wait {data}"
        texts.append(f"slowest process {slowest} of {processes} ({waited})")
    if missing:
        listed = ", ".join(map(str, missing))
        texts.append(f"without process{'es' * (len(missing) > 1)} {listed}, not heard of in time")
    return dataclasses.replace(summaries[min(summaries)], peak_memory=peak), ", ".join(texts)


class ProcessLines:
    """Sends the figures of this process; in process 0 passes those of all to `show`, with text on the slowest."""

    def __init__(self, show: Callable[[Summary, str], Any]):
        self._show = show
        self._topic = f"StepMonitor {next(_numbers)}"
        self._summaries: queue.SimpleQueue[tuple[int, Summary] | None] = queue.SimpleQueue()
        self._closed: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, number: int, summary: Summary) -> None:
        """Passes the figures of a window, whose number is the same in all processes. Returns at once."""
        self._summaries.put((number, summary))

    def close(self) -> None:
        """Waits until the figures are sent and, in process 0, shown: a few seconds at most."""
        self._closed = time.monotonic()
        self._summaries.put(None)
        self._thread.join(2 * PATIENCE)

    def _run(self) -> None:
        try:
            while (item := self._summaries.get()) is not None:
                number, summary = item
                if messaging.process_index() == 0:
                    self._collect(number, summary)
                else:
                    messaging.set_status(f"{self._topic}/{number}", dataclasses.asdict(summary))
        except (jax.errors.JaxRuntimeError, ConnectionError):
            return  # process 0 is gone, which ends training with an error of its own

    def _collect(self, number: int, summary: Summary) -> None:
        """Shows the figures when all processes have posted theirs, the next window is there, or patience ends."""
        topic = f"{self._topic}/{number}"
        while len(others := messaging.statuses(topic)) < messaging.process_count() - 1:
            is_next_there = self._closed is None and not self._summaries.empty()
            is_late = self._closed is not None and time.monotonic() > self._closed + PATIENCE
            if is_next_there or is_late:
                break
            time.sleep(INTERVAL)
        messaging.remove_statuses(topic)
        summaries = {0: summary} | {process: Summary(**values) for process, values in others.items()}
        self._show(*summary_of_all(summaries, messaging.process_count()))

"""The figures of some steps: as values for Keras's logs, and as one line of text."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_dist._report.units import bytes_text, count_text, percent_text, seconds_text


@dataclass(frozen=True)
class Summary:
    """Figures of steps; None where something is not available. Step times are in seconds."""

    step: int  # the newest one of the epoch, counted from 1
    steps: int  # how many were measured: those for which something was compiled are not
    steps_per_epoch: int | None = None  # unknown for a generator
    epoch: int | None = None  # counted from 1
    epochs: int | None = None
    loss: float | None = None  # the mean of the epoch so far
    expert_load: float | None = None  # of the newest step: times the mean that the fullest expert of a mixture has
    median: float | None = None
    percentile_95: float | None = None
    deviation: float | None = None  # the standard deviation
    samples_per_second: float | None = None  # rows of the global batch
    tokens_per_second: float | None = None  # of the global batch
    mfu: float | None = None  # model FLOP utilization, as a fraction of the peak of all devices
    peak_memory: int | None = None  # the most bytes that were in use on a device of this process since it started
    data_wait: float | None = None  # share of the time of steps in which devices waited for data
    others_wait: float | None = None  # the part of it in which this process had its data and other processes had not
    host_work: float | None = None  # share of the time of steps in which devices waited for other work of the host
    host_wait: float | None = None  # share of all time for their own host: data that it read, other work, callbacks
    goodput: float | None = None  # share of the time since `fit` began in which steps trained

    def logs(self) -> dict[str, float]:
        """Returns the figures that are available, by their names in Keras's logs.

        >>> Summary(step=8, steps=7, median=0.25, mfu=0.5, peak_memory=3 * 2**30).logs()
        {'step_time_ms': 250.0, 'mfu': 0.5, 'peak_memory_gib': 3.0}
        """
        figures = (
            ("step_time_ms", self.median, 1e3),
            ("step_time_p95_ms", self.percentile_95, 1e3),
            ("step_time_std_ms", self.deviation, 1e3),
            ("samples_per_second", self.samples_per_second, 1.0),
            ("tokens_per_second", self.tokens_per_second, 1.0),
            ("mfu", self.mfu, 1.0),
            ("peak_memory_gib", self.peak_memory, 2**-30),
            ("data_wait", self.data_wait, 1.0),
            ("goodput", self.goodput, 1.0),
        )
        return {name: value * factor for name, value, factor in figures if value is not None}

    def line(self) -> str:
        """Returns the figures that are available as one line.

        >>> print(Summary(8, 7, steps_per_epoch=9, epoch=1, epochs=2, loss=0.5, median=0.25, data_wait=0.02).line())
        epoch 1/2 step 8/9 loss 0.5000: 250 ms, data wait 2%
        """
        place = f"step {_of(self.step, self.steps_per_epoch)}"
        if self.epoch is not None:
            place = f"epoch {_of(self.epoch, self.epochs)} {place}"
        if self.loss is not None:
            place += f" loss {self.loss:.4f}" if not 0 < abs(self.loss) < 1e-3 else f" loss {self.loss:.4e}"
        figures = _texts(
            ("{}", self._times_text, self.median),
            ("{} samples/s", count_text, self.samples_per_second),
            ("{} tokens/s", count_text, self.tokens_per_second),
            ("MFU {}", percent_text, self.mfu),
            ("peak memory {}", bytes_text, self.peak_memory),
            ("data wait {}", percent_text, self.data_wait),
            ("goodput {}", percent_text, self.goodput),
            ("fullest expert {} times the mean", "{:.2f}".format, self.expert_load),
        )
        if self.median is None and not self.steps:
            figures.insert(0, "no step time, because each step compiled something")
        return f"{place}: {', '.join(figures)}" if figures else place

    def _times_text(self, median: float) -> str:
        spread = _texts(("p95 {}", seconds_text, self.percentile_95), ("deviation {}", seconds_text, self.deviation))
        return seconds_text(median) + (f" ({', '.join(spread)})" if spread else "")


def _texts(*figures: tuple[str, Callable[[Any], str], float | None]) -> list[str]:
    return [text.format(format_value(value)) for text, format_value, value in figures if value is not None]


def _of(number: int, total: int | None) -> str:
    return f"{number}" if total is None else f"{number}/{total}"

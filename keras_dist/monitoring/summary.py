"""The figures of some steps: as values for Keras's logs, and as one line of text."""

from dataclasses import dataclass

from keras_dist._report.units import bytes_text, count_text, percent_text, seconds_text


@dataclass(frozen=True)
class Summary:
    """Figures of steps; None where something is not available.

    Attributes:
        step: The newest step of the epoch, counted from 1.
        steps: How many steps were measured; those for which something was compiled are not.
        steps_per_epoch: Number of steps of the epoch; unknown for a generator.
        epoch: The epoch, counted from 1, of `epochs`.
        loss: The mean loss of the epoch so far.
        median: Median step time in seconds, and so are `percentile_95` and `deviation` (standard deviation).
        samples_per_second: Rows of the global batch per second of steps.
        tokens_per_second: Tokens of the global batch per second of steps.
        mfu: Model FLOP utilization, as a fraction of the peak of all devices.
        peak_memory: The most bytes that were in use on a device of this process since it started.
        data_wait: Share of the time of steps in which devices waited for data.
        others_wait: The part of `data_wait` in which this process had read its data and other processes had not.
        host_work: Share of the time of steps in which they waited for other work of the host.
        host_wait: Share of the time in which they waited for their own host: for data that it read, other work,
            or callbacks.
        goodput: Share of the time since `fit` began in which steps trained.
    """

    step: int
    steps: int
    steps_per_epoch: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    loss: float | None = None
    median: float | None = None
    percentile_95: float | None = None
    deviation: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory: int | None = None
    data_wait: float | None = None
    others_wait: float | None = None
    host_work: float | None = None
    host_wait: float | None = None
    goodput: float | None = None

    def logs(self) -> dict[str, float]:
        """Returns the figures that are available, by their names in Keras's logs.

        >>> Summary(step=8, steps=7, median=0.25, mfu=0.5, peak_memory=3 * 2**30).logs()
        {'step_time_ms': 250.0, 'mfu': 0.5, 'peak_memory_gib': 3.0}
        """
        values = {
            "step_time_ms": _scaled(self.median, 1e3),
            "step_time_p95_ms": _scaled(self.percentile_95, 1e3),
            "step_time_std_ms": _scaled(self.deviation, 1e3),
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "peak_memory_gib": _scaled(self.peak_memory, 2**-30),
            "data_wait": self.data_wait,
            "goodput": self.goodput,
        }
        return {name: float(value) for name, value in values.items() if value is not None}

    def line(self) -> str:
        """Returns the figures that are available as one line.

        >>> print(Summary(8, 7, steps_per_epoch=9, epoch=1, epochs=2, loss=0.5, median=0.25, data_wait=0.02).line())
        epoch 1/2 step 8/9 loss 0.5000: 250 ms, data wait 2%
        """
        figures = (
            ("{} samples/s", count_text, self.samples_per_second),
            ("{} tokens/s", count_text, self.tokens_per_second),
            ("MFU {}", percent_text, self.mfu),
            ("peak memory {}", bytes_text, self.peak_memory),
            ("data wait {}", percent_text, self.data_wait),
            ("goodput {}", percent_text, self.goodput),
        )
        parts = self._times() + [text.format(of(value)) for text, of, value in figures if value is not None]
        return ": ".join([self._place(), *([", ".join(parts)] if parts else [])])

    def _place(self) -> str:
        """Returns the epoch, the step and the loss."""
        place = f"step {_of(self.step, self.steps_per_epoch)}"
        if self.epoch is not None:
            place = f"epoch {_of(self.epoch, self.epochs)} {place}"
        if self.loss is not None:
            place += f" loss {self.loss:.4f}" if not 0 < abs(self.loss) < 1e-3 else f" loss {self.loss:.4e}"
        return place

    def _times(self) -> list[str]:
        if self.median is None:
            return [] if self.steps else ["no step time, because each step compiled something"]
        spread = (("p95", self.percentile_95), ("deviation", self.deviation))
        known = [f"{name} {seconds_text(value)}" for name, value in spread if value is not None]
        return [seconds_text(self.median) + (f" ({', '.join(known)})" if known else "")]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _of(number: int, total: int | None) -> str:
    return f"{number}" if total is None else f"{number}/{total}"

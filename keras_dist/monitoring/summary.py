"""The figures of some steps: as values for Keras's logs, and as one line of text."""

from dataclasses import dataclass

from keras_dist._report.units import bytes_text, count_text, percent_text, seconds_text


@dataclass(frozen=True)
class Summary:
    """Figures of steps; None where something is not available.

    Attributes:
        step: number of steps since `fit` began.
        steps: how many steps were measured; those for which something was compiled are not.
        median: median step time in seconds, and so are `percentile_95` and `deviation` (standard deviation).
        samples_per_second: rows of the global batch per second of steps.
        tokens_per_second: tokens of the global batch per second of steps.
        mfu: model FLOP utilization, as a fraction of the peak of all devices.
        peak_memory: the most bytes that were in use on a device of this process since it started.
        data_wait: share of the time of steps in which devices waited for data.
        others_wait: the part of `data_wait` in which this process had read its data and other processes had not.
        host_work: share of the time of steps in which they waited for other work of the host.
        host_wait: share of the time in which they waited for their own host: for data that it read, other work,
            or callbacks.
        goodput: share of the time since `fit` began in which steps trained.
    """

    step: int
    steps: int
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
        """Returns the figures as one line, with n/a for those that are not available.

        >>> print(Summary(step=8, steps=7, median=0.25, percentile_95=0.3, deviation=0.01, data_wait=0.02).line())
        step 8: 250 ms (p95 300 ms, deviation 10 ms), samples/s n/a, tokens/s n/a, MFU n/a, peak memory n/a, data wait
        2%, goodput n/a
        """
        if self.median is None:
            time = "step time n/a" if self.steps else "step time n/a (something was compiled for every step)"
        else:
            deviation = "n/a" if self.deviation is None else seconds_text(self.deviation)
            time = f"{seconds_text(self.median)} (p95 {seconds_text(self.percentile_95)}, deviation {deviation})"
        parts = [
            time,
            _rate(self.samples_per_second, "samples/s"),
            _rate(self.tokens_per_second, "tokens/s"),
            f"MFU {_share(self.mfu)}",
            f"peak memory {'n/a' if self.peak_memory is None else bytes_text(self.peak_memory)}",
            f"data wait {_share(self.data_wait)}",
            f"goodput {_share(self.goodput)}",
        ]
        return f"step {self.step}: {', '.join(parts)}"


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _rate(value: float | None, unit: str) -> str:
    return f"{unit} n/a" if value is None else f"{count_text(value)} {unit}"


def _share(value: float | None) -> str:
    return "n/a" if value is None else percent_text(value)

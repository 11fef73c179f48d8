"""`Choice`: what `auto` chose, with all candidates and why each lost, as data and as a printed report."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keras_dist._report.report import Report
from keras_dist._report.tables import Lines, Section, Table
from keras_dist._report.units import bytes_text, counted, seconds_text
from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.planning.reports.plan_report import Plan, subject_text
from keras_dist.planning.search.candidates import Candidate
from keras_dist.strategies.base import Distribution

MAX_ROWS = 10  # candidates in a printed choice


@dataclass(frozen=True)
class Trial:
    """A candidate, and what became of it. Figures are those of its plan if it was compiled, else estimates.

    Attributes:
        candidate: Strategy and mesh axes.
        memory_bytes: Memory of a device in bytes.
        wire_bytes: Bytes that a device sends in a step.
        seconds: Time of a step; None if it is not estimated, because memory does not suffice.
        plan: The plan; None if the candidate was not compiled.
        outcome: `"chosen"`, or why it lost.
    """

    candidate: Candidate
    memory_bytes: float
    wire_bytes: float
    seconds: float | None
    plan: Plan | None
    outcome: str


@dataclass(frozen=True)
class Choice(Report):
    """What `kd.auto` chose. Prints with the ten best candidates; `print(choice.table())` shows all.

    Attributes:
        distribution: The distribution, to be passed to `kd.set_distribution`.
        plan: Its plan.
        objective: What was minimized: `"time"`, `"memory"` or `"devices"`.
        trials: All candidates, the chosen one first, then those that were compiled. With `depth`, they are compared by
            models of few blocks, and `plan` is from more of them.
        source: Python code that creates the distribution; see `to_source`.
        notes: What was not tried, and near ties.
        is_interrupted: Whether Ctrl-C ended the search.
    """

    distribution: Distribution
    plan: Plan
    objective: str
    trials: tuple[Trial, ...]
    source: str
    notes: tuple[str, ...]
    is_interrupted: bool = False

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the distribution."""
        return self.plan.mesh

    def to_source(self) -> str:
        """Returns Python code that assigns such a distribution, on the machine that it runs on, to `distribution`."""
        return self.source

    def table(self) -> "Candidates":
        """Returns the table of all candidates, and why each lost. Print it."""
        return Candidates(self.trials)

    def to_dict(self) -> dict[str, Any]:
        """Returns the choice as numbers, strings, lists and dicts, which JSON can encode."""
        return {
            "objective": self.objective,
            "strategy": self.trials[0].candidate.label,
            "mesh": self.mesh.axis_sizes,
            "source": self.source,
            "plan": self.plan.to_dict(),
            **self.table().to_dict(),
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"<Choice of {self.trials[0].candidate} among {counted(len(self.trials), 'candidate')}>"

    def _sections(
        self, most: int | None = MAX_ROWS, how_to_see_all: str = "print(choice.table()) shows all."
    ) -> Iterator[Section]:
        plan, capacity = self.plan, self.plan.memory.capacity
        devices = f"{plan.mesh.devices.size} x {plan.target}"
        limit = "" if capacity is None else f" Each device has {bytes_text(capacity)}."
        chosen = f"{self.trials[0].candidate}. Chosen of {counted(len(self.trials), 'candidate')} for {devices}.{limit}"
        yield subject_text(plan), [Lines((chosen,))]
        yield from self.table()._sections(most, how_to_see_all)
        yield "In Python", [Lines(tuple(self.source.splitlines()))]
        if self.notes:
            yield "Notes", [Lines(self.notes)]


@dataclass(frozen=True)
class Candidates(Report):
    """All candidates of a choice. Prints as a table.

    Attributes:
        trials: The candidates, the chosen one first.
    """

    trials: tuple[Trial, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the candidates as numbers, strings, lists and dicts, which JSON can encode."""
        candidates = [
            {
                "strategy": trial.candidate.label,
                "mesh": dict(trial.candidate.axes),
                "memory_bytes": trial.memory_bytes,
                "wire_bytes": trial.wire_bytes,
                "seconds": trial.seconds,
                "is_compiled": trial.plan is not None,
                "outcome": trial.outcome,
            }
            for trial in self.trials
        ]
        return {"candidates": candidates}

    def _sections(self, most: int | None = None, how_to_see_all: str = "") -> Iterator[Section]:
        rows = []
        for trial in self.trials[:most]:
            mark, axes = "" if trial.plan is not None else "~", spell_axes(trial.candidate.axes)
            sizes = [mark + bytes_text(size) for size in (trial.memory_bytes, trial.wire_bytes)]
            seconds = "-" if trial.seconds is None else mark + seconds_text(trial.seconds)
            rows.append((trial.candidate.label, axes, *sizes, seconds, trial.outcome))
        left = len(self.trials) - len(rows)
        more = [Lines((f"... and {counted(left, 'more candidate')}. {how_to_see_all}",))] if left else []
        columns = "strategy", "mesh", ">memory", ">sent", ">time", "outcome"
        yield "Candidates: per device, ~ for what is estimated and not compiled", [Table(columns, rows), *more]


class NoCandidateError(ValueError):
    """The devices, the strategies and the kept axes leave no candidate."""


class NothingFitsError(ValueError):
    """No candidate fits. `trials` has all candidates, the one that comes closest first."""

    def __init__(self, message: str, trials: tuple[Trial, ...]):
        super().__init__(message)
        self.trials = trials

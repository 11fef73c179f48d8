"""Finds the best candidate: closed forms prune, then candidates are compiled, the most promising first."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from keras_dist._report.units import bytes_text, counted, seconds_text
from keras_dist.planning.fitting_options import SEARCHED, error_line, plan_with_fitting_options
from keras_dist.planning.hardware.figures import Hardware
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.planning.search.candidates import DATA, MODEL, Candidate
from keras_dist.planning.search.choice import Trial
from keras_dist.planning.search.estimates import Estimates, seconds_of
from keras_dist.planning.search.search_space import Sizes
from keras_dist.steps.options import StepOptions
from keras_dist.strategies.base import Distribution

# Candidates that cannot be better by more than this are not compiled.
_TOLERANCE = 0.02
# Candidates that are expected to take this much longer than the best are not compiled, though they might overlap more.
_MAX_SLOWDOWN = 1.5
# Candidates that are expected to need this much more than a device has are not compiled if others do not fit.
_MAX_MEMORY_EXCESS = 1.2
# Unless `trials` says otherwise, at most this many candidates are compiled, and this fraction of them once one fits,
# though never fewer than these.
_MAX_COMPILED, _FRACTION, _MIN_COMPILED = 12, 0.25, 3
# Step options are searched for so many candidates that do not fit without them.
_WITH_OPTIONS = 3
# Forecasts of two programs of one model for one target are not good enough to tell nearer ones apart.
ACCURACY = 0.1


@dataclass
class Search:
    """The search for one target and one batch."""

    candidates: dict[Candidate, Distribution]  # the simplest first
    sizes: Mapping[Candidate, Sizes]
    compile: Callable[[Distribution, Callable[[str], Any]], Plan]  # raises an error if the target refuses it
    objective: str  # "time" or "memory"
    trials: int | None  # the most candidates to compile; None for a quarter of them
    hardware: Hardware | None  # of the target, None if it is unknown
    report: Callable[[str], Any]  # shows what is being done
    searches_options: bool = False  # whether step options are searched that make candidates fit
    prunes_by_time: bool = True  # whether expected times say which candidates need not be compiled
    plans: dict[Candidate, Plan] = field(default_factory=dict)
    refused: dict[Candidate, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_interrupted: bool = False

    def __post_init__(self):
        self.estimates = Estimates(self.sizes, self.hardware)
        self.capacity = None if self.hardware is None else self.hardware.memory_bytes

    def run(self) -> Candidate | None:
        """Compiles candidates until none of the others can be better. Returns the best that fits, None if none does."""
        try:
            while self.compiled < self.limit:
                candidate = self._next()
                if candidate is None:
                    break
                self._compile(candidate)
            if self.searches_options:
                for candidate in self._short_of_memory():
                    self._compile_with_options(candidate)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.is_interrupted = True
        return self.best

    @property
    def best(self) -> Candidate | None:
        """The best candidate that was compiled and fits; of equal ones the simplest."""
        plans = {each: self.plans[each] for each in self.candidates if each in self.plans}
        # Without a forecast nothing is known of the link to the host, so what needs it comes last.
        costs = {
            each: (plan.host_traffic > 0 and plan.roofline.forecast is None, self.cost(plan))
            for each, plan in plans.items()
            if plan.fits is not False
        }
        return min(costs, key=costs.__getitem__, default=None)

    @property
    def best_cost(self) -> float:
        best = self.best
        return math.inf if best is None else self.cost(self.plans[best])

    def cost(self, plan: Plan) -> float:
        return seconds_of(plan) if self.objective == "time" else plan.memory.total

    @property
    def compiled(self) -> int:
        """The number of candidates that were compiled, or refused by the compiler, without step options."""
        return _count_without_options((*self.plans, *self.refused))

    @property
    def limit(self) -> int:
        if self.trials is not None:
            return self.trials
        if self.best is None or not self.prunes_by_time:
            return _MAX_COMPILED
        return min(_MAX_COMPILED, max(_MIN_COMPILED, int(_FRACTION * _count_without_options(self.candidates))))

    @property
    def untried(self) -> list[Candidate]:
        """The candidates that might be the best and are not compiled, the most promising first."""
        return sorted(filter(self._is_expected_to_fit, self._left()), key=self._expected)

    def show(self, candidate: Candidate, activity: str) -> None:
        """Shows what is done for a candidate, how many are compiled, and the best so far."""
        text = seconds_text if self.objective == "time" else bytes_text
        so_far = "" if self.best is None else f", best so far {text(self.best_cost)}"
        self.report(f"{self.compiled} of at most {self.limit} compiled{so_far}. {candidate}: {activity}")

    def _compile(self, candidate: Candidate) -> None:
        try:
            plan = self.compile(self.candidates[candidate], functools.partial(self.show, candidate))
        except Exception as error:  # of XLA, JAX, Keras or the model: others may compile
            self.refused[candidate] = error_line(error)
            if len(self.refused) == min(3, len(self.candidates)) and not self.plans:
                raise ValueError(f"No candidate can be planned. {candidate}: {error_line(error)}") from error
            return
        self.plans[candidate] = plan
        self.estimates.observe(candidate, plan)

    def _short_of_memory(self) -> list[Candidate]:
        """The candidates that might be the best with step options that make them fit, the most promising first."""
        if not self.plans and not self.refused:
            smallest = min(self.candidates, key=lambda each: self.sizes[each].state - self.sizes[each].optimizer)
            least = self.estimates.min_bytes(smallest) - self.sizes[smallest].optimizer
            if self.capacity is None or least <= self.capacity:
                self._compile(smallest)
        short = [each for each, plan in self.plans.items() if plan.fits is False]
        if self.best is None:
            return sorted(short, key=lambda each: self.plans[each].memory.total)[:_WITH_OPTIONS]
        faster = [each for each in short if self.estimates.min_seconds(each) < (1 - _TOLERANCE) * self.best_cost]
        return sorted(faster, key=self.estimates.seconds)[:_WITH_OPTIONS]

    def _compile_with_options(self, candidate: Candidate) -> None:
        """Compiles a candidate that does not fit with step options, until those of least cost are found that fit."""
        distribution = self.candidates[candidate]

        def compile(under: Distribution) -> Plan:
            changed = replace(candidate, options=under.step_options)
            plan = self.compile(under, functools.partial(self.show, changed))
            self.candidates[changed], self.plans[changed] = under, plan
            return plan

        # What is in host memory takes long to fetch, so it is for models that fit nowhere else.
        searched = SEARCHED if self.best is None else [name for name in SEARCHED if name != "offload"]
        found = plan_with_fitting_options(self.plans[candidate], distribution, compile, searched)
        self.notes += [f"{candidate}: {note}" for note in found.notes]
        if found.is_interrupted:
            raise KeyboardInterrupt

    def _next(self) -> Candidate | None:
        """The candidate to compile next: first the one with the least state, then the best that may still win."""
        if not self.plans:
            # Pure data parallelism with the least state compiles fastest.
            return min(
                self._left(),
                key=lambda each: (each.size(MODEL) > 1, set(each.axes) != {DATA}, self.estimates.min_bytes(each)),
                default=None,
            )
        untried = self.untried
        for candidate in untried:
            if not set(self.estimates.simpler(candidate)) & set(untried):
                return candidate
        if self.best is not None:
            return None
        # Nothing fits so far. Estimates may be wrong, but not by much once some candidates are compiled.
        closest = min(self._left(), key=self.estimates.bytes, default=None)
        is_near = closest is not None and self.estimates.bytes(closest) <= _MAX_MEMORY_EXCESS * (self.capacity or 0)
        return closest if len(self.plans) < 2 or is_near else None

    def _left(self) -> list[Candidate]:
        """The candidates that are not compiled and might be the best, if they fit."""
        left = [each for each in self.candidates if each not in self.plans and each not in self.refused]
        return [each for each in left if self._why_not(each) is None]

    def _is_expected_to_fit(self, candidate: Candidate) -> bool:
        return self.capacity is None or self.estimates.bytes(candidate) <= self.capacity

    def _expected(self, candidate: Candidate) -> float:
        return self.estimates.seconds(candidate) if self.objective == "time" else self.estimates.bytes(candidate)

    def _why_not(self, candidate: Candidate) -> str | None:
        """Why a candidate that is not compiled need not be; None if it may be the best."""
        least = self.estimates.min_bytes(candidate)
        if self.capacity is not None and least > self.capacity:
            return f"cannot fit: variables and batch take {bytes_text(least)}"
        cost = self.best_cost
        if self.objective == "memory":
            return "cannot need less" if least >= (1 - _TOLERANCE) * cost else None
        if not self.prunes_by_time:
            return None
        for simpler in self.estimates.simpler(candidate):
            plan = self.plans.get(simpler)
            is_left_out = plan is None and self._why_not(simpler) is not None and self._is_expected_to_fit(simpler)
            if is_left_out or (plan is not None and plan.fits is not False):
                return f"sends more than {simpler}"
        bound, expected = self.estimates.min_seconds(candidate), self.estimates.seconds(candidate)
        if bound >= (1 - _TOLERANCE) * cost:
            return f"cannot win: at least {seconds_text(bound)}" if bound > cost else "cannot win by more than 2%"
        if self.estimates.optimistic_seconds(candidate) >= (1 - _TOLERANCE) * cost or expected >= _MAX_SLOWDOWN * cost:
            slower = f"{100 * (expected / cost - 1):.0f}"
            return f"expected to be {slower}% slower" if int(slower) > 0 else "expected to take as long"
        return None

    def trial_table(self, chosen: Candidate) -> tuple[Trial, ...]:
        """Returns all candidates with what became of them, the chosen one first, then the compiled ones by cost."""
        compiled = sorted(self.plans, key=lambda each: (self.plans[each].fits is False, self.cost(self.plans[each])))
        others = sorted((each for each in self.candidates if each not in self.plans), key=self._expected)
        return tuple(self._trial(each, chosen) for each in dict.fromkeys((chosen, *compiled, *self.refused, *others)))

    def _trial(self, candidate: Candidate, chosen: Candidate) -> Trial:
        if candidate in self.plans:
            plan = self.plans[candidate]
            seconds = None if plan.roofline.seconds is None and plan.fits is False else seconds_of(plan)
            outcome = self._outcome(plan, self.plans[chosen])
            return Trial(candidate, plan.memory.total, plan.wire_bytes, seconds, plan, outcome)
        if error := self.refused.get(candidate):
            outcome = f"refused: {error}"
        elif reason := self._why_not(candidate):
            outcome = reason
        elif not self._is_expected_to_fit(candidate):
            outcome = "not compiled: expected not to fit"
        else:
            outcome = (
                "not tried: interrupted" if self.is_interrupted else f"not tried within {counted(self.limit, 'trial')}"
            )
        wire = sum(self.sizes[candidate].wire.values())
        seconds = None if outcome.startswith("cannot fit") or not self.plans else self.estimates.seconds(candidate)
        return Trial(candidate, self.estimates.bytes(candidate), wire, seconds, None, outcome)

    def _outcome(self, plan: Plan, best: Plan) -> str:
        if plan.fits is False:
            return "closest, but does not fit" if plan is best else "does not fit"
        if plan is best:
            return "chosen"
        ratio = self.cost(plan) / self.cost(best) if self.cost(best) else 1.0
        if ratio <= 1:
            return "equal; the chosen one is simpler"
        return f"{100 * (ratio - 1):.1f}% {'slower' if self.objective == 'time' else 'more memory'}"


def _count_without_options(candidates: Iterable[Candidate]) -> int:
    return sum(candidate.options == StepOptions() for candidate in candidates)

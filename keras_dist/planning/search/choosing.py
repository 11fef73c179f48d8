"""Chooses a distribution for one batch on some devices, and explains the choice."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from keras_dist._report.units import bytes_text, counted
from keras_dist._report.user_warnings import warn
from keras_dist.attention.attention import attention_warnings_repeated
from keras_dist.planning.compiling.compilation_cache import CompilationCache
from keras_dist.planning.fitting_options import error_line
from keras_dist.planning.frozen_mapping import FrozenMapping
from keras_dist.planning.plan import UnequalBlocksError, plan_step
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.planning.search.candidates import COMBINED, STRATEGIES, Candidate
from keras_dist.planning.search.choice import Choice, NothingFitsError
from keras_dist.planning.search.places import Place
from keras_dist.planning.search.search import ACCURACY, Search
from keras_dist.planning.search.search_space import search_space
from keras_dist.planning.targets.target import Target
from keras_dist.strategies.base import Distribution

# Depths compiled to compare candidates, and to plan the chosen one, which are those of `plan`.
_COMPARED_DEPTHS, _PLANNED_DEPTHS = (1, 2), (2, 4)
_NOT_TRIED = (
    "Not tried: pipeline parallelism, expert axes other than that of the batch, rules of your own, step options where "
    "a model fits without them, and other values of min_shard_bytes and sequence_exchange."
)


@dataclass(frozen=True)
class Task:
    """What to choose for, wherever it is to run."""

    build_model: Any
    step: str = "train"
    strategies: tuple[str, ...] = (*STRATEGIES, *COMBINED)
    trials: int | None = None
    depth: int | None = None
    compiler_options: FrozenMapping = field(default_factory=FrozenMapping)
    objective: str = "time"
    searches_options: bool = False
    report: Callable[[str], Any] = lambda activity: None

    def plan(
        self,
        distribution: Distribution,
        batch: Any,
        depths: tuple[int, int] = _COMPARED_DEPTHS,
        report: Callable[[str], Any] | None = None,
    ) -> Plan:
        """Returns the plan of a distribution, with compilations of models of `depths` if it is to be extrapolated."""
        report, options, cache = report or self.report, self.compiler_options, CompilationCache()
        return plan_step(self.build_model, distribution, batch, self.step, self.depth, depths, options, report, cache)


def choose(task: Task, place: Place, batch: Any, is_final: bool = True) -> Choice:
    """Returns the best choice on some devices, planned as `plan` does it with `is_final`.

    Raises NothingFitsError if no candidate fits.
    """
    task.report(f"Building the model for {place}")
    with _recorded_warnings() as building_warnings:
        build = task.build_model if task.depth is None else functools.partial(task.build_model, task.depth)
        candidates, sizes, notes = search_space(build, task.step, task.strategies, place, batch)
    depths, candidate_warnings = _COMPARED_DEPTHS, {}

    def compile(distribution: Distribution, report: Callable[[str], Any]) -> Plan:
        nonlocal depths
        with _recorded_warnings() as candidate_warnings[id(distribution)]:
            try:
                # Blocks are computed again where they repeat, so a model needs two at least.
                repeats = distribution.step_options.remat is not None
                return task.plan(distribution, batch, _PLANNED_DEPTHS if repeats else depths, report)
            except UnequalBlocksError:
                if depths == _PLANNED_DEPTHS:
                    raise
                depths = _PLANNED_DEPTHS  # such as blocks of two kinds that alternate
                return task.plan(distribution, batch, depths, report)

    search = Search(
        candidates,
        sizes,
        compile,
        task.objective,
        task.trials,
        place.hardware,
        task.report,
        task.searches_options,
        prunes_by_time=task.step != "generate",
    )
    chosen, confirmed = search.run(), None
    if is_final and task.depth is not None and max(depths) < task.depth and depths != _PLANNED_DEPTHS:
        with _recorded_warnings():
            chosen, confirmed = _confirmed(task, search, chosen, batch)
    if chosen is None:
        raise _nothing_fits(task, search, place)
    distribution = candidates[chosen]
    if is_final:
        caught = (*building_warnings, *candidate_warnings[id(distribution)])
        for warning in {(each.category, str(each.message)): each for each in caught}.values():
            warn(warning.message, warning.category)
    comment = f"# For {place}.\n" if isinstance(place.devices, Target) else ""
    return Choice(
        distribution=distribution,
        plan=confirmed or search.plans[chosen],
        objective=task.objective,
        trials=search.trial_table(chosen),
        source=comment + chosen.to_source(distribution, place.mesh_source(distribution.device_mesh)),
        notes=(*notes, *search.notes, *_notes(search, chosen), _NOT_TRIED),
        is_interrupted=search.is_interrupted,
    )


@contextlib.contextmanager
def _recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Records all warnings of a block, also those that are shown once in a process."""
    with warnings.catch_warnings(record=True) as caught, attention_warnings_repeated():
        warnings.simplefilter("always")
        yield caught


def _confirmed(
    task: Task, search: Search, chosen: Candidate | None, batch: Any
) -> tuple[Candidate | None, Plan | None]:
    """Plans what is chosen as `plan` does it; while deeper models show that it does not fit, the next best."""
    while chosen is not None and not search.is_interrupted:
        try:
            show = functools.partial(search.show, chosen)
            plan = task.plan(search.candidates[chosen], batch, _PLANNED_DEPTHS, show)
        except KeyboardInterrupt:
            search.is_interrupted = True
            break
        except Exception as error:  # of XLA, JAX, Keras or the model: the plan of fewer blocks remains
            search.notes.append(f"The plan is of fewer blocks, because that of 2 and 4 failed. {error_line(error)}")
            break
        if plan.fits is not False:
            compared = "Candidates are compared by models of 1 and 2 blocks"
            search.notes.insert(0, f"{compared}, and the plan of the chosen one is from 2 and 4.")
            return chosen, plan
        search.plans[chosen] = plan
        chosen = search.best
    return chosen, None


def _notes(search: Search, chosen: Candidate) -> list[str]:
    notes: list[str] = []
    costs = {each: search.cost(plan) for each, plan in search.plans.items() if plan.fits is not False}
    cost = costs.pop(chosen)
    near = sorted((each for each in costs if costs[each] <= (1 + ACCURACY) * cost), key=costs.__getitem__)
    if near and search.objective == "time":
        listed = "; ".join(f"{each}, {100 * (costs[each] / cost - 1):.1f}% slower" for each in near[:3])
        notes.append(
            f"{counted(len(near), 'other candidate', 'is', 'are')} nearer to the chosen one than the "
            f"forecast is accurate ({100 * ACCURACY:.0f}%): {listed}. Measure them if it matters."
        )
    untried = search.untried
    if search.is_interrupted:
        notes.append(
            f"The search was interrupted: {counted(len(untried), 'candidate', 'is', 'are')} not compiled, though "
            "perhaps better."
        )
    elif untried:
        notes.append(
            f"{counted(len(untried), 'candidate', 'is', 'are')} not compiled, though perhaps better. The most "
            f"promising is {untried[0]}. To try all of them, pass trials={search.compiled + len(untried)}."
        )
    if (roofline := search.plans[chosen].roofline).forecast is None:
        notes.append(
            "The speed of this hardware is unknown: times are FLOP, memory traffic and bytes sent at nominal rates of "
            "1 TFLOP/s, 100 GB/s and 10 GB/s, which can only rank candidates."
            if roofline.compute_seconds is None
            else f"The rate of the {roofline.network} between hosts is unknown: bytes that cross it are counted at a "
            "nominal rate of 10 GB/s, which can only rank candidates."
        )
    return notes


def _nothing_fits(task: Task, search: Search, place: Place) -> ValueError:
    """Returns the error for a model that fits under no candidate: what comes closest, and what would help."""
    if not search.plans and search.refused:
        candidate, message = next(iter(search.refused.items()))
        return ValueError(f"No candidate can be planned for {place}. {candidate}: {message}")
    capacity, held_text = search.capacity, ""
    if search.plans:
        closest = min(search.plans, key=lambda each: search.plans[each].memory.total)
        memory = search.plans[closest].memory
        needed, held = memory.total, memory.state + memory.batch
        held_text = f", {bytes_text(held)} of them"
    else:
        closest = min(search.candidates, key=search.estimates.min_bytes)
        needed = held = search.estimates.min_bytes(closest)
    text = (
        f"No candidate fits on {place}. The closest is {closest}, which needs {bytes_text(needed)}"
        f"{f' of {bytes_text(capacity)}' if capacity else ''} per device{held_text} for variables and batch."
    )
    if untried := search.untried:
        text += f" {len(untried)} more might fit: to try them, pass trials={search.compiled + len(untried)}."
    # The capacity is unknown if the hardware is, and its compiler has refused every candidate.
    help, share = [], 100 * (capacity - held) / max(needed - held, 1) if capacity else 0
    if 1 <= share < 100:
        help.append(f"about {math.floor(share)}% of the rows")
    if {"fsdp", "fsdp_tp", "fsdp_tp_sp"} & set(task.strategies):
        times = f"{2 ** math.ceil(math.log2(max(needed / capacity, 1.01)))} times as many" if capacity else "more"
        help.append(f"{times} devices")
    else:
        help.append('strategies that shard variables, such as "fsdp"')
    if task.step == "train":
        has_activations = needed > 2 * held and not task.searches_options
        help.append("kd.StepOptions(remat=...)" if has_activations else "an optimizer with less state")
    text += f" Try {', or '.join([', '.join(help[:-1]), help[-1]] if help[1:] else help)}."
    return NothingFitsError(" ".join([text, *search.notes]), search.trial_table(closest))

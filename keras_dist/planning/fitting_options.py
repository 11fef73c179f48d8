"""Step options with which a training step fits into memory that does not fit without them: found by compiling."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from keras_dist.layout.tensor_layout import axis_names, axis_tuple
from keras_dist.planning.hlo.module_costs import LargeValue
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.steps.options import OptionWithoutEffectError, StepOptions
from keras_dist.strategies.base import Distribution

SEARCHED = ("loss_chunk", "remat", "microbatches", "offload")
_LOSS_CHUNK = 1024  # tokens; fewer need little less memory, and products of so few rows take more time
# The fields of `StepOptions` that each option changes, in the order in which ladders add them.
_FIELDS: dict[str, tuple[str, ...]] = {
    "offload": ("offload",),
    "loss_chunk": ("loss_chunk",),
    "remat": ("remat",),
    "microbatches": ("microbatches", "reduce_gradients"),
}


@dataclass(frozen=True)
class Found:
    """What a search for step options found."""

    plan: Plan  # with the options of least cost that fit; if none do, the last one compiled, or the one that was passed
    notes: tuple[str, ...] = ()  # the options that could not be compiled, with the errors
    is_interrupted: bool = False  # whether Ctrl-C ended the search


def plan_with_fitting_options(
    planned: Plan,
    distribution: Distribution,
    compile: Callable[[Distribution], Plan],
    searched: Sequence[str] = SEARCHED,
) -> Found:
    """Searches for the step options of least cost that make a training step fit, whose plan does not.

    Options are tried in ladders. Each rung costs more than the one below, and needs less memory:

    * `loss_chunk` where the largest value comes from a product, as logits do;
    * `remat`: "attention" where it holds logits, then "dots", then "full";
    * with the last of them, 2, 4 and 8 microbatches;
    * a second ladder has the same with optimizer state in host memory, which is slow.

    So the top of a ladder is compiled first, and then few rungs in between. None of these options changes the losses of
    a model without batch statistics and dropout.

    Compiling may fail, in the compiler, in JAX or in the model. Rungs in between that fail are passed over. If the top
    fails, the option that is to blame is left out of all ladders.

    `searched` are the names of the options that may be changed, of those that `distribution` leaves at their defaults.
    `compile` plans the step under the distribution with other options.
    """
    search = _Search(planned, distribution, compile, searched)
    try:
        while (failed := search.climb()) is not None:  # without one more option each time that a top fails
            search.usable.remove(search.to_blame(failed))
    except KeyboardInterrupt:
        note = "The search for step options with which it fits was interrupted."
        return Found(search.best, (*search.failures(), note), is_interrupted=True)
    return Found(search.best, search.failures())


def error_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message.

    >>> error_line(ValueError("no rows\\nin the batch")), error_line(MemoryError())
    ('ValueError: no rows', 'MemoryError')
    """
    first = str(error).strip().partition("\n")[0].strip()
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class _Search:
    """A search; see `plan_with_fitting_options`."""

    def __init__(self, planned: Plan, distribution: Distribution, compile: Callable, searched: Sequence[str]):
        self._planned, self._distribution, self._compile = planned, distribution, compile
        self._plans: dict[StepOptions, Plan] = {}
        self._errors: dict[StepOptions, Exception] = {}
        self.usable = list(searched)
        self.best = planned

    def failures(self) -> tuple[str, ...]:
        """Returns a note for each error, with the options that ended in it."""
        options: dict[str, list[str]] = defaultdict(list)
        for failed, error in self._errors.items():
            options[error_line(error)].append(failed.text)
        fault = "Step options that could not be compiled"
        return tuple(f"{fault}: {'; '.join(texts)}. {line}" for line, texts in options.items())

    def climb(self) -> StepOptions | None:
        """Finds the lowest rung that fits, of the first ladder whose top does. Returns the top if it fails."""
        for ladder in self._ladders():
            low, high = 0, len(ladder) - 1
            top = self._try(ladder[high])
            if top is None:
                return ladder[high]
            if top.fits is False and self.best.fits is False:
                continue
            while top.fits is not False and low < high:
                middle = (low + high) // 2
                plan = self._try(ladder[middle])
                if plan is None or plan.fits is False:
                    low = middle + 1
                else:
                    high = middle
            break
        return None

    def to_blame(self, failed: StepOptions) -> str:
        """Returns the option that fails without the others, too; if none does, the last one that the ladder adds."""
        base, error = self._planned.step_options, self._errors[failed]
        changed = [n for n in _FIELDS if n in self.usable and getattr(failed, n) != getattr(base, n)]
        if isinstance(error, OptionWithoutEffectError) and error.option in changed:
            return error.option
        for name in changed:
            if self._try(replace(base, **{field: getattr(failed, field) for field in _FIELDS[name]})) is None:
                return name
        return changed[-1]

    def _try(self, options: StepOptions) -> Plan | None:
        """Returns the plan with some options, None if compiling it fails."""
        if options not in self._plans and options not in self._errors:
            try:
                self._plans[options] = self._compile(self._distribution.with_step_options(options))
            except Exception as error:  # the plan that was passed remains, and notes say what happened
                self._errors[options] = error
        plan = self._plans.get(options)
        if plan is not None and (plan.fits is not False or self.best.fits is False):
            self.best = plan
        return plan

    def _ladders(self) -> list[list[StepOptions]]:
        options, memory, ladders = self._planned.step_options, self._planned.memory, []
        if memory.capacity is None or memory.state + memory.batch <= memory.capacity:
            ladders.append(self._rungs(options))
        if "offload" in self.usable and "optimizer" not in options.offload and memory.optimizer:
            offloaded = replace(options, offload=(*options.offload, "optimizer"))
            ladders.append([offloaded, *self._rungs(offloaded)])
        return [ladder for ladder in ladders if ladder]

    def _rungs(self, options: StepOptions) -> list[StepOptions]:
        rungs, planned = [], self._planned
        if "loss_chunk" in self.usable and options.loss_chunk is None and _may_be_logits(planned.largest_values[:1]):
            options = replace(options, loss_chunk=_LOSS_CHUNK)
            rungs.append(options)
        if "remat" in self.usable and options.remat is None:
            holds_logits = any(attention.logits_bytes for attention in planned.attention)
            modes = ("attention", "dots", "full") if holds_logits else ("dots", "full")
            rungs += [replace(options, remat=mode) for mode in modes]
        if "microbatches" in self.usable and options.microbatches == 1:
            # Gradients that are reduced once are held unsharded, which sharded optimizer state leaves no memory for.
            batch_axes = {*axis_tuple(self._distribution.batch_dim_name)}
            is_sharded = any(batch_axes & {*axis_names(v.axes)} for v in planned.variables if v.part == "optimizer")
            reduced = "microbatch" if is_sharded and options.reduce_dtype is None else options.reduce_gradients
            top = rungs[-1] if rungs else options
            rungs += [replace(top, microbatches=number, reduce_gradients=reduced) for number in (2, 4, 8)]
        return rungs


def _may_be_logits(values: Sequence[LargeValue]) -> bool:
    """Whether values were computed by products of the forward pass, or by a loss."""
    return any(re.search(r"jvp\(.*(/dot_general$|compile_loss)", value.op_name) for value in values)

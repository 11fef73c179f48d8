"""Step options with which a training step fits into memory that does not fit without them: found by compiling."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from keras_dist._keras.train_step import OptionWithoutEffectError
from keras_dist.layout.tensor_layout import axis_names, axis_tuple
from keras_dist.planning.report import Plan
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.step_options import StepOptions

SEARCHED = ("remat", "microbatches", "offload")
_MICROBATCHES = (2, 4, 8)


def plan_with_fitting_options(
    planned: Plan,
    distribution: Distribution,
    compile: Callable[[Distribution], Plan],
    searched: Sequence[str] = SEARCHED,
) -> Plan:
    """Returns the plan with the step options of least cost that make a step fit; if none do, the last one compiled.

    Options are tried in ladders. Each rung costs more than the one below, and needs less memory:

    * `remat`: "attention" where it holds logits, then "dots", then "full";
    * with the last of them, 2, 4 and 8 microbatches;
    * a second ladder has the same with optimizer state in host memory, which is slow.

    So the top of a ladder is compiled first, and then few rungs in between. None of these options changes the losses of
    a model without batch statistics and dropout.

    Args:
        planned: The plan of a training step that does not fit.
        distribution: Its distribution.
        compile: Plans the step under the distribution with other options.
        searched: Names of the options that may be changed, of those that `distribution` leaves at their defaults.
    """

    def compile_with(options: StepOptions) -> Plan:
        return compile(distribution.with_step_options(options))

    usable = list(searched)
    while True:
        try:
            best = planned
            for ladder in _ladders(planned, distribution, usable):
                best = _lowest_that_fits(ladder, compile_with)
                if best.fits is not False:
                    break
            return best
        except OptionWithoutEffectError as error:
            if error.option not in usable:
                raise
            usable.remove(error.option)


def _ladders(planned: Plan, distribution: Distribution, usable: Sequence[str]) -> list[list[StepOptions]]:
    options, memory, ladders = planned.step_options, planned.memory, []
    if memory.capacity is None or memory.state + memory.batch <= memory.capacity:
        ladders.append(_rungs(planned, distribution, options, usable))
    if "offload" in usable and "optimizer" not in options.offload and memory.optimizer:
        offloaded = replace(options, offload=(*options.offload, "optimizer"))
        ladders.append([offloaded, *_rungs(planned, distribution, offloaded, usable)])
    return [ladder for ladder in ladders if ladder]


def _rungs(planned: Plan, distribution: Distribution, options: StepOptions, usable: Sequence[str]) -> list[StepOptions]:
    rungs = []
    if "remat" in usable and options.remat is None:
        holds_logits = any(attention.logits_bytes for attention in planned.attention)
        modes = ("attention", "dots", "full") if holds_logits else ("dots", "full")
        rungs += [replace(options, remat=mode) for mode in modes]
    if "microbatches" in usable and options.microbatches == 1:
        # Gradients that are reduced once are held unsharded, which sharded optimizer state leaves no memory for.
        batch_axes = {*axis_tuple(distribution.batch_dim_name)}
        is_sharded = any(batch_axes & {*axis_names(v.axes)} for v in planned.variables if v.part == "optimizer")
        reduced = "microbatch" if is_sharded and options.reduce_dtype is None else options.reduce_gradients
        top = rungs[-1] if rungs else options
        rungs += [replace(top, microbatches=number, reduce_gradients=reduced) for number in _MICROBATCHES]
    return rungs


def _lowest_that_fits(ladder: Sequence[StepOptions], compile: Callable[[StepOptions], Plan]) -> Plan:
    """Returns the plan of the lowest rung that fits, or of the highest one if that does not."""
    low, high = 0, len(ladder) - 1
    best = compile(ladder[high])
    if best.fits is False:
        return best
    while low < high:
        middle = (low + high) // 2
        plan = compile(ladder[middle])
        if plan.fits is False:
            low = middle + 1
        else:
            best, high = plan, middle
    return best

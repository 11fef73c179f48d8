"""Plans of a model under each of some strategies, on the mesh where its state takes the least memory."""

from collections.abc import Sequence
from typing import Any

from keras_dist.planning.fitting_options import error_line
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.planning.search.choosing import Task
from keras_dist.planning.search.places import place_of
from keras_dist.planning.search.search_space import search_space


def plans_by_strategy(
    build_model: Any, batch: Any, target: Any, step: str, strategies: Sequence[str] = ("dp", "fsdp", "tp")
) -> tuple[dict[str, Plan], list[str]]:
    """Compiles a step of a model for a target under each strategy, also where it does not fit.

    Args:
        build_model: Function without arguments that returns a compiled model.
        batch: Global batch, as `plan` takes it.
        target: Hardware, as `auto` takes it.
        step: `"train"`, `"test"` or `"predict"`.
        strategies: Names of strategies, as `auto` takes them.

    Returns:
        The plan of each strategy that the model allows, by its label in reports, and notes on the others.

    Raises:
        Exception: What the last strategy raised, if none can be compiled.
    """
    candidates, sizes, notes = search_space(build_model, step, strategies, place_of(target, None), batch)
    task, plans, failure = Task(build_model, step), {}, None
    for strategy in strategies:
        found = [each for each in candidates if each.strategy == strategy]
        if not found:
            continue
        least = min(found, key=lambda each: sizes[each].state)  # the simplest of equal ones
        try:
            plans[least.label] = task.plan(candidates[least], batch)
        except Exception as error:  # of XLA, JAX, Keras or the model: the other strategies remain
            failure = error
            notes.append(f"{least} could not be compiled. {error_line(error)}")
    if failure is not None and not plans:
        raise failure
    return plans, notes

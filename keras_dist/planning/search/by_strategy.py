"""Plans of a model under each of some strategies, on the mesh where its state takes the least memory."""

from collections.abc import Sequence
from typing import Any

from keras_dist.planning.reports.plan_report import Plan
from keras_dist.planning.search.choosing import Task
from keras_dist.planning.search.places import place_of
from keras_dist.planning.search.search_space import search_space


def plans_by_strategy(
    build_model: Any, batch: Any, target: Any, step: str, strategies: Sequence[str] = ("dp", "fsdp", "tp")
) -> tuple[dict[str, Plan], list[str]]:
    """Compiles a step of a model under each strategy, also where it does not fit; the arguments are those of `auto`.

    Returns the plans by the labels of strategies in reports, and notes on the strategies that the model does not allow.
    """
    candidates, sizes, notes = search_space(build_model, step, strategies, place_of(target, None), batch)
    task, plans = Task(build_model, step), {}
    for strategy in strategies:
        if found := [each for each in candidates if each.strategy == strategy]:
            least = min(found, key=lambda each: sizes[each].state)  # the simplest of equal ones
            plans[least.label] = task.plan(candidates[least], batch)
    return plans, notes

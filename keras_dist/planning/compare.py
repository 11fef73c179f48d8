"""`compare`: several plans in one table."""

from dataclasses import dataclass
from typing import Any

from keras_dist._report.tables import Section, Table, html_of, text_of
from keras_dist._report.units import bytes_text, count_text, percent_text, seconds_text
from keras_dist.mesh.axes import spell_axes
from keras_dist.planning.plan import Plan
from keras_dist.planning.report import bound_text, distribution_name


@dataclass(frozen=True)
class Comparison:
    """Plans beside each other. It prints as a table of one row a plan.

    Attributes:
        names: what each plan is called.
        plans: the plans.
    """

    names: tuple[str, ...]
    plans: tuple[Plan, ...]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the figures of the table by the names of the plans, in bytes and seconds; None is not known."""
        return {name: _figures(plan) for name, plan in zip(self.names, self.plans, strict=True)}

    def __str__(self) -> str:
        return text_of([self._section()])

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.names)}>"

    def _repr_html_(self) -> str:
        return html_of([self._section()])

    def _section(self) -> Section:
        # What all have in common is the title; what differs stands with each plan.
        subjects = [f"{plan.model}, {plan.step} step, {count_text(plan.parameters)} parameters" for plan in self.plans]
        is_same = len(set(subjects)) == 1
        rows = [
            _row(name if is_same else f"{name}\n{subject}", plan)
            for name, plan, subject in zip(self.names, self.plans, subjects, strict=True)
        ]
        return subjects[0] if is_same else "Plans", [Table(_COLUMNS, rows)]


_COLUMNS = (
    "plan",
    "on",
    ">memory",
    ">weights",
    ">optimizer",
    ">temporaries",
    ">sends",
    ">at least",
    ">MFU",
    ">compiled in",
)


def compare(*plans: Plan, **named: Plan) -> Comparison:
    """Returns plans beside each other, to choose among distributions, meshes or hardware.

    They may be of different models and steps. In the table, memory is that of one device and `sends` what one device
    sends in a step; a step takes at least the time shown, bound by what stands below it; MFU is the model FLOP
    utilization at that time.

    Args:
        *plans: plans, which are called by their distributions.
        **named: plans, which are called by the names that they are given.

    Returns:
        The comparison.

    Raises:
        ValueError: no plan.
        TypeError: something that is no plan.

    Example:

    >>> compare()
    Traceback (most recent call last):
    ValueError: A comparison is of one plan or more. Received: none. Pass plans, as in compare(fsdp=plan_a, tp=plan_b).
    """
    by_name: dict[str, Plan] = {}
    for value in plans:
        _require_plan(value)
        kind, number = distribution_name(value), 1
        name = kind
        while name in by_name or name in named:
            number += 1
            name = f"{kind} {number}"
        by_name[name] = value
    for name, value in named.items():
        _require_plan(value)
        by_name[name] = value
    if not by_name:
        raise ValueError(
            "A comparison is of one plan or more. Received: none. Pass plans, as in compare(fsdp=plan_a, tp=plan_b)."
        )
    return Comparison(tuple(by_name), tuple(by_name.values()))


def _require_plan(value: Any) -> None:
    if not isinstance(value, Plan):
        raise TypeError(
            f"Plans are compared, as keras_dist.plan returns them. Received: {value!r} ({type(value).__name__}). "
            "Pass them one by one, as in compare(*plans)."
        )


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "step": plan.step,
        "parameters": plan.parameters,
        "target": plan.target,
        "devices": plan.mesh.devices.size,
        "mesh": plan.mesh.axis_sizes,
        "distribution": distribution_name(plan),
        "fits": plan.fits,
        "memory_bytes": plan.memory.total,
        "capacity_bytes": plan.memory.capacity,
        "weights_bytes": plan.memory.weights,
        "optimizer_bytes": plan.memory.optimizer,
        "temporaries_bytes": plan.memory.temporaries,
        "wire_bytes": plan.wire_bytes,
        "wire_bytes_by_kind": _by_kind(plan),
        "seconds": plan.roofline.seconds,
        "bound": plan.roofline.bound,
        "model_flops_utilization": plan.model_flops_utilization,
        "compile_seconds": plan.compile_seconds,
    }


def _by_kind(plan: Plan) -> dict[str, float]:
    kinds: dict[str, float] = {}
    for each in plan.traffic:
        kinds[each.kind] = kinds.get(each.kind, 0) + each.wire_bytes
    return kinds


def _row(name: str, plan: Plan) -> tuple[str, ...]:
    memory, utilization = plan.memory, plan.model_flops_utilization
    fits = {True: "fits", False: "does not fit", None: "capacity not known"}[plan.fits]
    of = "" if memory.capacity is None else f"of {bytes_text(memory.capacity)}\n"
    bound = "" if plan.roofline.bound is None else f"\n{bound_text(plan)}"
    return (
        name,
        f"{plan.mesh.devices.size} x {plan.target}\n{spell_axes(plan.mesh.axis_sizes)}",
        f"{bytes_text(memory.total)}\n{of}{fits}",
        bytes_text(memory.weights),
        bytes_text(memory.optimizer),
        bytes_text(memory.temporaries),
        bytes_text(plan.wire_bytes),
        f"{seconds_text(plan.roofline.seconds)}{bound}",
        "-" if utilization is None else percent_text(utilization),
        seconds_text(plan.compile_seconds),
    )

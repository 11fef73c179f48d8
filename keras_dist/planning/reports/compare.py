"""`compare`: several plans in one table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keras_dist._report.report import Report
from keras_dist._report.tables import Lines, Section, Table
from keras_dist._report.units import bytes_text, percent_text, seconds_text
from keras_dist.mesh.axes import spell_axes
from keras_dist.planning.hardware.compiler_options import options_text
from keras_dist.planning.reports.plan_report import Plan, bound_text, distribution_name, fits_text, subject_text


@dataclass(frozen=True)
class Comparison(Report):
    """Several plans side by side. Prints as a table with one row per plan.

    Attributes:
        names: The name of each plan.
        plans: The plans.
    """

    names: tuple[str, ...]
    plans: tuple[Plan, ...]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the figures of each plan by its name, in bytes and seconds; None if unknown."""
        return {name: _figures(plan) for name, plan in zip(self.names, self.plans, strict=True)}

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.names)}>"

    def _sections(self) -> Iterator[Section]:
        subjects = [subject_text(plan) for plan in self.plans]
        is_same = len(set(subjects)) == 1
        folded = [subject.replace(" step, ", " step,\n") for subject in subjects]
        rows = [
            _row(name if is_same else f"{name}\n{subject}", plan)
            for name, plan, subject in zip(self.names, self.plans, folded, strict=True)
        ]
        yield subjects[0] if is_same else "Plans", [Table(tuple(rows[0]), [tuple(row.values()) for row in rows])]
        if any(plan.compiler_options for plan in self.plans):
            options = [options_text(plan.compiler_options) or "none" for plan in self.plans]
            lines = (f"{name}: {text}" for name, text in zip(self.names, options, strict=True))
            yield "Compiler options", [Lines(tuple(lines))]


def compare(*plans: Plan, **named_plans: Plan) -> Comparison:
    """Compares plans, to choose among distributions, meshes or hardware.

    Plans may be of different models and steps. In the printed table, bytes are per device. `sent` has the bytes that a
    device sends in a step, and below them the bytes that it exchanges with its host. `min time` is the lower bound on
    step time, with the resource that bounds it. `forecast` is the time that a step probably takes. Below both times is
    the model FLOP utilization (MFU) at that time.

    Args:
        *plans: Plans, named after their distributions.
        **named_plans: Plans by name.

    Returns:
        The comparison.

    Raises:
        ValueError: No plan is passed.
        TypeError: An argument is not a `Plan`.

    Example:

    >>> compare()
    Traceback (most recent call last):
    ValueError: compare() needs at least one plan. Pass plans, for example compare(fsdp=plan_a, tp=plan_b).
    """
    for value in (*plans, *named_plans.values()):
        if not isinstance(value, Plan):
            raise TypeError(
                f"compare() takes plans, but got {value!r} ({type(value).__name__}). Pass what keras_dist.plan "
                "returns, one argument each: compare(*plans)."
            )
    if not plans and not named_plans:
        raise ValueError("compare() needs at least one plan. Pass plans, for example compare(fsdp=plan_a, tp=plan_b).")
    by_name: dict[str, Plan] = {}
    for value in plans:
        name, number = distribution_name(value), 1
        while name in by_name or name in named_plans:
            number += 1
            name = f"{distribution_name(value)} {number}"
        by_name[name] = value
    by_name |= named_plans
    return Comparison(tuple(by_name), tuple(by_name.values()))


def _figures(plan: Plan) -> dict[str, Any]:
    forecast = plan.roofline.forecast
    sent_by_kind = dict.fromkeys((each.kind for each in plan.traffic), 0.0)
    for each in plan.traffic:
        sent_by_kind[each.kind] += each.wire_bytes
    return {
        "model": plan.model,
        "step": plan.step,
        "parameters": plan.parameters,
        "target": plan.target,
        "devices": plan.mesh.devices.size,
        "mesh": plan.mesh.axis_sizes,
        "distribution": distribution_name(plan),
        "step_options": repr(plan.step_options),
        "fits": plan.fits,
        "memory_bytes": plan.memory.total,
        "capacity_bytes": plan.memory.capacity,
        "weights_bytes": plan.memory.weights,
        "optimizer_bytes": plan.memory.optimizer,
        "temporaries_bytes": plan.memory.temporaries,
        "host_bytes": plan.memory.host,
        "wire_bytes": plan.wire_bytes,
        "host_traffic_bytes": plan.host_traffic,
        "wire_bytes_by_kind": sent_by_kind,
        "seconds": plan.roofline.seconds,
        "bound": plan.roofline.bound,
        "model_flops_utilization": plan.model_flops_utilization,
        "forecast_seconds": None if forecast is None else forecast.seconds,
        "forecast_model_flops_utilization": plan.forecast_model_flops_utilization,
        "compiler_options": dict(plan.compiler_options),
        "compile_seconds": plan.compile_seconds,
    }


def _row(name: str, plan: Plan) -> dict[str, str]:
    memory, roofline = plan.memory, plan.roofline
    capacity = "" if memory.capacity is None else f"of {bytes_text(memory.capacity)}\n"
    sent = bytes_text(plan.wire_bytes) + (f"\n{bytes_text(plan.host_traffic)} host" if plan.host_traffic else "")
    bound = seconds_text(roofline.seconds) + ("" if roofline.bound is None else f"\n{bound_text(plan)}")
    forecast = "unknown"
    if roofline.forecast is not None:
        forecast = seconds_text(roofline.forecast.seconds) + _utilization_text(plan.forecast_model_flops_utilization)
    return {
        "plan": name,
        "devices, mesh": f"{plan.mesh.devices.size} x {plan.target}\n{spell_axes(plan.mesh.axis_sizes)}",
        ">memory": f"{bytes_text(memory.total)}\n{capacity}{fits_text(plan)}",
        ">weights": bytes_text(memory.weights),
        ">optimizer": bytes_text(memory.optimizer),
        ">temporaries": bytes_text(memory.temporaries),
        ">sent": sent,
        ">min time\nMFU": bound + _utilization_text(plan.model_flops_utilization),
        ">forecast\nMFU": forecast,
        ">compile": seconds_text(plan.compile_seconds),
    }


def _utilization_text(utilization: float | None) -> str:
    return "" if utilization is None else f"\n{percent_text(utilization)}"

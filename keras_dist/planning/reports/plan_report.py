"""`Plan`: what a step of a model needs on each device, as data and as a printed report.

Bytes are printed in binary units (KiB, MiB, GiB), FLOP and counts in decimal units.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_dist._report.report import Report, to_plain_data
from keras_dist._report.tables import Bars, Lines, Section, Table, render_text
from keras_dist._report.units import bytes_text, count_text, counted, flops_text, percent_text, seconds_text
from keras_dist._report.variable_groups import VARIABLE_COLUMNS, PlacedVariable, variable_rows
from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.mesh.topology import networks_of
from keras_dist.passes.token_part import LossCall
from keras_dist.planning.compiling.compilation import Attention, Mixtures, Traffic
from keras_dist.planning.costs.roofline import Roofline, times_by_resource
from keras_dist.planning.frozen_mapping import FrozenMapping
from keras_dist.planning.hardware.compiler_options import options_text
from keras_dist.planning.hlo.collectives import Collective
from keras_dist.planning.hlo.module_costs import LargeValue
from keras_dist.planning.reports.step_memory import Memory, cache_section, capacity_text, memory_section, memory_width
from keras_dist.planning.reports.step_time import axes_text, bound_bars, forecast_section, plan_figure, sum_of
from keras_dist.steps.options import StepOptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_ROWS = {"weights": 12, "optimizer": 6, "other": 3}  # rows of variables, by part
# Figures of collectives, with their columns and how they are printed.
_TRAFFIC = {
    "count": (">count", count_text),
    "tensors": (">tensors", count_text),
    "bytes": (">bytes", bytes_text),
    "wire_bytes": (">sent per device", bytes_text),
}
_TRAFFIC_TIMES = {"seconds": (">total time", seconds_text), "exposed_seconds": (">exposed", seconds_text)}


@dataclass(frozen=True)
class Plan(Report):
    """Memory, communication and time of a step of a model on each device of a mesh. Prints as a report.

    In the printed report, bytes are per device. Variables whose paths differ only in numbers share a row. If there are
    many rows, those with the most bytes are shown. Text has at most 120 columns on any terminal.

    Attributes:
        model: Name of the model.
        step: `"train"`, `"test"`, `"predict"` or `"generate"`. FLOP, traffic and times of the latter are those of one
            token of each row.
        target: Name of the hardware, or JAX's device kind if the hardware is not registered.
        mesh: The device mesh.
        distribution: The distribution's `repr`.
        batch: Dtype and global shape of each array of the batch.
        variables: The variables that the step reads and updates.
        memory: Bytes on one device.
        fits: Whether the memory is within the capacity; None if the capacity is unknown.
        traffic: The collectives, summed by kind and mesh axes.
        collectives: Each collective instruction. Of an extrapolated plan, those of the deepest model compiled.
        flops: FLOP of matrix multiplications and convolutions that one device executes.
        model_flops: FLOP that the model requires, summed over devices, without recomputation and repeated work.
        model_flops_utilization: Fraction of the hardware's peak that `model_flops` reaches in a step of
            `roofline.seconds`; None if unknown.
        memory_traffic: Estimated bytes that one device reads from and writes to its memory.
        host_traffic: Bytes that one device fetches from the memory of its host and puts back.
        roofline: Lower bounds on step time in seconds, by resource, and `roofline.forecast`, the time that a step
            probably takes.
        forecast_model_flops_utilization: As `model_flops_utilization`, for a step that takes as long as the forecast;
            None if unknown.
        largest_values: The largest temporaries.
        attention: How the calls of `keras.ops.dot_product_attention` are computed.
        mixtures: How mixtures of experts are computed.
        losses: How losses are computed in chunks of tokens, with `StepOptions(loss_chunk=...)`.
        notes: Caveats about these figures.
        compile_seconds: Time that the compiler took.
        depth: Number of blocks extrapolated to; None if the full model was compiled.
        compiler_options: The options of XLA with which it was compiled.
        step_options: The step options of the distribution, with `remat="auto"` replaced by what it chose.
        fitting_plan: If the step does not fit: the plan with the step options of least cost with which it does, found
            by compiling; None if it fits, or no step options suffice.
        largest_batch: The most rows with which `generate()` fits, by the memory of this number of rows and another one
            that was compiled; None if unknown, or of another step.
    """

    model: str
    step: str
    target: str
    mesh: DeviceMesh
    distribution: str
    batch: Any
    variables: tuple[PlacedVariable, ...]
    memory: Memory
    fits: bool | None
    traffic: tuple[Traffic, ...]
    collectives: tuple[Collective, ...]
    flops: float
    model_flops: float
    memory_traffic: float
    host_traffic: float
    roofline: Roofline
    model_flops_utilization: float | None
    largest_values: tuple[LargeValue, ...]
    attention: tuple[Attention, ...]
    mixtures: tuple[Mixtures, ...]
    losses: tuple[LossCall, ...]
    notes: tuple[str, ...]
    compile_seconds: float = dataclasses.field(compare=False)
    depth: int | None = None
    forecast_model_flops_utilization: float | None = None
    compiler_options: FrozenMapping = dataclasses.field(default_factory=FrozenMapping)
    step_options: StepOptions = dataclasses.field(default_factory=StepOptions)
    fitting_plan: "Plan | None" = None
    largest_batch: int | None = None

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(math.prod(variable.shape) for variable in self.variables if variable.part == "weights")

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in a step."""
        return sum(each.wire_bytes for each in self.traffic)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that a plan of `generate()` forecasts for all rows; None if unknown, or of another step."""
        rows, forecast = re.search(r"\[(\d+)", str(self.batch)), self.roofline.forecast
        return int(rows[1]) / forecast.seconds if self.step == "generate" and rows and forecast else None

    def largest_holders(self, count: int = 5) -> list[tuple[str, int]]:
        """Returns the largest variables and temporaries of one device.

        Args:
            count: How many to return.

        Returns:
            Names with their bytes on one device, largest first.
        """
        holders = [(f"{variable.path} ({variable.part})", variable.bytes) for variable in self.variables]
        holders += [(f"{v.op_name or v.name} {v.shape} (temporary)", v.bytes) for v in self.largest_values]
        return sorted(holders, key=lambda holder: -holder[1])[:count]

    def picture(self) -> str:
        """Returns bar charts as text: memory per device, the lower bounds on step time, and the forecast."""
        forecast = [(title, parts[:2]) for title, parts in self._forecast()]  # without its table
        return render_text([memory_section(self.memory), _time(self), *forecast])

    def figure(self) -> "Figure":
        """Returns a `matplotlib.figure.Figure`: the memory of a device by kind, and the schedule of a step.

        The schedule has the time of compute, of the collectives over each mesh axis, and of copies. Where a collective
        is exposed, the device waits for it; the rest of it is hidden by compute. Without a forecast of step time, the
        figure has the lower bounds by resource, if they are known. A notebook shows it.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        title = f"{subject_text(self)}\n{_devices_text(self)}: {fits_text(self)}"
        [bars] = memory_section(self.memory)[1]
        return plan_figure(title, bars.bars, memory_width(self.memory), self.roofline, self.traffic)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as numbers, strings, lists and dicts, which JSON can encode."""
        own = dataclasses.replace(self, fitting_plan=None, step_options=StepOptions())
        data = to_plain_data(own) | {"step_options": repr(self.step_options)}
        if self.fitting_plan is not None:
            data["fitting_plan"] = self.fitting_plan.to_dict()
        mesh = data.pop("mesh")
        data["memory"] |= {"state": self.memory.state, "total": self.memory.total}
        data["roofline"] |= {"bound": self.roofline.bound, "seconds": self.roofline.seconds}
        if self.roofline.forecast is not None:
            data["roofline"]["forecast"]["estimated_share"] = self.roofline.forecast.estimated_share
        derived = {"parameters": self.parameters, "wire_bytes": self.wire_bytes}
        return data | derived | {"mesh": mesh.axis_sizes, "devices": mesh.devices.size}

    def __repr__(self) -> str:
        devices = f"{self.mesh.devices.size} x {self.target}"
        return f"<Plan of the {self.step} step of {self.model!r} on {devices}: {fits_text(self)}>"

    def _sections(self) -> Iterator[Section]:
        yield _headline(self)
        yield memory_section(self.memory)
        if self.step == "generate":
            yield cache_section(self.memory, self.largest_batch)
        if self.fits is False:
            rows = [(name, bytes_text(size)) for name, size in self.largest_holders()]
            yield "Largest values on one device", [Table(("value", ">bytes"), rows)]
        if self.fitting_plan is not None:
            yield _what_fits(self, self.fitting_plan)
        yield _time(self)
        yield from self._forecast()
        if self.attention:
            yield "Attention", [Lines(tuple(map(_attention_text, self.attention)))]
        if self.mixtures:
            yield "Mixtures of experts", [Lines(tuple(map(_mixtures_text, self.mixtures)))]
        if self.losses:
            yield "Losses in chunks", [Lines(tuple(map(_loss_text, self.losses)))]
        yield _collectives(self)
        yield _variables(self)
        if self.notes:
            yield "Notes", [Lines(self.notes)]

    def _forecast(self) -> Iterator[Section]:
        if (forecast := self.roofline.forecast) is not None:
            yield forecast_section(forecast, self.forecast_model_flops_utilization, self.collectives, self.depth)


def fits_text(plan: Plan) -> str:
    return {True: "fits", False: "does not fit", None: "capacity unknown"}[plan.fits]


def subject_text(plan: Plan) -> str:
    return f"{plan.model}, {plan.step} step, {counted(count_text(plan.parameters), 'parameter')}"


def distribution_name(plan: Plan) -> str:
    found = re.match(r"<?(\w+)", plan.distribution)
    options = f", {plan.step_options.text}" if plan.step_options.text else ""
    return (found[1] if found else plan.distribution) + options


def bound_text(plan: Plan) -> str:
    bound = plan.roofline.bound
    if bound == "memory":
        return "HBM"
    return "unknown" if bound is None else bound


def _headline(plan: Plan) -> Section:
    depth = f", {counted(plan.depth, 'block')}" if plan.depth is not None else ""
    lines = [_devices_text(plan), f"batch {_batch_text(plan.batch)}"]
    lines += [f"compiler options {options_text(plan.compiler_options)}"] if plan.compiler_options else []
    return subject_text(plan) + depth, [Lines((*lines, capacity_text(plan.memory, plan.fits)))]


def _devices_text(plan: Plan) -> str:
    devices = f"{plan.mesh.devices.size} x {plan.target}, mesh {spell_axes(plan.mesh.axis_sizes)}"
    return f"{devices}, {distribution_name(plan)}"


def _batch_text(batch: Any) -> str:
    parts = batch if isinstance(batch, tuple) else (batch,)
    named = zip(("x", "y", "sample_weight"), parts, strict=False)
    return ", ".join(f"{name} {part}".replace("'", "") for name, part in named if part is not None)


def _what_fits(plan: Plan, fitting: Plan) -> Section:
    rows = [
        (
            each.step_options.text or "as planned",
            bytes_text(each.memory.total),
            bytes_text(each.wire_bytes),
            bytes_text(each.host_traffic),
            "unknown" if each.roofline.forecast is None else seconds_text(each.roofline.forecast.seconds),
        )
        for each in (plan, fitting)
    ]
    columns = "step options", ">memory", ">sent", ">to and from host", ">forecast"
    lines = Lines((f"It fits with step_options=kd.{fitting.step_options}.",))
    return "What makes it fit", [lines, Table(columns, rows)]


def _time(plan: Plan) -> Section:
    amounts = {"compute": flops_text(plan.flops), "HBM": bytes_text(plan.memory_traffic)}
    amounts["host"] = bytes_text(plan.memory.batch + plan.host_traffic)
    networks = networks_of(plan.mesh.backend_mesh.devices.ravel().tolist())
    has_network = plan.roofline.dcn_seconds != 0 or len(set(networks.tolist())) > 1
    bars = tuple(
        dataclasses.replace(bar, figures=(amounts.get(bar.label, ""), *bar.figures))
        for bar in bound_bars(plan.roofline)
        if has_network or bar.label != plan.roofline.network
    )
    return "Lower bound on step time", [Bars(bars), Lines((_bound_sentence(plan),))]


def _bound_sentence(plan: Plan) -> str:
    roofline = plan.roofline
    has_unknown = None in times_by_resource(roofline).values()
    if not roofline.seconds:
        return "Bottleneck unknown." if has_unknown else "The step does no work that is counted."
    text = f"At least {seconds_text(roofline.seconds)}, bound by {bound_text(plan)}"
    text += f"; {seconds_text(roofline.serial_seconds)} if nothing overlaps."
    if plan.model_flops_utilization is not None:
        text += f" Model FLOP utilization at most {percent_text(plan.model_flops_utilization)}"
        text += f" ({flops_text(plan.model_flops)} over all devices)."
    return text + " Unknown times are left out." * has_unknown


def _attention_text(attention: Attention) -> str:
    text = f"{attention.implementation}, {counted(count_text(attention.calls), 'call')}"
    if attention.logits_bytes:
        text += f", {bytes_text(attention.logits_bytes)} of logits each (queries x keys)"
    text += f", {attention.exchange}" if attention.exchange else ""
    return f"{text}: {attention.reason}." if attention.reason else f"{text}."


def _mixtures_text(mixtures: Mixtures) -> str:
    text = f"{mixtures.form}, {counted(count_text(mixtures.calls), 'mixture')}"
    text += f", {mixtures.num_chosen} of {mixtures.num_experts} experts a token"
    if mixtures.rows:
        text += f", {mixtures.rows:,} rows and {flops_text(mixtures.flops)} on a device in the forward pass"
    if mixtures.exchange:
        text += f", which sends {mixtures.exchange}"
    return f"{text}: {mixtures.reason}." if mixtures.reason else f"{text}."


def _loss_text(loss: LossCall) -> str:
    text = f"{loss.layer or 'A product'}: {loss.size:,} numbers a token, {loss.chunk:,} of {loss.tokens:,} tokens of a "
    text += f"device at a time, {loss.products} products"
    return f"{text}: {loss.reason}." if loss.reason else f"{text}."


def _collectives(plan: Plan) -> Section:
    title = "Collectives per step"
    if not plan.traffic:
        return title, [Lines(("None.",))]
    figures = _TRAFFIC | ({} if plan.roofline.forecast is None else _TRAFFIC_TIMES)
    network = f" ({plan.roofline.network})"
    rows = [
        (
            each.kind,
            axes_text(each.axes) + network * each.crosses_network,
            *(text(getattr(each, name)) for name, (_, text) in figures.items()),
        )
        for each in plan.traffic
    ]
    totals = (text(sum_of(plan.traffic, name)) for name, (_, text) in figures.items())
    columns = "kind", "over axes", *(heading for heading, _ in figures.values())
    return title, [Table(columns, rows, ("total", "", *totals))]


def _variables(plan: Plan) -> Section:
    rows = variable_rows(plan.variables, _MAX_ROWS, lambda v: "" if v.is_replicated else v.rule or "no rule")
    weights = [variable for variable in plan.variables if variable.part == "weights"]
    replicated = [variable for variable in weights if variable.is_replicated]
    held = bytes_text(sum(variable.bytes for variable in replicated))
    text = f"Replicated: {len(replicated)} of {counted(len(weights), 'weight')}, {held} per device."
    return "Variables, bytes per device", [Table(("path, rule", *VARIABLE_COLUMNS), rows), Lines((text,))]

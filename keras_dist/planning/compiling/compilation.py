"""Compiles a step and reads its memory, traffic and costs from the compiled program."""

import contextlib
import functools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from keras_dist._report.units import bytes_text, counted
from keras_dist.attention.attention import AttentionCall
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.mesh.devices import is_attached
from keras_dist.mesh.topology import coordinates_of, networks_of
from keras_dist.mixtures.recognition import MixtureCall
from keras_dist.passes.token_part import LossCall
from keras_dist.planning.compiling.abstract_step import Step, bytes_on_a_device, notes_on_batch, warn_of_constants
from keras_dist.planning.compiling.compilation_cache import CompilationCache
from keras_dist.planning.costs.forecast import TimeModel
from keras_dist.planning.costs.model_flops import count_step_flops
from keras_dist.planning.costs.roofline import Roofline, roofline
from keras_dist.planning.costs.schedule import walk_schedule
from keras_dist.planning.hardware.compiler_options import is_refused, refused_options_explained
from keras_dist.planning.hardware.figures import Hardware
from keras_dist.planning.hlo.collectives import Collective
from keras_dist.planning.hlo.module_costs import LargeValue, ModuleCosts, ModuleReader, changed_bytes
from keras_dist.planning.hlo.replica_groups import Groups
from keras_dist.steps.options import StepOptions
from keras_dist.steps.step_state import Call, recorded_calls

# Lets libtpu before 0.0.50 finish a program that does not fit into memory, so that its needs are known.
_COMPILE_WITHOUT_FITTING = {"xla_tpu_no_crash_on_oom": True}

# Makes XLA:GPU write the estimates of its cost model into the program, which stays the same.
_WITH_ESTIMATES = {"xla_gpu_collect_cost_model_stats": True}
# What it says of GPUs whose matrix multiplications or collectives are not in its tables of measurements.
_WITHOUT_MEASUREMENTS = "Cannot find key: sm_", "Non homogenous replica group"

# Without a GPU to measure on, XLA chooses tile sizes of Triton kernels from a table, and finds none for some matrices.
_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
_TRITON_NOTE = (
    "Compiled without Triton matrix multiplications (xla_gpu_enable_triton_gemm=False) because XLA, without a GPU to "
    "measure on, found no tile sizes for one of them. On a machine with the GPUs, memory traffic and "
    "temporaries may be lower."
)


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over the same axes, in one step on one device.

    Attributes:
        kind: HLO opcode: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`, `"collective-permute"`.
        axes: Mesh axes, outermost first; None if the groups do not follow axes.
        count: Number of collectives.
        tensors: Number of tensors; compilers combine several into one collective.
        bytes: Unsharded size of what is reduced, gathered or scattered, or size of what is sent.
        wire_bytes: Bytes that one device sends, in ring algorithms.
        crosses_network: Whether they cross slices or hosts, instead of using only the links within.
        seconds: Probable time of all of them on their links; None if unknown.
        exposed_seconds: The part of it during which the device waits; None if unknown.
    """

    kind: str
    axes: tuple[str, ...] | None
    count: float
    tensors: float
    bytes: float
    wire_bytes: float
    crosses_network: bool = False
    seconds: float | None = None
    exposed_seconds: float | None = None


@dataclass(frozen=True)
class Attention:
    """The calls of `keras.ops.dot_product_attention` that are computed in one way.

    Attributes:
        implementation: The kernel, `"splash attention"` (TPU) or `"cuDNN"` (GPU), or `"XLA"`.
        calls: Number of calls.
        logits_bytes: Size of the largest logits (rows x heads x queries x keys) that XLA holds on one device; 0 for
            kernels, which hold none.
        reason: Why a device that has a kernel does not use it, and what would change that; None otherwise.
        exchange: How devices that share sequences exchange operands (context parallelism), such as `"all-to-all over
            'context'"`; None if they share none.
    """

    implementation: str
    calls: float
    logits_bytes: int
    reason: str | None
    exchange: str | None = None


@dataclass(frozen=True)
class Mixtures:
    """The mixtures of experts that are computed in one way.

    Attributes:
        form: What multiplies rows with the weights of their experts: `"megablox"` (TPU), `"mosaic"` (GPU), `"batched"`
            or `"blocks"` (XLA); `"chosen weights"` for a single token; `"dense"`: all experts for each token.
        reason: Why the form is not the best one of the platform; None if it is.
        num_experts: Number of experts.
        num_chosen: Number of experts that a token chooses.
        calls: Number of mixtures.
        rows: Pairs of a token and an expert on one device, the most of a mixture; 0 if dense.
        flops: FLOP of the products with weights of experts in the forward pass of one device, of all these mixtures; 0
            if dense.
        exchange: What is sent over the expert axes, such as `"tokens over 'expert'"`, or weights; None without them.
    """

    form: str
    reason: str | None
    num_experts: int
    num_chosen: int
    calls: float
    rows: int
    flops: float
    exchange: str | None = None


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Memory in bytes, traffic and costs of a compiled step on one device; `model_flops` are of all devices together.

    `argument_bytes` are variables and batch with the padding of the compiler's layouts, `outputs` the results that do
    not reuse the memory of an argument. `refusal` is the compiler's message if memory does not suffice.
    """

    argument_bytes: float
    outputs: float = 0
    temporaries: float
    cache: float = 0
    program: float = 0
    traffic: tuple[Traffic, ...] = ()
    collectives: tuple[Collective, ...] = ()
    flops: float = 0
    model_flops: float
    memory_traffic: float = 0
    host_traffic: float = 0
    roofline: Roofline
    largest_values: tuple[LargeValue, ...] = ()
    attention: tuple[Attention, ...] = ()
    mixtures: tuple[Mixtures, ...] = ()
    losses: tuple[LossCall, ...] = ()
    refusal: str | None
    notes: tuple[str, ...]
    seconds: float


def compile_step(
    step: Step,
    hardware: Hardware | None,
    show_progress: Callable[[str], Any],
    options: Mapping[str, Any],
    cache: CompilationCache | None = None,
) -> Compilation:
    """Traces and compiles a step with options of XLA, and reads the program, unless `cache` has it.

    Raises a ValueError if the batch does not fit the model, or the target refuses an operation of the model or an
    option.
    """
    mesh = step.distribution.device_mesh
    devices = mesh.backend_mesh.devices.ravel().tolist()
    is_here = is_attached(devices[0])
    show_progress(f"Tracing the {step.name} step of {step.model.name}")
    with recorded_calls() as calls:
        traced = step.trace()
    warn_of_constants(step, traced.jaxpr.consts)
    model_flops = None if step.name == "generate" else _model_flops(step, traced, calls)
    show_progress(f"Compiling the {step.name} step of {step.model.name} for {counted(mesh.devices.size, 'device')}")
    with _refusals_explained(step):
        lowered = step.lower(traced)
    key = ""
    if cache is not None:
        places = [(device.id, device.process_index, coordinates_of(device)) for device in devices]
        compiler = devices[0].device_kind, is_here, devices[0].client.platform_version
        parts = mesh.axis_sizes, places, compiler, hardware, options, calls
        key = cache.key(lowered.as_text(), step.name, *map(repr, parts))
        if (found := cache.get(key, Compilation)) is not None:
            return found
    started = time.perf_counter()
    with refused_options_explained(options), _refusals_explained(step):
        estimates = _WITH_ESTIMATES if devices[0].platform == "gpu" else {}
        compiled, refusal, compiler_notes = _compile(lowered, options, estimates)
    seconds = time.perf_counter() - started
    if compiled is None:
        refused = _refused(step, str(refusal), model_flops, seconds)
        compilation = replace(refused, attention=_attention(calls), mixtures=_mixtures(calls), losses=_losses(calls))
    else:
        show_progress("Reading the compiled program")
        networks = networks_of(devices)
        memory = compiled.memory_analysis()
        # A token of `generate()` needs no batch.
        batch_bytes = 0.0 if step.name == "generate" else sum(map(bytes_on_a_device, jax.tree.leaves(step.batch)))
        costs, bounds, held = _costs_and_times(compiled.as_text(), mesh, networks, hardware, batch_bytes, step.name)
        compilation = Compilation(
            argument_bytes=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes + (0 if is_here else costs.workspace_bytes),
            cache=held,
            program=memory.generated_code_size_in_bytes,
            traffic=_summed(costs.collectives, networks),
            collectives=costs.collectives,
            flops=costs.flops,
            model_flops=costs.flops * len(devices) if model_flops is None else model_flops,
            memory_traffic=costs.memory_bytes,
            host_traffic=costs.host_bytes,
            roofline=bounds,
            largest_values=costs.largest_values,
            attention=_attention(calls),
            mixtures=_mixtures(calls),
            losses=_losses(calls),
            refusal=refusal,
            notes=(*notes_on_batch(step), *compiler_notes, *_notes(costs, model_flops, is_here, step.name)),
            seconds=seconds,
        )
    if cache is not None:
        cache.put(key, compilation)
    return compilation


def _model_flops(step: Step, traced: Any, calls: Sequence[Call]) -> float | None:
    """Returns the FLOP of a traced step, without those that its options add."""
    if step.name == "train" and step.distribution.step_options != StepOptions():
        with recorded_calls() as calls:
            plain = step.distribution.with_step_options(step.distribution.step_options.placement_only)
            traced = replace(step, distribution=plain).trace()
    return count_step_flops(traced.jaxpr.jaxpr, calls, step.name)


def _costs_and_times(
    text: str, mesh: DeviceMesh, networks: np.ndarray, hardware: Hardware | None, batch_bytes: float, step: str
) -> tuple[ModuleCosts, Roofline, int]:
    """Reads the text of a compiled step once: its costs, the bounds on its time with the forecast, bytes of caches.

    If it generates, they are those of one token, the body of the largest loop, without the prompt.
    """
    devices = mesh.backend_mesh.devices
    reader = ModuleReader(text, mesh.axis_sizes, networks.tolist(), [device.id for device in devices.ravel().tolist()])
    cache = 0
    if step == "generate":
        reader.module = replace(reader.module, entry=reader.module.largest_loop_body)
        cache = changed_bytes(reader.module.computations[reader.module.entry])
    costs = reader.module_costs()
    host = batch_bytes, costs.host_bytes
    bounds = roofline(hardware, devices, costs.flops_by_dtype, costs.memory_bytes, costs.collectives, *host)
    times = TimeModel.of(hardware, devices, costs.collectives, costs.host_bytes)
    if times is None or bounds.seconds is None:
        return costs, bounds, cache
    forecast, seconds = walk_schedule(reader, times, max(bounds.seconds, times.of_host_copy(batch_bytes)))
    return reader.module_costs(seconds), replace(bounds, forecast=forecast), cache


@contextlib.contextmanager
def _refusals_explained(step: Step) -> Iterator[None]:
    """Raises errors of JAX about an operation that a target or a mesh does not support again, with step and target."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        devices = step.distribution.device_mesh.backend_mesh.devices
        raise ValueError(
            f"Cannot compile the {step.name} step of {step.model.name!r} for {devices.size} x "
            f"{devices.flat[0].device_kind}, because an operation is not supported there: "
            f"{str(error)[:400].rstrip('.')}. Change the layer that uses it, or plan for another target."
        ) from error


def _compile(
    lowered: Any, options: Mapping[str, Any], estimates: Mapping[str, Any]
) -> tuple[Any, str | None, tuple[str, ...]]:
    """Returns the compiled program or None, the compiler's message if memory does not suffice, and notes.

    `options` are the user's, `estimates` those that make the compiler write its estimates, if it knows the options and
    has measurements of the target.
    """
    notes, refusal = (), None
    while refusal is None:
        try:
            return lowered.compile(compiler_options={**estimates, **options}), None, notes
        except jax.errors.JaxRuntimeError as error:
            message = str(error)
            has_none = any(reason in message for reason in _WITHOUT_MEASUREMENTS)
            if estimates and (has_none or any(f"No such compile option: '{name}'" in message for name in estimates)):
                estimates = {}
            elif not notes and message.startswith("INTERNAL: Couldn't find output tile sizes"):
                estimates, options, notes = {}, {**options, **_WITHOUT_TRITON}, (_TRITON_NOTE,)
            elif of_partitioner := re.search(
                r"custom_partitioner:.*?^\s*\w+Error: (.*?)$", message, re.DOTALL | re.MULTILINE
            ):
                raise ValueError(of_partitioner[1]) from error  # JAX's, of a kernel of a vendor
            elif options and is_refused(error):
                raise
            else:
                refusal = message.splitlines()[0]
                if "RESOURCE_EXHAUSTED" not in message:
                    raise RuntimeError(f"The compiler failed with an internal error: {refusal[:400]}") from error
    try:
        return lowered.compile(compiler_options={**options, **_COMPILE_WITHOUT_FITTING}), refusal, notes
    except jax.errors.JaxRuntimeError:  # libtpu since 0.0.50
        return None, refusal, notes


def _refused(step: Step, refusal: str, model_flops: float | None, seconds: float) -> Compilation:
    """What is known of a program that the compiler did not finish, because it does not fit."""
    arguments = jax.tree.leaves((step.state_specs(), step.batch))
    needed = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of|\) exceeds)", refusal)
    held = sum(map(bytes_on_a_device, arguments))
    total = float(needed[1]) * 2.0 ** (10 * " KMGT".index(needed[2])) if needed else 0.0
    return Compilation(
        argument_bytes=held,
        temporaries=max(0.0, total - held),
        model_flops=model_flops or 0.0,
        roofline=Roofline.unknown(step.distribution.device_mesh.backend_mesh.devices.flat[0].platform),
        refusal=refusal,
        notes=("The compiler stopped when memory did not suffice, so collectives, FLOP and time are unknown.",),
        seconds=seconds,
    )


def _notes(costs: Any, model_flops: float | None, is_target_attached: bool, step: str = "train") -> Iterator[str]:
    if step == "generate":
        yield "FLOP, traffic and times are those of one token of each row, after the prompt."
    elif model_flops is None:
        yield "The model has loops whose trip count is unknown before compilation, so its FLOP are those executed."
    if costs.unknown_loops:
        loops = counted(costs.unknown_loops, "loop", "has", "have")
        yield f"{loops} an unknown trip count; each counts as one iteration."
    if costs.opaque_calls:
        yield f"The FLOP of {', '.join(costs.opaque_calls)} are unknown and not counted."
    if costs.closed_forms:
        yield f"The FLOP of {', '.join(costs.closed_forms)} come from closed forms: no compiler knows them."
    if is_target_attached:
        return
    if any(call.startswith("cudnn_rnn") for call in costs.closed_forms):
        yield "The temporaries of cuDNN's LSTM are an estimate: only cuDNN on a GPU knows them."
    if costs.workspace_bytes:
        yield (
            f"The temporaries include {bytes_text(costs.workspace_bytes)} of workspace for the backward pass of "
            "cuDNN's attention, an estimate: only cuDNN on a GPU knows it."
        )


def _summed(collectives: Iterable[Collective], networks: np.ndarray) -> tuple[Traffic, ...]:
    @functools.cache
    def crosses_network(groups: Groups) -> bool:
        # Unknown groups count as one of all devices, as in roofline.
        return any(np.ptp(networks[list(group)]) > 0 for group in groups or [range(len(networks))])

    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for each in collectives:
        if each.group_size > 1:
            groups[each.kind, each.axes, crosses_network(each.groups)].append(each)
    traffic = [
        Traffic(
            kind,
            axes,
            count=float(sum(each.count for each in group)),
            tensors=float(sum(each.count * each.tensors for each in group)),
            bytes=float(sum(each.count * each.bytes for each in group)),
            wire_bytes=float(sum(each.count * each.wire_bytes for each in group)),
            crosses_network=crosses,
            seconds=_sum_if_known(each.seconds for each in group),
            exposed_seconds=_sum_if_known(each.exposed_seconds for each in group),
        )
        for (kind, axes, crosses), group in groups.items()
    ]
    return tuple(sorted(traffic, key=lambda each: -each.wire_bytes))


def _sum_if_known(values: Iterable[float | None]) -> float | None:
    values = list(values)
    return None if None in values else sum(filter(None, values), 0.0)


def _attention(calls: Iterable[Call]) -> tuple[Attention, ...]:
    groups: dict[tuple, list[AttentionCall]] = defaultdict(list)
    for call in calls:
        if isinstance(call, AttentionCall):
            groups[call.implementation, call.reason, call.exchange].append(call)
    return tuple(
        Attention(implementation, len(group), max(call.logits_bytes for call in group), reason, exchange)
        for (implementation, reason, exchange), group in groups.items()
    )


def _mixtures(calls: Iterable[Call]) -> tuple[Mixtures, ...]:
    groups: dict[tuple, list[MixtureCall]] = defaultdict(list)
    for call in calls:
        if isinstance(call, MixtureCall):
            groups[call.form, call.reason, call.num_experts, call.num_chosen, call.exchange].append(call)
    return tuple(
        Mixtures(*key, len(group), max(call.rows for call in group), sum(call.flops for call in group), exchange)  # pyright: ignore
        for (*key, exchange), group in groups.items()
    )


def _losses(calls: Iterable[Call]) -> tuple[LossCall, ...]:
    return tuple(dict.fromkeys(call for call in calls if isinstance(call, LossCall)))

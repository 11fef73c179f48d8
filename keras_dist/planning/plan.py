"""`plan`: memory, communication and time of a model's real step, compiled for hardware that need not be attached."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import what_instead_of_a_distribution
from keras_dist._keras.data_adapters import data_adapter_utils
from keras_dist._report.progress import show_progress
from keras_dist._report.units import bytes_text, counted
from keras_dist._report.user_warnings import warn
from keras_dist._report.variable_groups import PARTS, PlacedVariable
from keras_dist.layout.tensor_layout import TensorLayout, is_in_host_memory
from keras_dist.mesh.devices import require_compiler
from keras_dist.planning.compiling.abstract_step import Step, bytes_on_a_device, prepared_step
from keras_dist.planning.compiling.compilation import Compilation, compile_step
from keras_dist.planning.compiling.compilation_cache import CompilationCache
from keras_dist.planning.compiling.extrapolation import extrapolated
from keras_dist.planning.fitting_options import Found, plan_with_fitting_options
from keras_dist.planning.frozen_mapping import FrozenMapping
from keras_dist.planning.generated_rows import largest_batch, num_rows, with_rows
from keras_dist.planning.hardware.compiler_options import checked_compiler_options
from keras_dist.planning.hardware.figures import Hardware
from keras_dist.planning.notes import notes_on_attention, notes_on_compilation, notes_on_executions
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.planning.reports.step_memory import Memory
from keras_dist.planning.targets.target import hardware_of, require_one_target
from keras_dist.steps.options import AUTO
from keras_dist.strategies.base import Distribution
from keras_dist.variables.variable_layouts import optimizer_state_owners


def plan(
    build_model: keras.Model | Callable[..., keras.Model],
    distribution: Distribution,
    batch: Any,
    *,
    step: str = "train",
    depth: int | None = None,
    compile_depths: tuple[int, int] = (2, 4),
    compiler_options: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> Plan:
    """Compiles the real step of a model for the devices of a distribution, and reports what it needs.

    The devices need not be attached: make the mesh from `keras_dist.target("v5e:4x4")`. Nothing is executed and no
    weights are allocated. A model that is passed stays unchanged.

    A deep model of equal blocks need not be compiled in full: with `depth`, models of two small numbers of blocks are
    compiled and the result is extrapolated. Variables and batch are still exact; what depends on the compiler
    (temporaries, collectives, FLOP, memory traffic) is extrapolated linearly. This is correct as long as the compiler
    treats all blocks alike. It does not do so near the memory limit, where it recomputes activations.

    Args:
        build_model: Function without arguments that returns a compiled model; or a model, deferred or not. With
            `depth`, a function of the number of blocks.
        distribution: The distribution to plan for. Its mesh determines the hardware.
        batch: Batch as `fit` gets it, but always the global one: `x`, `(x, y)` or `(x, y, sample_weight)`. Each of them
            is an array, a `jax.ShapeDtypeStruct`, a shape, or a list or dict of these. A shape has the dtype of the
            model's input; int32 for targets of a sparse loss; otherwise float32. Instead, the number of rows can be
            passed, if the model's inputs have static shapes and its targets follow from its losses.
        step: `"train"`, `"test"`, `"predict"`, or `"generate"` for a language model of KerasHub: the memory of
            `generate()`, FLOP, traffic and times of one token, `plan.tokens_per_second`, and `plan.largest_batch`,
            for which another number of rows is compiled, too.
        depth: Number of blocks to extrapolate to. None compiles the full model.
        compile_depths: The two numbers of blocks to compile, if `depth` is given.
        compiler_options: Options of XLA by name, as `compile(compiler_options=...)` of JAX takes them. See
            `keras_dist.hardware["v5e"].recommended_compiler_options`. A process that trains
            gets them from the environment variables LIBTPU_INIT_ARGS (TPU) and XLA_FLAGS (GPU).
        progress: Whether to show progress. By default only if standard error is a terminal.

    Returns:
        The plan. If the memory does not suffice, `plan.fits` is False. For a training step, programs with other step
        options are then compiled, and `plan.fitting_plan` is the plan with the cheapest options with which it fits.

    Raises:
        TypeError: `build_model` is neither a model nor a suitable function, `distribution` is not a distribution, or
            `compiler_options` is not a mapping from names to values.
        ValueError: The model is not compiled, the batch does not suit it, `step` is unknown, the depths are not
            increasing, the blocks are not equal, or the compiler of the target refuses the options.
        RuntimeError: The compiler of the target fails.

    Example:

    >>> from keras_dist import DataParallel
    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> planned = plan(build, DataParallel(), batch=32)
    >>> planned.memory.weights, planned.traffic[0].kind, planned.traffic[0].axes
    (2600, 'all-reduce', ('batch',))
    """
    _require_distribution(distribution, batch)
    require_step(step, (*internals.STEPS, "generate"))
    options = checked_compiler_options(compiler_options)
    if depth is not None:
        require_builder_of_depth(build_model, depth)
        _require_depths(depth, compile_depths)
    with show_progress(progress) as report:

        def plan_under(changed: Distribution) -> Plan:
            return plan_step(build_model, changed, batch, step, depth, compile_depths, options, report)

        first = _with_remat_chosen(distribution, plan_under) if step == "train" else Found(plan_under(distribution))
        planned = dataclasses.replace(first.plan, notes=(*first.plan.notes, *first.notes))
        if step == "generate":

            def plan_of(rows: int) -> Plan:
                changed = with_rows(batch, rows)
                return plan_step(build_model, distribution, changed, step, depth, compile_depths, options, report)

            rows, shards = num_rows(batch), distribution.num_model_replicas
            return dataclasses.replace(planned, largest_batch=largest_batch(planned, rows, shards, plan_of))
        if step != "train" or planned.fits is not False or first.is_interrupted:
            return planned
        found = plan_with_fitting_options(planned, distribution, plan_under)
        fitting, notes = found.plan, (*planned.notes, *found.notes)
        if fitting.fits is False and fitting is not planned and not found.is_interrupted:
            needed = f"with {fitting.step_options.text} it needs {bytes_text(fitting.memory.total)}"
            notes += (f"No step options make it fit: {needed}.",)
        return dataclasses.replace(planned, notes=notes, fitting_plan=None if fitting.fits is False else fitting)


def plan_step(
    build_model: Any,
    distribution: Distribution,
    batch: Any,
    step: str,
    depth: int | None,
    compile_depths: tuple[int, int],
    options: FrozenMapping,
    report: Callable[[str], Any],
    cache: CompilationCache | None = None,
) -> Plan:
    """Plans as `plan` does, for arguments that it has checked, with the options that the distribution has.

    Takes from `cache` what was compiled before. A model of no more blocks than would be compiled is compiled in full.
    """
    if depth is not None and depth <= max(compile_depths):
        build_model, depth = functools.partial(build_model, depth), None
    device = distribution.device_mesh.backend_mesh.devices.flat[0]
    require_compiler(device)
    chip = hardware_of(device)
    if depth is None:
        with prepared_step(build_model, distribution, batch, step) as prepared:
            compiled = compile_step(prepared, chip, report, options, cache)
            fields, batches = _exact_fields(prepared, chip), prepared.model.steps_per_execution
            return _plan(fields, compiled, distribution, options, batches)
    exact: dict[int, dict[str, Any]] = {}
    batches = 1
    compilations: dict[int, Compilation] = {}
    for blocks in (depth, *compile_depths):
        report(f"Building {counted(blocks, 'block')}")
        with prepared_step(lambda blocks=blocks: build_model(blocks), distribution, batch, step) as prepared:
            exact[blocks], batches = _exact_fields(prepared, chip), prepared.model.steps_per_execution
            if len(exact) == 3:
                _require_equal_blocks({number: fields["memory"].state for number, fields in exact.items()})
            if blocks != depth:
                compilations[blocks] = compile_step(prepared, chip, report, options, cache)
    return _plan(exact[depth], extrapolated(compilations, depth, step), distribution, options, batches, depth)


def with_remat_chosen(distribution: Distribution, model: keras.Model, batch: Any) -> Distribution:
    """Returns a distribution with the cheapest rematerialization with which a batch fits, if it has `remat="auto"`.

    Called while the train step of a model is traced, for the devices of the distribution.
    """
    if distribution.step_options.remat != AUTO:
        return distribution
    arrays = data_adapter_utils.unpack_x_y_sample_weight(batch)
    with show_progress(None) as report:
        found = _with_remat_chosen(
            distribution,
            lambda changed: plan_step(model, changed, arrays, "train", None, (2, 4), FrozenMapping(), report),
        )
    if found.is_interrupted:
        raise KeyboardInterrupt
    for note in found.notes:
        warn(f"remat='auto' of {model.name!r}: {note}")
    return distribution.with_step_options(found.plan.step_options)


def _with_remat_chosen(distribution: Distribution, plan_under: Callable[[Distribution], Plan]) -> Found:
    """Returns the plan of a distribution. Of `remat="auto"`, it has the cheapest mode that fits."""
    if distribution.step_options.remat != AUTO:
        return Found(plan_under(distribution))
    without = dataclasses.replace(distribution.step_options, remat=None)
    planned = plan_under(distribution.with_step_options(without))
    if planned.fits is not False:
        return Found(planned)
    return plan_with_fitting_options(planned, distribution, plan_under, ("remat",))


def _exact_fields(step: Step, chip: Hardware | None) -> dict[str, Any]:
    """The fields of a plan that do not depend on the compiler; its memory holds variables and batch only."""
    variables, devices = _variables(step), step.distribution.device_mesh.backend_mesh.devices
    state = {part: sum(v.bytes for v in variables if v.part == part and not v.is_on_host) for part in PARTS}
    batch_bytes = sum(bytes_on_a_device(spec) for spec in jax.tree.leaves(step.batch))
    return {
        "model": step.model.name,
        "step": step.name,
        "target": devices.flat[0].device_kind if chip is None else chip.name,
        "batch": jax.tree.map(lambda spec: f"{spec.dtype}{list(spec.shape)}", step.batch),
        "variables": variables,
        "memory": Memory(
            **state,
            batch=batch_bytes,
            host=sum(v.bytes for v in variables if v.is_on_host),
            capacity=None if chip is None else chip.memory_bytes,
        ),
        "notes": notes_on_attention(step),
    }


def _variables(step: Step) -> tuple[PlacedVariable, ...]:
    weights = {id(variable) for variable in step.model.weights}
    optimizer = {id(variable) for variable in step.model.optimizer.variables} if step.name == "train" else set()
    variables = [variable for part in step.variables for variable in part]
    owners = optimizer_state_owners(getattr(step.model, "optimizer", None), variables)
    placed = []
    for variable, spec in zip(variables, jax.tree.leaves(step.state_specs()), strict=True):
        layout = step.layouts[id(variable)]
        # Gradients are accumulated in other shapes than those of their variables.
        has_layout = isinstance(layout, TensorLayout) and spec.shape == variable.shape
        rule = step.distribution.rule(owners.get(id(variable), variable).path)
        placed.append(
            PlacedVariable(
                path=variable.path,
                part="weights" if id(variable) in weights else "optimizer" if id(variable) in optimizer else "other",
                shape=spec.shape,
                dtype=str(spec.dtype),
                rule=None if rule is None or layout != rule.layout else rule.pattern,
                axes=tuple(layout.axes if has_layout else spec.sharding.spec),
                shard_shape=spec.sharding.shard_shape(spec.shape),
                bytes=bytes_on_a_device(spec),
                is_on_host=is_in_host_memory(layout),
            )
        )
    return tuple(placed)


def _plan(
    fields: Mapping[str, Any],
    compiled: Compilation,
    distribution: Distribution,
    options: FrozenMapping,
    batches: int,
    depth: int | None = None,
) -> Plan:
    """Builds the plan of a step of which `fit` computes `batches` in one execution."""
    held: Memory = fields["memory"]
    memory = dataclasses.replace(
        held,
        padding=max(0, round(compiled.argument_bytes) - held.total),
        outputs=round(compiled.outputs),
        temporaries=round(compiled.temporaries),
        cache=round(compiled.cache),
        program=round(compiled.program),
    )
    fits = False if compiled.refusal else None if memory.capacity is None else memory.total <= memory.capacity
    mesh, roofline = distribution.device_mesh, compiled.roofline
    utilization = forecast_utilization = None
    if roofline.seconds and compiled.flops and roofline.compute_seconds is not None:
        at_peak = compiled.model_flops / mesh.devices.size / compiled.flops * roofline.compute_seconds
        utilization = at_peak / roofline.seconds
        if roofline.forecast is not None:
            forecast_utilization = at_peak / roofline.forecast.seconds
    notes = (
        *notes_on_compilation(compiled, distribution, fields["variables"]),
        *fields["notes"],
        *notes_on_executions(fields["step"], batches, held.batch, roofline.forecast),
    )
    return Plan(
        **{**fields, "memory": memory, "notes": notes},
        mesh=mesh,
        distribution=repr(distribution),
        fits=fits,
        traffic=compiled.traffic,
        collectives=compiled.collectives,
        flops=compiled.flops,
        model_flops=compiled.model_flops,
        model_flops_utilization=utilization,
        forecast_model_flops_utilization=forecast_utilization,
        memory_traffic=compiled.memory_traffic,
        host_traffic=compiled.host_traffic,
        roofline=roofline,
        largest_values=compiled.largest_values,
        attention=compiled.attention,
        mixtures=compiled.mixtures,
        losses=compiled.losses,
        compile_seconds=compiled.seconds,
        depth=depth,
        compiler_options=options,
        step_options=distribution.step_options,
    )


def _require_distribution(distribution: Any, batch: Any) -> None:
    if isinstance(batch, Distribution):
        raise TypeError(
            f"batch must not be a distribution, but got {batch!r}. The order of arguments is plan(build_model, "
            "distribution, batch)."
        )
    if not isinstance(distribution, Distribution):
        raise TypeError(
            "distribution must be a keras_dist.Distribution, but got "
            f"{what_instead_of_a_distribution(distribution)} To plan for hardware that is not attached, its mesh is "
            'keras_dist.create_device_mesh("data:16", devices=keras_dist.target("v5e:4x4")).'
        )
    require_one_target(distribution.device_mesh)


def require_step(step: Any, known: Sequence[str] = internals.STEPS) -> None:
    if step not in known:
        raise ValueError(f"Unknown step {step!r}. Use one of {', '.join(map(repr, known))}.")


def require_builder_of_depth(build_model: Any, depth: Any) -> None:
    """Raises a TypeError with the fix if `build_model` is not a function of the number of blocks."""
    advice = "Pass a function such as `def build(depth): ...`, which returns a compiled model of `depth` blocks."
    if isinstance(build_model, keras.Layer) or not callable(build_model):
        raise TypeError(
            f"With depth={depth!r}, build_model must be a function of the number of blocks, but got {build_model!r} "
            f"({type(build_model).__name__}). {advice}"
        )
    signature = inspect.signature(build_model)
    try:
        signature.bind(1)
    except TypeError:
        name = getattr(build_model, "__name__", repr(build_model))
        raise TypeError(
            f"With depth={depth!r}, build_model is called with the number of blocks, but {name}{signature} does not "
            f"accept one argument. {advice}"
        ) from None


def _require_depths(depth: Any, compile_depths: Any) -> None:
    counts = [*compile_depths, depth] if isinstance(compile_depths, (tuple, list)) else []
    if len(counts) != 3 or not all(isinstance(n, int) and n > 0 for n in counts) or sorted(set(counts)) != counts:
        raise ValueError(
            f"depth must exceed both compile_depths, two increasing positive integers, but got depth={depth!r} and "
            f"compile_depths={compile_depths!r}. Omit depth to compile the full model."
        )


class UnequalBlocksError(ValueError):
    """The blocks of a model differ in size, so that figures of few blocks cannot be extrapolated."""


def _require_equal_blocks(state_bytes: Mapping[int, int]) -> None:
    (fewest, least), (fewer, less), (more, most) = by_blocks = sorted(state_bytes.items())
    if (most - least) * (fewer - fewest) != (less - least) * (more - fewest):
        sizes = ", ".join(f"{size} bytes with {counted(blocks, 'block')}" for blocks, size in by_blocks)
        raise UnequalBlocksError(
            f"Cannot extrapolate to {more} blocks because the blocks are not equal: the variables of a device take "
            f"{sizes}. Omit depth to compile the full model."
        )

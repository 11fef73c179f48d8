"""`plan`: the real step of a model compiled for the devices of a distribution, and what it holds, sends and takes."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import jax
import keras

from keras_dist._keras import internals
from keras_dist._report.progress import show_progress
from keras_dist._report.variable_groups import PARTS, PlacedVariable
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.planning.abstract_step import Step, bytes_on_a_device, prepared_step
from keras_dist.planning.compilation import Compilation, compile_step, extrapolated
from keras_dist.planning.compile_target import require_one_target, target
from keras_dist.planning.hardware import Hardware, hardware
from keras_dist.planning.report import Memory, Plan
from keras_dist.strategies.base import Distribution
from keras_dist.variables.variable_layouts import optimizer_state_owners


def plan(
    build_model: Any,
    distribution: Distribution,
    batch: Any,
    *,
    step: str = "train",
    depth: int | None = None,
    compile_depths: tuple[int, int] = (2, 4),
    progress: bool | None = None,
) -> Plan:
    """Compiles the real step of a model for the devices of a distribution, and says what it costs before anyone pays.

    The devices need not be attached: make the mesh of `keras_dist.target("v5e:4x4")`. Nothing runs, no weights are
    made, and a model that is passed stays as it is.

    A model of many equal blocks can be compiled at two small depths and extrapolated: give `depth`. State and batch are
    then still exact; what the compiler says (temporaries, collectives, FLOP, memory traffic) grows in a straight line
    from the two depths to the one asked for. That is right where the blocks are equal and the compiler treats them
    alike; a test of this package compares it with a whole compilation.

    Args:
        build_model: a function without arguments that returns a compiled model, or a model, deferred or real. With
            `depth`, a function of the number of blocks.
        distribution: how things lie; its mesh says which hardware is planned for.
        batch: a whole batch as `fit` gets it, `x`, `(x, y)` or `(x, y, sample_weight)`, each an array, a
            `jax.ShapeDtypeStruct`, a tuple of sizes (float32), or a list or dict of these. Or the number of rows,
            where the model's inputs have known shapes and its targets follow from its losses.
        step: `"train"`, `"test"` or `"predict"`.
        depth: how many blocks the model has, to extrapolate to.
        compile_depths: the two numbers of blocks that are compiled for that.
        progress: whether to show what is being done; by default where standard error is a terminal.

    Returns:
        The plan. Where the compiler says that memory does not suffice, `plan.fits` is False.

    Raises:
        TypeError: no model and no function, or no distribution.
        ValueError: a model that is not compiled, a batch that does not fit, an unknown step, depths that are none, or
            blocks that are not equal.

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
    _require_arguments(build_model, distribution, step, depth, compile_depths)
    with show_progress(progress) as say:
        if depth is None:
            with prepared_step(build_model, distribution, batch, step) as prepared:
                return _planned(prepared, compile_step(prepared, _hardware(prepared), say), None)

        def prepared_with(blocks):
            say(f"Building {blocks} blocks")
            return prepared_step(lambda: build_model(blocks), distribution, batch, step)

        held: dict[int, int] = {}
        for blocks in (*compile_depths, depth):
            with prepared_with(blocks) as prepared:
                held[blocks] = _state_bytes(prepared)
        _require_equal_blocks(held)
        compiled: dict[int, Compilation] = {}
        for blocks in compile_depths:
            with prepared_with(blocks) as prepared:
                compiled[blocks] = compile_step(prepared, _hardware(prepared), say)
        with prepared_with(depth) as prepared:
            return _planned(prepared, extrapolated(compiled, depth), depth)


def _device(step: Step) -> Any:
    return step.distribution.device_mesh.backend_mesh.devices.flat[0]


def _takes_one_argument(function: Any) -> bool:
    try:
        inspect.signature(function).bind(1)
    except TypeError:
        return False
    except ValueError:  # a function that does not say what it takes
        return True
    return True


def _state_bytes(step: Step) -> int:
    return sum(bytes_on_a_device(spec) for part in step.state_specs() for spec in part)


def _hardware(step: Step) -> Hardware | None:
    device = _device(step)
    # The memory of a CPU device is a part of this machine's, which a target knows.
    return target("cpu:1").hardware if device.platform == "cpu" else hardware.of_device(device)


def _planned(step: Step, compiled: Compilation, depth: int | None) -> Plan:
    mesh, chip = step.distribution.device_mesh, _hardware(step)
    variables = _variables(step)
    held = {part: sum(v.bytes for v in variables if v.part == part) for part in PARTS}
    batch = sum(bytes_on_a_device(spec) for spec in jax.tree.leaves(step.batch))
    memory = Memory(
        **held,
        batch=batch,
        padding=max(0, round(compiled.argument_bytes) - sum(held.values()) - batch),
        outputs=round(compiled.outputs),
        temporaries=round(compiled.temporaries),
        program=round(compiled.program),
        capacity=None if chip is None else chip.memory_bytes,
    )
    fits = False if compiled.refusal else None if memory.capacity is None else memory.total <= memory.capacity
    seconds = compiled.roofline.seconds
    utilization = None
    if seconds and compiled.flops and compiled.roofline.compute_seconds is not None:
        asked = compiled.model_flops / mesh.devices.size / compiled.flops
        utilization = asked * compiled.roofline.compute_seconds / seconds
    notes = (f"The compiler says: {compiled.refusal}",) if compiled.refusal else ()
    return Plan(
        model=step.model.name,
        step=step.name,
        target=chip.name if chip is not None else _device(step).device_kind,
        mesh=mesh,
        distribution=repr(step.distribution),
        batch=jax.tree.map(lambda spec: f"{spec.dtype}{list(spec.shape)}", step.batch),
        variables=variables,
        memory=memory,
        fits=fits,
        traffic=compiled.traffic,
        collectives=compiled.collectives,
        flops=compiled.flops,
        model_flops=compiled.model_flops,
        model_flops_utilization=utilization,
        memory_traffic=compiled.memory_traffic,
        roofline=compiled.roofline,
        largest_values=compiled.largest_values,
        notes=notes + compiled.notes,
        compile_seconds=compiled.seconds,
        depth=depth,
    )


def _variables(step: Step) -> tuple[PlacedVariable, ...]:
    weights = {id(variable) for variable in step.model.weights}
    slots = {id(variable) for variable in step.model.optimizer.variables} if step.name == "train" else set()
    variables = [variable for part in step.variables for variable in part]
    owners = optimizer_state_owners(step.model, variables)
    planned = []
    for variable in variables:
        layout, shape = step.layouts[id(variable)], tuple(variable.shape)
        sharding = internals.as_sharding(layout)
        owner = owners.get(id(variable), variable)
        rule = step.distribution.rule(owner.path)
        axes = layout.axes if isinstance(layout, TensorLayout) else tuple(sharding.spec)
        shard_shape = tuple(sharding.shard_shape(shape))
        planned.append(
            PlacedVariable(
                path=variable.path,
                part="weights" if id(variable) in weights else "optimizer" if id(variable) in slots else "other",
                shape=shape,
                dtype=internals.stored_dtype(variable),
                rule=None if rule is None or layout != rule.layout else rule.pattern,
                axes=tuple(axes),
                shard_shape=shard_shape,
                bytes=math.prod(shard_shape) * jax.numpy.dtype(internals.stored_dtype(variable)).itemsize,
            )
        )
    return tuple(planned)


def _require_arguments(build_model: Any, distribution: Any, step: Any, depth: Any, compile_depths: Any) -> None:
    if not isinstance(distribution, Distribution):
        raise TypeError(
            "A plan is for a distribution of keras_dist. Received: "
            f"distribution={distribution!r} ({type(distribution).__name__}). Pass, for example, "
            'keras_dist.DataParallel(keras_dist.create_device_mesh("data:16", devices=keras_dist.target("v5e:4x4"))).'
        )
    require_one_target(distribution.device_mesh)
    if step not in internals.STEPS:
        raise ValueError(
            f"A step is one of {', '.join(map(repr, internals.STEPS))}. Received: step={step!r}. Leave it out for "
            "'train'."
        )
    if depth is None:
        return
    if isinstance(build_model, keras.Layer) or not callable(build_model) or not _takes_one_argument(build_model):
        raise TypeError(
            "With depth, build_model is a function of the number of blocks. "
            f"Received: {build_model!r} ({type(build_model).__name__}). Pass, for example, lambda depth: build(depth)."
        )
    counts = (*compile_depths, depth) if isinstance(compile_depths, (tuple, list)) else ()
    if len(counts) != 3 or not all(isinstance(n, int) and n > 0 for n in counts) or sorted(set(counts)) != list(counts):
        raise ValueError(
            "Two numbers of blocks are compiled, both smaller than the depth that is extrapolated to. Received: "
            f"depth={depth!r}, compile_depths={compile_depths!r}. Leave depth out to compile the whole model."
        )


def _require_equal_blocks(held: Mapping[int, int]) -> None:
    (fewer, less), (more, most), (all_blocks, whole) = held.items()
    if (whole - less) * (more - fewer) != (most - less) * (all_blocks - fewer):
        raise ValueError(
            "Only models of equal blocks go on in a straight line. Received: variables of "
            f"{', '.join(f'{size} bytes a device with {blocks} blocks' for blocks, size in held.items())}. Leave depth "
            "out to compile the whole model."
        )

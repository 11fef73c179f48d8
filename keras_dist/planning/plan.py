"""`plan`: the real step of a model compiled for the devices of a distribution, and what it holds, sends and takes."""

import dataclasses
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import keras

from keras_dist._keras import internals
from keras_dist._report.as_json import plain
from keras_dist._report.progress import progress_of
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.planning.abstract_step import Step, bytes_on_a_device, prepared_step
from keras_dist.planning.compilation import Compilation, Traffic, compile_step, extrapolated
from keras_dist.planning.compile_target import require_one_target, target
from keras_dist.planning.hardware import Hardware, hardware
from keras_dist.planning.hlo.module_costs import Collective, LargeValue
from keras_dist.planning.roofline import Roofline
from keras_dist.strategies.base import Distribution
from keras_dist.variables.variable_layouts import as_sharding, owners_of_slots

PARTS = ("weights", "optimizer", "other")


@dataclass(frozen=True)
class PlannedVariable:
    """A variable that a step takes.

    Attributes:
        path: its path in the model.
        part: `"weights"`, `"optimizer"`, or `"other"` (metrics, states of random generators).
        shape: the whole shape.
        dtype: the dtype that it is kept in.
        rule: the key of the layout map that gave it its layout; None where it is replicated for want of one, or where
            it brought its layout with it.
        axes: the mesh axes of each dim: None, a name or a tuple of names.
        shard_shape: its shape on one device.
        bytes: what it takes on one device.
    """

    path: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    rule: str | None
    axes: tuple[Any, ...]
    shard_shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Memory:
    """What one device holds while a step runs, in bytes.

    Attributes:
        weights: weights of the model, trainable or not.
        optimizer: variables of the optimizer.
        other: metrics, and states of random generators.
        batch: the part of the batch.
        padding: what the compiler adds to all of these to fit them to the hardware's tiles.
        outputs: results that take the place of no argument.
        temporaries: activations, gradients, gathered weights, buffers of collectives.
        program: the compiled program itself.
        capacity: what a device of the hardware has, None where that is not known.
    """

    weights: int
    optimizer: int
    other: int
    batch: int
    padding: int = 0
    outputs: int = 0
    temporaries: int = 0
    program: int = 0
    capacity: int | None = None

    @property
    def state(self) -> int:
        """Weights, optimizer and other state."""
        return self.weights + self.optimizer + self.other

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.batch + self.padding + self.outputs + self.temporaries + self.program


@dataclass(frozen=True)
class Plan:
    """What a step of a model will hold, send and take on each device of a mesh. It prints as a report.

    Attributes:
        model: the name of the model.
        step: `"train"`, `"test"` or `"predict"`.
        target: the hardware: its name, or what JAX calls the devices where they are of none that is registered.
        mesh: the device mesh.
        distribution: the distribution, spelled out.
        batch: shape and dtype of each array of the batch, whole.
        variables: those that the step takes, one by one.
        memory: bytes on one device.
        fits: whether that is within the capacity; None where the capacity is not known.
        traffic: the collectives, summed by kind and axes.
        collectives: each collective instruction. Where the plan is extrapolated, those of the deepest model compiled.
        flops: FLOP of matrix multiplications and convolutions that one device executes.
        model_flops: FLOP that the model asks for, on all devices together; nothing recomputed, nothing twice.
        model_flops_utilization: the part of the hardware's peak that these are, if a step takes `roofline.seconds`.
        memory_traffic: bytes that one device reads from and writes to its memory, an estimate.
        roofline: seconds that a step takes at least, by what bounds it.
        largest_values: the largest temporaries.
        notes: what to know of these figures.
        compile_seconds: how long the compiler took.
        depth: the number of blocks that was extrapolated to, None where the whole model was compiled.
    """

    model: str
    step: str
    target: str
    mesh: DeviceMesh
    distribution: str
    batch: Any
    variables: tuple[PlannedVariable, ...]
    memory: Memory
    fits: bool | None
    traffic: tuple[Traffic, ...]
    collectives: tuple[Collective, ...]
    flops: float
    model_flops: float
    memory_traffic: float
    roofline: Roofline
    model_flops_utilization: float | None
    largest_values: tuple[LargeValue, ...]
    notes: tuple[str, ...]
    compile_seconds: float = dataclasses.field(compare=False)
    depth: int | None = None

    @property
    def parameters(self) -> int:
        """How many weights the model has."""
        return sum(math.prod(v.shape) for v in self.variables if v.part == "weights")

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in a step."""
        return sum(each.wire_bytes for each in self.traffic)

    def largest_holders(self, count: int = 5) -> list[tuple[str, int]]:
        """Returns what takes most of a device's memory.

        Args:
            count: how many to return.

        Returns:
            Variables and temporaries with their bytes on one device, largest first.
        """
        holders = [(f"{v.path} ({v.part})", v.bytes) for v in self.variables]
        holders += [(f"{v.op_name or v.name} {v.shape} (temporary)", v.bytes) for v in self.largest_values]
        return sorted(holders, key=lambda holder: -holder[1])[:count]

    def picture(self) -> str:
        """Returns memory and time of one device as bars of text."""
        from keras_dist.planning.report import picture

        return picture(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as numbers, strings, lists and dicts, which JSON can spell."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mesh = fields.pop("mesh")
        derived = {"parameters": self.parameters, "wire_bytes": self.wire_bytes}
        data = {name: plain(value) for name, value in (fields | derived).items()}
        data["memory"] |= {"state": self.memory.state, "total": self.memory.total}
        data["roofline"] |= {"bound": self.roofline.bound, "seconds": self.roofline.seconds}
        return data | {"mesh": mesh.axis_sizes, "devices": mesh.devices.size}

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the plan as JSON.

        Args:
            indent: spaces for each level, None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        from keras_dist.planning.report import as_text

        return as_text(self)

    def __repr__(self) -> str:
        fits = {True: "fits", False: "does not fit", None: "memory not known"}[self.fits]
        return f"<Plan of the {self.step} step of {self.model!r} on {self.mesh.devices.size} x {self.target}: {fits}>"

    def _repr_html_(self) -> str:
        from keras_dist.planning.report import as_html

        return as_html(self)


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
    with progress_of(progress) as say:
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


def _variables(step: Step) -> tuple[PlannedVariable, ...]:
    weights = {id(variable) for variable in step.model.weights}
    slots = {id(variable) for variable in step.model.optimizer.variables} if step.name == "train" else set()
    variables = [variable for part in step.variables for variable in part]
    owners = owners_of_slots(step.model, variables)
    planned = []
    for variable in variables:
        layout, shape = step.layouts[id(variable)], tuple(variable.shape)
        sharding = as_sharding(layout)
        owner = owners.get(id(variable), variable)
        rule = step.distribution.rule(owner.path)
        axes = layout.axes if isinstance(layout, TensorLayout) else tuple(sharding.spec)
        shard_shape = tuple(sharding.shard_shape(shape))
        planned.append(
            PlannedVariable(
                path=variable.path,
                part="weights" if id(variable) in weights else "optimizer" if id(variable) in slots else "other",
                shape=shape,
                dtype=variable._dtype,
                rule=None if rule is None or layout != rule.layout else rule.pattern,
                axes=tuple(axes),
                shard_shape=shard_shape,
                bytes=math.prod(shard_shape) * jax.numpy.dtype(variable._dtype).itemsize,
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

"""What `auto` knows of a candidate exactly or in closed form: what variables take, and what a step sends at least."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from keras_dist._keras import internals, model_structure
from keras_dist.layout.tensor_layout import axis_names
from keras_dist.planning.compiling.abstract_step import Step, batch_specs, bytes_on_a_device
from keras_dist.planning.hardware.figures import Hardware
from keras_dist.planning.hardware.interconnect import Interconnect
from keras_dist.planning.hlo.collectives import wire_bytes
from keras_dist.planning.hlo.replica_groups import groups_along
from keras_dist.planning.search.candidates import CONTEXT, DATA, MODEL, REPLICA, Candidate
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.derived.tensor_parallel import Solution
from keras_dist.variables.variable_layouts import VariableSpec, layout_under, layouts_of

# What collectives are for: gradients and weights, activations of tensor parallelism without and with sequence
# parallelism, and attention's operands under context parallelism.
WEIGHTS, TENSOR, SEQUENCE, ATTENTION = PURPOSES = ("weights", "tensor", "sequence", "attention")
# Purposes whose closed form is what any program must send at least. Attention's operands may be exchanged otherwise.
_FLOORS = (WEIGHTS, TENSOR, SEQUENCE)

# Rates of hardware whose figures are unknown, such as a CPU: only their ratios matter, to rank candidates.
NOMINAL = {"flops": 1e12, "memory": 1e11, "link": 1e10}


@dataclass(frozen=True)
class Sizes:
    """What is known exactly, or in closed form, of a candidate on one device."""

    state: int  # bytes of weights, optimizer state and other variables
    optimizer: int  # bytes of optimizer state
    updated: int  # bytes of variables that a step updates
    batch: int  # bytes
    weights: float  # bytes of the weights that a device computes with, in the dtype that it computes in
    tokens: float  # rows of a device, in parts of a row where sequences are sharded
    sharded_fraction: float  # of the matrix multiplications: what the axis "model" divides
    shards_state: bool  # whether a variable is sharded over the axes of batches or sequences
    wire: Mapping[str, float]  # least bytes that a device sends, by purpose
    wire_seconds: Mapping[str, float]  # the time of that at full bandwidth, by purpose
    min_wire_seconds: float  # the time that collectives take at least, if those over different axes overlap


class Workload:
    """A prepared step, whose sizes under any distribution can be computed.

    `solutions` is what tensor parallelism shards, by the size of its axis.
    """

    def __init__(self, step: Step, batch: Any, hardware: Hardware | None, solutions: Mapping[int, Solution]):
        self._step, self._batch, self._hardware, self._solutions = step, batch, hardware, solutions
        self._compute_dtypes = model_structure.compute_dtypes(step.model)
        self._trained = {id(v) for v in step.model.trainable_variables if step.name == "train"}
        tables = {id(v) for v in step.model.weights if internals.is_embedding_table(v.path)}
        self._looked_up = tables - model_structure.tied_tables(step.model)  # nothing else is done with them

    def sizes(self, candidate: Candidate, distribution: Distribution) -> Sizes:
        step, solution = self._step, self._solutions.get(candidate.size(MODEL))
        is_training = step.name == "train"
        layouts = layouts_of(step.model, distribution, lambda variable: layout_under(variable, distribution))
        state = replace(step, layouts=layouts, distribution=distribution).state_specs()
        held = [sum(map(bytes_on_a_device, part)) for part in state]
        specs = jax.tree.leaves(batch_specs(step.model, self._batch, step.name, distribution))
        shapes = [spec.shape for spec in specs if spec.shape]
        rows = distribution.steps.rows_of_device(step.name, max((shape[0] for shape in shapes), default=1))
        lookups = rows * max((math.prod(shape[1:]) for shape in shapes), default=1)
        tokens = rows / candidate.size(CONTEXT)
        weights = gradients = updated = 0.0
        for variable in step.model.weights:
            spec = VariableSpec.of(variable)
            if id(variable) in self._looked_up and candidate.shards_weights and CONTEXT not in candidate.axes:
                stored = distribution.get_variable_layout(spec).axes  # pyright: ignore[reportArgumentType]
                if stored[0] is None and stored[-1] is not None and lookups < spec.shape[0]:
                    continue  # devices send the rows that they look up (FSDP), which are few
            axes = distribution.get_compute_layout(spec).axes if candidate.size(MODEL) > 1 else ()
            elements = math.prod(spec.shape) / (candidate.size(MODEL) if any(axes) else 1)
            computed = elements * _itemsize(self._compute_dtypes.get(id(variable), spec.dtype))
            weights += computed
            if id(variable) in self._trained:
                gradients += computed
                updated += elements * _itemsize(spec.dtype)
        share = tokens if is_training else tokens / 2  # activations are sent forward only
        all_reduced = 0.0 if solution is None else solution.all_reduced_bytes
        # Those between attention and dense layers, which tensor parallelism over few devices all-reduces.
        activations = self._solutions[min(self._solutions)].all_reduced_bytes if self._solutions else 0.0
        wire: dict[str, float] = dict.fromkeys(PURPOSES, 0.0)
        seconds: dict[tuple, float] = defaultdict(float)
        mesh = distribution.device_mesh.backend_mesh
        interconnect = Interconnect(self._hardware, mesh.devices) if self._hardware is not None else None
        for purpose, kind, axes, payload in _collectives(
            candidate, weights, gradients, updated, all_reduced * share, activations * share
        ):
            if sent := wire_bytes(kind, payload, candidate.size(*axes)):
                groups = groups_along(mesh.devices.shape, [mesh.axis_names.index(axis) for axis in axes])
                rate = None if interconnect is None else interconnect.seconds_per_byte(kind, groups)[1]
                wire[purpose] += sent
                seconds[purpose, axes] += sent * (1 / NOMINAL["link"] if rate is None else rate)
        return Sizes(
            state=sum(held),
            optimizer=held[2] if is_training else 0,
            updated=sum(held) if is_training else 0,
            batch=sum(map(bytes_on_a_device, specs)),
            weights=weights,
            tokens=tokens,
            sharded_fraction=0.0 if solution is None else solution.sharded_fraction,
            shards_state=any({DATA, CONTEXT} & {*axis_names(getattr(each, "axes", ()))} for each in layouts.values()),
            wire=wire,
            wire_seconds={each: sum(s for (purpose, _), s in seconds.items() if purpose == each) for each in wire},
            min_wire_seconds=max((s for (purpose, _), s in seconds.items() if purpose in _FLOORS), default=0.0),
        )


def _itemsize(dtype: Any) -> int:
    return jax.numpy.dtype(dtype).itemsize


def _collectives(
    candidate: Candidate, weights: float, gradients: float, updated: float, all_reduced: float, activations: float
) -> Iterator[tuple[str, str, tuple[str, ...], float]]:
    """Yields the purpose, the kind, the axes and the payload of the collectives that a step runs at least.

    `weights`, `gradients` and `updated` weights, as they are stored, are the bytes that a device has of them unless
    they are sharded over the axes of batches; the last two are 0 without training. `all_reduced` are the bytes that
    tensor parallelism all-reduces for the tokens of a device. Attention's operands are taken to be exchanged by
    all-to-alls of queries, keys, values and outputs, forward and backward. They are twice `activations`.
    """
    sharing = tuple(axis for axis in (REPLICA, DATA, CONTEXT) if candidate.size(axis) > 1)
    if candidate.shards_weights:
        shards = tuple(axis for axis in sharing if axis != REPLICA)
        yield WEIGHTS, "all-gather", shards, (2 if candidate.regathers else 1) * weights
        yield WEIGHTS, "reduce-scatter", shards, gradients
        yield WEIGHTS, "all-reduce", (REPLICA,), gradients / candidate.size(*shards)
    elif candidate.strategy == "zero1":
        yield WEIGHTS, "reduce-scatter", sharing, gradients
        yield WEIGHTS, "all-gather", sharing, updated
    else:
        yield WEIGHTS, "all-reduce", sharing, gradients
    yield SEQUENCE if candidate.sequence_parallel else TENSOR, "all-reduce", (MODEL,), all_reduced
    yield ATTENTION, "all-to-all", (CONTEXT,), 2 * activations / candidate.size(MODEL)

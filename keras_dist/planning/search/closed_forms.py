"""What `auto` knows of a candidate exactly or in closed form: what variables take, and what a step sends at least."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    """What is known exactly, or in closed form, of a candidate on one device.

    Attributes:
        state: Bytes of weights, optimizer state and other variables.
        optimizer: Bytes of optimizer state.
        updated: Bytes of them that a step updates.
        batch: Bytes of the batch.
        weights: Bytes of the weights that a device computes with, in the dtype that it computes in.
        tokens: Rows of a device times positions of a sequence that it has.
        sharded_fraction: Fraction of the matrix multiplications that the axis "model" divides.
        shards_state: Whether a variable is sharded over the axes of batches or sequences.
        wire: Least bytes that a device sends, by purpose.
        wire_seconds: The time of that at full bandwidth, by purpose.
        min_wire_seconds: The time that collectives take at least, if those over different axes overlap.
    """

    state: int
    optimizer: int
    updated: int
    batch: int
    weights: float
    tokens: float
    sharded_fraction: float
    shards_state: bool
    wire: Mapping[str, float]
    wire_seconds: Mapping[str, float]
    min_wire_seconds: float


class Workload:
    """A prepared step, whose sizes under any distribution can be computed."""

    def __init__(self, step: Step, batch: Any, hardware: Hardware | None):
        self._step, self._batch, self._hardware = step, batch, hardware
        model = step.model
        dtypes = model_structure.compute_dtypes(model)
        trained = {id(v) for v in model.trainable_variables}
        tied = model_structure.tied_tables(model)
        self._weights = [
            _Weight(
                VariableSpec.of(v),
                math.prod(v.shape),
                _itemsize(v.dtype),
                _itemsize(dtypes.get(id(v), v.dtype)),
                step.name == "train" and id(v) in trained,
                internals.is_embedding_table(v.path) and id(v) not in tied,
            )
            for v in model.weights
        ]

    def sizes(
        self, candidate: Candidate, distribution: Distribution, solution: Solution | None, all_reduced: float
    ) -> Sizes:
        """Returns the sizes of a candidate.

        Args:
            candidate: The candidate.
            distribution: Its distribution.
            solution: What tensor parallelism shards; None if it does not use that.
            all_reduced: Bytes that tensor parallelism over few devices would all-reduce for each row of a batch.
        """
        step = self._step
        layouts = layouts_of(step.model, distribution, lambda variable: layout_under(variable, distribution))
        state = replace(step, layouts=layouts, distribution=distribution).state_specs()
        held = [sum(map(bytes_on_a_device, part)) for part in state]
        specs = jax.tree.leaves(batch_specs(step.model, self._batch, step.name, distribution))
        global_rows = max((spec.shape[0] for spec in specs if spec.shape), default=1)
        rows = distribution.steps.rows_of_device(step.name, global_rows)
        parts = candidate.size(CONTEXT)
        weights = gradients = updated = 0.0
        lookups = rows * max((math.prod(spec.shape[1:]) for spec in specs if spec.shape), default=1)
        for weight in self._weights:
            if candidate.shards_weights and parts == 1 and weight.sends_rows(distribution, lookups):
                continue  # rows are few, next to weights
            axes = distribution.get_compute_layout(weight.spec).axes if candidate.size(MODEL) > 1 else ()
            divided = weight.elements / (candidate.size(MODEL) if any(axes) else 1)
            weights += divided * weight.compute_size
            gradients += divided * weight.compute_size * weight.is_trained
            updated += divided * weight.stored_size * weight.is_trained
        tensor_bytes = 0.0 if solution is None else solution.all_reduced_bytes
        share = rows / parts if step.name == "train" else rows / parts / 2  # activations are sent forward only
        wire = _wire(candidate, weights, gradients, updated, tensor_bytes * share, all_reduced * share)
        seconds = self._seconds(candidate, distribution, wire)
        used = {name for layout in layouts.values() for name in axis_names(getattr(layout, "axes", ()))}
        return Sizes(
            state=sum(held),
            optimizer=held[2] if step.name == "train" else 0,
            updated=sum(held) if step.name == "train" else 0,
            batch=sum(map(bytes_on_a_device, specs)),
            weights=weights,
            tokens=rows / parts,
            sharded_fraction=0.0 if solution is None else solution.sharded_fraction,
            shards_state=bool(used & {DATA, CONTEXT}),
            wire={purpose: sum(sent for _, _, sent in parts) for purpose, parts in wire.items()},
            wire_seconds={purpose: sum(by_axes.values()) for purpose, by_axes in seconds.items()},
            min_wire_seconds=max((s for purpose in _FLOORS for s in seconds[purpose].values()), default=0.0),
        )

    def _seconds(
        self, candidate: Candidate, distribution: Distribution, wire: Mapping[str, list]
    ) -> dict[str, dict[tuple, float]]:
        """Returns the time of the collectives for each purpose and the axes that they are along."""
        mesh = distribution.device_mesh.backend_mesh
        interconnect = Interconnect(self._hardware, mesh.devices) if self._hardware is not None else None
        seconds: dict[str, dict[tuple, float]] = {}
        for purpose, parts in wire.items():
            by_axes = seconds[purpose] = {}
            for kind, axes, sent in parts:
                rate = None
                if interconnect is not None and sent:
                    dims = [mesh.axis_names.index(axis) for axis in axes if axis in mesh.axis_names]
                    _, rate = interconnect.seconds_per_byte(kind, groups_along(mesh.devices.shape, dims))
                needed = sent * (1 / NOMINAL["link"] if rate is None else rate)
                by_axes[tuple(axes)] = by_axes.get(tuple(axes), 0.0) + needed
        return seconds


class _Weight(NamedTuple):
    """A weight, with the bytes of an element where it is stored and where a layer computes with it.

    `is_looked_up` is whether it is a table of which layers only look up rows.
    """

    spec: VariableSpec
    elements: int
    stored_size: int
    compute_size: int
    is_trained: bool
    is_looked_up: bool

    def sends_rows(self, distribution: Distribution, lookups: int) -> bool:
        """Whether devices, each of which looks up so many rows, send rows in place of the weight (FSDP)."""
        axes = distribution.get_variable_layout(self.spec).axes  # pyright: ignore[reportArgumentType]
        return self.is_looked_up and axes[0] is None and axes[-1] is not None and lookups < self.spec.shape[0]


def _itemsize(dtype: Any) -> int:
    return jax.numpy.dtype(dtype).itemsize


def _wire(
    candidate: Candidate, weights: float, gradients: float, updated: float, all_reduced: float, activations: float
) -> dict[str, list]:
    """Returns for each purpose the kind, the axes and the bytes that a device sends of its collectives, at least.

    `weights`, `gradients` and `updated` weights, as they are stored, are the bytes that a device has of them unless
    they are sharded over the axes of batches; the last two are 0 without training. `all_reduced` are the bytes that
    tensor parallelism all-reduces for the tokens of a device. Attention's operands are taken to be exchanged by
    all-to-alls of queries, keys, values and outputs, forward and backward. They are twice `activations`, those between
    attention and dense layers, which tensor parallelism over few devices all-reduces.
    """
    sharing = [axis for axis in (REPLICA, DATA, CONTEXT) if candidate.size(axis) > 1]
    shards = [axis for axis in sharing if axis != REPLICA]
    num_shards, replicas = candidate.size(*shards), candidate.size(REPLICA)
    found: dict[str, list] = {purpose: [] for purpose in PURPOSES}
    weight_traffic = found[WEIGHTS]
    if candidate.shards_weights:
        gathers = 2 if candidate.regathers else 1
        weight_traffic.append(("all-gather", shards, gathers * wire_bytes("all-gather", weights, num_shards)))
        weight_traffic.append(("reduce-scatter", shards, wire_bytes("reduce-scatter", gradients, num_shards)))
        weight_traffic.append(("all-reduce", [REPLICA], wire_bytes("all-reduce", gradients / num_shards, replicas)))
    elif candidate.strategy == "zero1":
        weight_traffic.append(("reduce-scatter", sharing, wire_bytes("reduce-scatter", gradients, num_shards)))
        weight_traffic.append(("all-gather", sharing, wire_bytes("all-gather", updated, num_shards)))
    else:
        weight_traffic.append(("all-reduce", sharing, wire_bytes("all-reduce", gradients, candidate.size(*sharing))))
    parts = candidate.size(CONTEXT)
    tensor_bytes = wire_bytes("all-reduce", all_reduced, candidate.size(MODEL))
    found[SEQUENCE if candidate.sequence_parallel else TENSOR].append(("all-reduce", [MODEL], tensor_bytes))
    exchanged = wire_bytes("all-to-all", 2 * activations, parts) / candidate.size(MODEL)
    found[ATTENTION].append(("all-to-all", [CONTEXT], exchanged))
    return found

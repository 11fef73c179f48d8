"""What `auto` knows of a candidate before it is compiled: exact sizes, closed forms, and estimates from others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from keras_dist._keras import internals
from keras_dist.layout.tensor_layout import axis_names
from keras_dist.planning.abstract_step import Step, batch_specs, bytes_on_a_device
from keras_dist.planning.candidates import CONTEXT, DATA, MODEL, REPLICA, Candidate
from keras_dist.planning.hardware_figures import Hardware
from keras_dist.planning.hlo.collectives import wire_bytes
from keras_dist.planning.hlo.replica_groups import groups_along
from keras_dist.planning.interconnect import Interconnect
from keras_dist.planning.report import Plan
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.tensor_parallel import Solution
from keras_dist.variables.variable_layouts import VariableSpec, layout_under, layouts_of

# What collectives are for: gradients and weights, activations of tensor parallelism without and with sequence
# parallelism, and attention's operands under context parallelism.
_WEIGHTS, _TENSOR, _SEQUENCE, _ATTENTION = PURPOSES = ("weights", "tensor", "sequence", "attention")

# Reads and writes of a training step's update for each byte of weights and optimizer state: Adam reads weight, gradient
# and two averages (16 bytes of 4-byte numbers) and writes three (12), for 12 bytes of state.
_UPDATE_TRAFFIC = 28 / 12
# Purposes whose closed form is what any program must send at least. Attention's operands may be exchanged otherwise.
_FLOORS = (_WEIGHTS, _TENSOR, _SEQUENCE)
# The fraction of the activations between sharded layers, which tensor parallelism alone does not shard.
_UNSHARDED_ACTIVATIONS = 0.5
# How much of a collective's time is expected not to overlap, until a compiled candidate shows it.
_EXPECTED_EXPOSURE = 0.5
# A candidate that is not compiled may be this much better than compiled ones of its kind let expect.
_DOUBT = 0.8
# Fraction of the gathered weights that a step holds if its blocks gather them again for the backward pass.
_HELD_WEIGHTS = 0.25

# Rates of hardware whose figures are unknown, such as a CPU: only their ratios matter, to rank candidates.
_NOMINAL = {"flops": 1e12, "memory": 1e11, "link": 1e10}


@dataclass(frozen=True)
class Sizes:
    """What is known exactly, or in closed form, of a candidate on one device.

    Attributes:
        state: bytes of weights, optimizer state and other variables.
        updated: bytes of them that a step updates.
        batch: bytes of the batch.
        weights: bytes of the weights that a device computes with, in the dtype that it computes in.
        tokens: rows of a device times positions of a sequence that it has.
        sharded_fraction: fraction of the matrix multiplications that the axis "model" divides.
        shards_state: whether a variable is sharded over the axes of batches or sequences.
        wire: least bytes that a device sends, by purpose.
        wire_seconds: the time of that at full bandwidth, by purpose.
        least_wire_seconds: the time that collectives take at least, if those over different axes overlap.
    """

    state: int
    updated: int
    batch: int
    weights: float
    tokens: float
    sharded_fraction: float
    shards_state: bool
    wire: Mapping[str, float]
    wire_seconds: Mapping[str, float]
    least_wire_seconds: float


class Workload:
    """A prepared step, whose sizes under any distribution can be computed."""

    def __init__(self, step: Step, batch: Any, hardware: Hardware | None):
        self._step, self._batch, self._hardware = step, batch, hardware
        model = step.model
        dtypes = internals.compute_dtypes(model)
        trained = {id(v) for v in model.trainable_variables}
        self._weights = [
            _Weight(
                VariableSpec.of(v),
                math.prod(v.shape),
                _itemsize(v.dtype),
                _itemsize(dtypes.get(id(v), v.dtype)),
                step.name == "train" and id(v) in trained,
            )
            for v in model.weights
        ]

    def sizes(
        self, candidate: Candidate, distribution: Distribution, solution: Solution | None, all_reduced: float
    ) -> Sizes:
        """Returns the sizes of a candidate.

        Args:
            candidate: the candidate.
            distribution: its distribution.
            solution: what tensor parallelism shards; None if it does not use that.
            all_reduced: bytes that tensor parallelism over few devices would all-reduce for each row of a batch.
        """
        step = self._step
        layouts = layouts_of(step.model, distribution, lambda variable: layout_under(variable, distribution))
        held = sum(
            math.prod(internals.as_sharding(layouts[id(v)]).shard_shape(tuple(v.shape)))
            * _itemsize(internals.stored_dtype(v))
            for part in step.variables
            for v in part
        )
        specs = jax.tree.leaves(batch_specs(step.model, self._batch, step.name, distribution))
        shards = [spec.sharding.shard_shape(spec.shape) for spec in specs]
        rows = max((shard[0] for shard in shards if shard), default=1)
        parts = candidate.size(CONTEXT)
        weights = gradients = updated = 0.0
        for weight in self._weights:
            axes = distribution.get_compute_layout(weight.spec).axes if candidate.size(MODEL) > 1 else ()
            divided = weight.elements / (candidate.size(MODEL) if any(axes) else 1)
            weights += divided * weight.compute_size
            gradients += divided * weight.compute_size * weight.is_trained
            updated += divided * weight.stored_size * weight.is_trained
        of_tensor = 0.0 if solution is None else solution.all_reduced_bytes
        share = rows / parts if step.name == "train" else rows / parts / 2  # activations are sent forward only
        wire = _wire(candidate, weights, gradients, updated, of_tensor * share, all_reduced * share)
        seconds = self._seconds(candidate, distribution, wire)
        used = {name for layout in layouts.values() for name in axis_names(getattr(layout, "axes", ()))}
        return Sizes(
            state=held,
            updated=held if step.name == "train" else 0,
            batch=sum(map(bytes_on_a_device, specs)),
            weights=weights,
            tokens=rows / parts,
            sharded_fraction=0.0 if solution is None else solution.sharded_fraction,
            shards_state=bool(used & {DATA, CONTEXT}),
            wire={purpose: sum(sent for _, _, sent in parts) for purpose, parts in wire.items()},
            wire_seconds={purpose: sum(of_axes.values()) for purpose, of_axes in seconds.items()},
            least_wire_seconds=max((s for purpose in _FLOORS for s in seconds[purpose].values()), default=0.0),
        )

    def _seconds(
        self, candidate: Candidate, distribution: Distribution, wire: Mapping[str, list]
    ) -> dict[str, dict[tuple, float]]:
        """Returns the time of the collectives for each purpose and the axes that they are along."""
        mesh = distribution.device_mesh.backend_mesh
        interconnect = Interconnect(self._hardware, mesh.devices) if self._hardware is not None else None
        seconds: dict[str, dict[tuple, float]] = {}
        for purpose, parts in wire.items():
            of_axes = seconds[purpose] = {}
            for kind, axes, sent in parts:
                rate = None
                if interconnect is not None and sent:
                    dims = [mesh.axis_names.index(axis) for axis in axes if axis in mesh.axis_names]
                    _, rate = interconnect.seconds_per_byte(kind, groups_along(mesh.devices.shape, dims))
                needed = sent * (1 / _NOMINAL["link"] if rate is None else rate)
                of_axes[tuple(axes)] = of_axes.get(tuple(axes), 0.0) + needed
        return seconds


class _Weight(NamedTuple):
    """A weight, with the bytes of an element where it is stored and where a layer computes with it."""

    spec: VariableSpec
    elements: int
    stored_size: int
    compute_size: int
    is_trained: bool


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
    of_weights = found[_WEIGHTS]
    if candidate.shards_weights:
        gathers = 2 if candidate.regathers else 1
        of_weights.append(("all-gather", shards, gathers * wire_bytes("all-gather", weights, num_shards)))
        of_weights.append(("reduce-scatter", shards, wire_bytes("reduce-scatter", gradients, num_shards)))
        of_weights.append(("all-reduce", [REPLICA], wire_bytes("all-reduce", gradients / num_shards, replicas)))
    elif candidate.strategy == "zero1":
        of_weights.append(("reduce-scatter", sharing, wire_bytes("reduce-scatter", gradients, num_shards)))
        of_weights.append(("all-gather", sharing, wire_bytes("all-gather", updated, num_shards)))
    else:
        of_weights.append(("all-reduce", sharing, wire_bytes("all-reduce", gradients, candidate.size(*sharing))))
    parts = candidate.size(CONTEXT)
    of_tensor = wire_bytes("all-reduce", all_reduced, candidate.size(MODEL))
    found[_SEQUENCE if candidate.sequence_parallel else _TENSOR].append(("all-reduce", [MODEL], of_tensor))
    exchanged = wire_bytes("all-to-all", 2 * activations, parts) / candidate.size(MODEL)
    found[_ATTENTION].append(("all-to-all", [CONTEXT], exchanged))
    return found


class Estimates:
    """Expected time and memory of candidates, from their sizes and from those that are compiled so far.

    The first compiled candidate gives the time of the computation of a row, and the activations of one. Others have
    their share of it by what their axes divide. What a compiled candidate shows beyond that (the time that its
    collectives do not overlap, another time of its computation, other temporaries) is expected of its kind, too.
    """

    def __init__(self, sizes: Mapping[Candidate, Sizes], hardware: Hardware | None):
        self._sizes, self._hardware = sizes, hardware
        self._time_base: tuple[Candidate, Plan] | None = None
        self._memory_base: tuple[Candidate, Plan] | None = None
        self._seconds: dict[Candidate, float] = {}
        self._exposed: dict[tuple, float] = {}
        self._slower: dict[tuple, float] = {}
        self._larger: dict[tuple, float] = {}

    def observe(self, candidate: Candidate, plan: Plan) -> None:
        """Takes what the plan of a compiled candidate shows into account."""
        kind = _kind(candidate)
        if self._memory_base is None:
            self._memory_base = candidate, plan
        elif expected := self._temporaries(candidate):
            self._larger[kind] = self._larger.get(kind, 1.0) * plan.memory.temporaries / expected
        if plan.flops == 0:
            return  # the compiler stopped when memory did not suffice
        self._seconds[candidate] = seconds_of(plan)
        busy, expected = _busy_seconds(plan), self._compute_seconds(candidate)
        for key, exposed in self._exposed_of(candidate, plan).items():
            total = self._sizes[candidate].wire_seconds[key[0]]
            if total > 0:
                self._exposed[key] = exposed / total
            else:
                busy += exposed  # what no closed form foresaw is expected of its kind
        if self._time_base is None:
            self._time_base = candidate, plan
        elif expected:
            self._slower[kind] = self._slower.get(kind, 1.0) * busy / expected

    def seconds(self, candidate: Candidate) -> float:
        """Returns the expected time of a step."""
        sizes = self._sizes[candidate]
        exposed = (
            seconds * self._exposed.get(_key(purpose, candidate), _EXPECTED_EXPOSURE)
            for purpose, seconds in sizes.wire_seconds.items()
        )
        simpler = (self._seconds.get(each, 0.0) for each in self.simpler(candidate))
        return max(self._compute_seconds(candidate) + sum(exposed), max(sizes.wire_seconds.values()), *simpler)

    def simpler(self, candidate: Candidate) -> list[Candidate]:
        """Returns the candidates that compute as much on a device as this one does, and communicate less."""
        tokens = self._sizes[candidate].tokens
        known = [each for each in candidate.communicating_less if each in self._sizes]
        return [each for each in known if self._sizes[each].tokens <= tokens]

    def least_seconds(self, candidate: Candidate) -> float:
        """Returns the time of a step at peak rates, if all communication overlaps with the computation."""
        if self._time_base is None:
            return self._sizes[candidate].least_wire_seconds
        base, plan = self._time_base
        ours, theirs = self._sizes[candidate], self._sizes[base]
        share = ours.tokens / theirs.tokens * _multiplied(candidate, ours) / _multiplied(base, theirs)
        multiplied = share * min(_matmul_seconds(plan), _busy_seconds(plan))
        return max(multiplied + self._update_seconds(candidate), ours.least_wire_seconds)

    def optimistic_seconds(self, candidate: Candidate) -> float:
        """Returns the expected time of a step if more of its communication overlaps than in those compiled."""
        sizes = self._sizes[candidate]
        exposed = (
            seconds * self._exposed.get(_key(purpose, candidate), 0.0) * _DOUBT
            for purpose, seconds in sizes.wire_seconds.items()
        )
        return max(self._compute_seconds(candidate) + sum(exposed), max(sizes.wire_seconds.values()))

    def bytes(self, candidate: Candidate) -> float:
        """Returns the expected memory of a device."""
        return self.least_bytes(candidate) + self._temporaries(candidate)

    def least_bytes(self, candidate: Candidate) -> float:
        """Returns the memory that variables and batch take."""
        sizes = self._sizes[candidate]
        return sizes.state + sizes.batch

    def _compute_seconds(self, candidate: Candidate) -> float:
        if self._time_base is None:
            return 0.0
        base, plan = self._time_base
        ours, theirs = self._sizes[candidate], self._sizes[base]
        of_matmuls = min(_matmul_seconds(plan), _busy_seconds(plan))
        of_update = min(self._update_seconds(base), _busy_seconds(plan) - of_matmuls)
        rest = _busy_seconds(plan) - of_matmuls - of_update
        share = ours.tokens / theirs.tokens
        multiplied = _multiplied(candidate, ours) / _multiplied(base, theirs)
        activated = _activated(candidate) / _activated(base)
        seconds = share * (multiplied * of_matmuls + activated * rest) + self._update_seconds(candidate)
        return seconds * self._slower.get(_kind(candidate), 1.0)

    def _update_seconds(self, candidate: Candidate) -> float:
        rate = self._hardware.memory_bytes_per_second if self._hardware is not None else None
        return _UPDATE_TRAFFIC * self._sizes[candidate].updated / (rate or _NOMINAL["memory"])

    def _temporaries(self, candidate: Candidate) -> float:
        if self._memory_base is None:
            return 0.0
        base, plan = self._memory_base
        ours, theirs = self._sizes[candidate], self._sizes[base]
        activations = max(plan.memory.temporaries - _held_weights(base, theirs), 0.1 * plan.memory.temporaries)
        share = ours.tokens / theirs.tokens * _activated(candidate) / _activated(base)
        held = activations * share + _held_weights(candidate, ours)
        return held * self._larger.get(_kind(candidate), 1.0)

    def _exposed_of(self, candidate: Candidate, plan: Plan) -> dict[tuple, float]:
        """Returns the time that a compiled candidate waits for collectives, by what they are for."""
        seconds = {_key(purpose, candidate): 0.0 for purpose in PURPOSES}
        for each in plan.traffic:
            axes = each.axes or tuple(candidate.axes)
            if MODEL in axes:
                purpose = _SEQUENCE if candidate.sequence_parallel else _TENSOR
            else:
                purpose = _ATTENTION if set(axes) == {CONTEXT} and candidate.size(DATA) > 1 else _WEIGHTS
            waited = each.exposed_seconds
            seconds[_key(purpose, candidate)] += each.wire_bytes / _NOMINAL["link"] if waited is None else waited
        return seconds


def seconds_of(plan: Plan) -> float:
    """Returns the forecast of a plan; where the figures of the hardware are unknown, its cost at nominal rates."""
    forecast = plan.roofline.forecast
    if forecast is not None:
        return forecast.seconds
    return _busy_seconds(plan) + plan.wire_bytes / _NOMINAL["link"]


def _busy_seconds(plan: Plan) -> float:
    """Returns the time that a device computes in a step."""
    forecast = plan.roofline.forecast
    if forecast is not None:
        return forecast.seconds - forecast.exposed_seconds
    return plan.flops / _NOMINAL["flops"] + plan.memory_traffic / _NOMINAL["memory"]


def _matmul_seconds(plan: Plan) -> float:
    seconds = plan.roofline.compute_seconds
    return plan.flops / _NOMINAL["flops"] if plan.roofline.forecast is None or seconds is None else seconds


def _kind(candidate: Candidate) -> tuple:
    return candidate.strategy, candidate.regathers, candidate.sequence_dim_name


def _key(purpose: str, candidate: Candidate) -> tuple:
    """What one compiled candidate shows of the collectives of others: those of weights differ by strategy."""
    if purpose != _WEIGHTS:
        return (purpose,)
    return purpose, candidate.strategy == "zero1", candidate.shards_weights, candidate.regathers


def _multiplied(candidate: Candidate, sizes: Sizes) -> float:
    """Returns the part of the matrix multiplications of its tokens that a device does."""
    return sizes.sharded_fraction / candidate.size(MODEL) + 1 - sizes.sharded_fraction


def _activated(candidate: Candidate) -> float:
    """Returns the part of the activations of its tokens that a device holds and computes."""
    unsharded = 0.0 if candidate.sequence_parallel else _UNSHARDED_ACTIVATIONS
    return unsharded + (1 - unsharded) / candidate.size(MODEL)


def _held_weights(candidate: Candidate, sizes: Sizes) -> float:
    """Returns the bytes of gathered weights, or else of gradients, that a step holds."""
    return sizes.weights * (_HELD_WEIGHTS if candidate.regathers else 1.0)

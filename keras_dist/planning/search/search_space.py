"""The search space of `auto`: the candidates for a model on some devices, and what is known of them in advance."""

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from keras_dist._keras import internals, model_structure
from keras_dist._report.units import counted
from keras_dist.layout.tensor_layout import axis_names, axis_tuple
from keras_dist.planning.compiling.abstract_step import Step, batch_specs, bytes_on_a_device, prepared_step
from keras_dist.planning.hardware.figures import Hardware
from keras_dist.planning.hardware.interconnect import Interconnect
from keras_dist.planning.hlo.collectives import wire_bytes
from keras_dist.planning.hlo.replica_groups import groups_along
from keras_dist.planning.search.candidates import (
    CONTEXT,
    DATA,
    EXPERT_PARALLEL,
    MODEL,
    REPLICA,
    Candidate,
    enumerate_candidates,
)
from keras_dist.planning.search.choice import NoCandidateError
from keras_dist.planning.search.expert_rows import ExpertRows, mixtures_of, num_experts
from keras_dist.planning.search.places import Place
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.data_parallel import DataParallel
from keras_dist.strategies.derived.tensor_parallel import Solution, solve
from keras_dist.variables.variable_layouts import VariableSpec, layout_under, layouts_of

# Strategies that shard weights or optimizer state over the axes of batches, with those that are the same but for that.
_WITHOUT_SHARDED_STATE = {"zero1": "dp", "fsdp": "dp", "hsdp": "dp", "fsdp_tp": "tp", "fsdp_tp_sp": "tp_sp"}

# What collectives are for: gradients and weights, activations of tensor parallelism without and with sequence
# parallelism, attention's operands under context parallelism, and rows of experts under expert parallelism.
WEIGHTS, TENSOR, SEQUENCE, ATTENTION, EXPERTS = PURPOSES = ("weights", "tensor", "sequence", "attention", "experts")
# Purposes whose closed form is what any program must send at least. Attention's operands may be exchanged otherwise.
_FLOORS = (WEIGHTS, TENSOR, SEQUENCE, EXPERTS)

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


class SearchSpace(NamedTuple):
    """The candidates with their distributions, what is known of each, and notes on what was left out."""

    candidates: dict[Candidate, Distribution]
    sizes: dict[Candidate, Sizes]
    notes: list[str]


def search_space(build_model: Any, step: str, strategies: Collection[str], place: Place, batch: Any) -> SearchSpace:
    """Returns the candidates for a step of a model, which `build_model` is or returns, and a global batch."""
    count = len(place.devices)
    with prepared_step(build_model, DataParallel(place.mesh({DATA: count})), batch, step) as prepared:
        solutions, notes = _solutions(strategies, place, prepared)
        mixtures = _mixtures(strategies, prepared, notes)
        length, experts = _length(prepared), num_experts(mixtures)
        found = enumerate_candidates(
            count, place.per_network, strategies, place.keep, length, solutions.keys(), step == "train", experts
        )
        if not found:
            kept = ", ".join(f"{axis}:{size}" for axis, size in place.keep.items())
            raise NoCandidateError(
                f"No candidate is left for {place}: of the strategies {', '.join(strategies)}, none has a mesh"
                f"{f' with {kept}' if kept else ''}. {' '.join([*notes, 'Allow more strategies, or keep fewer axes.'])}"
            )
        distributions = _distributions(found, place, solutions, notes)
        workload = _Workload(prepared, batch, place.hardware, solutions, mixtures)
        sizes = {each: workload.sizes(each, distribution) for each, distribution in distributions.items()}
    strategies_left = {each.strategy for each in distributions}
    unsharded = [each for each in distributions if not sizes[each].shards_state]
    useless = [each for each in unsharded if _WITHOUT_SHARDED_STATE.get(each.strategy) in strategies_left]
    for each in useless:
        del distributions[each], sizes[each]  # on every mesh the same as the other
    if useless:
        notes.append(
            f"Left out: {counted(len(useless), 'candidate')} of ZeRO-1, FSDP and HSDP that would shard nothing, "
            "because no weight is large enough, or has a dim that the axis divides."
        )
    gathering = [each for each in distributions if each.expert_axis and not sizes[each].wire[EXPERTS]]
    for each in gathering:
        del distributions[each], sizes[each]
    if gathering:
        notes.append(
            f"Left out: {counted(len(gathering), 'candidate')} of expert parallelism that would gather the weights of "
            "experts as FSDP does, because rows of tokens have more bytes, or layers are in a loop."
        )
    if count == 1:
        notes.append("There is one device, so there is nothing to choose.")
    return SearchSpace(distributions, sizes, notes)


def _distributions(
    found: Iterable[Candidate], place: Place, solutions: Mapping[int, Solution], notes: list[str]
) -> dict[Candidate, Distribution]:
    """Returns the distributions of candidates, without those that cannot be or are the same as a simpler one."""
    mesh_of = functools.cache(place.mesh)
    made: dict[Candidate, Distribution] = {}
    errors: list[str] = []
    for each in found:
        device_mesh = mesh_of(each.axes)
        try:
            distribution = each.distribution(device_mesh, solutions.get(each.size(MODEL)))
        except ValueError as error:
            errors.append(f"{each}: {error}")
            continue
        simpler = made.get(replace(each, strategy=each.strategy.removesuffix("_sp")))
        if each.sequence_parallel and simpler is not None and simpler.layout_rules() == distribution.layout_rules():
            continue  # the model has no sequences to shard
        made[each] = distribution
    if not made:
        raise NoCandidateError(f"No candidate is left for {place}. {errors[0]}")
    if errors:
        notes.append(f"Left out: {counted(len(errors), 'candidate')} that cannot be created. {errors[0]}")
    return made


def _solutions(strategies: Collection[str], place: Place, prepared: Step) -> tuple[dict[int, Solution], list[str]]:
    """Returns what tensor parallelism shards, by the size of its axis, and notes if it has no rules for the model."""
    kept, most = place.keep.get(MODEL), place.per_network
    sizes = [size for size in range(2, most + 1) if most % size == 0 and kept in (None, size)]
    if not sizes or not any("tp" in name for name in strategies):
        return {}, []
    meshes = {size: place.mesh({DATA: len(place.devices) // size, MODEL: size}) for size in sizes}
    try:
        solved = {size: solve(prepared.model, mesh, MODEL, prepared.batch) for size, mesh in meshes.items()}
    except ValueError as error:
        return {}, [f"Tensor parallelism was not tried: {error}"]
    solutions = {size: solution for size, solution in solved.items() if solution.sharded_fraction > 0}
    if not solutions:
        return {}, ["Tensor parallelism was not tried: no weight of the model can be sharded by it."]
    return solutions, []


def _mixtures(strategies: Collection[str], prepared: Step, notes: list[str]) -> list[ExpertRows]:
    """Returns the mixtures of experts over which expert parallelism can be tried. Adds a note if that is unknown."""
    shards_experts = EXPERT_PARALLEL in strategies and not {"fsdp", "hsdp"}.isdisjoint(strategies)
    if not shards_experts or prepared.distribution.device_mesh.devices.size == 1:
        return []
    try:
        return mixtures_of(prepared)
    except ValueError as error:
        notes.append(f"Expert parallelism was not tried: {error}")
        return []


def _length(prepared: Step) -> int | None:
    """Returns the length of the sequences of a batch: dim 1 of tokens, or of vectors (rows, positions, features)."""
    for spec in jax.tree.leaves(prepared.batch[0]):
        is_tokens = len(spec.shape) == 2 and jnp.issubdtype(spec.dtype, jnp.integer)
        if (is_tokens or len(spec.shape) == 3) and spec.shape[1] > 1:
            return spec.shape[1]
    return None


class _Workload:
    """A prepared step, whose sizes under any distribution can be computed. `solutions` are as of `_solutions`."""

    def __init__(
        self,
        step: Step,
        batch: Any,
        hardware: Hardware | None,
        solutions: Mapping[int, Solution],
        mixtures: Iterable[ExpertRows],
    ):
        self._step, self._batch, self._hardware, self._solutions = step, batch, hardware, solutions
        self._mixtures = mixtures
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
        kept, exchanged = self._kept_experts(candidate, layouts, rows)
        weights = gradients = updated = gathered = reduced = 0.0
        for variable in step.model.weights:
            spec = VariableSpec.of(variable)
            if id(variable) in self._looked_up and candidate.shards_weights and CONTEXT not in candidate.axes:
                stored = distribution.get_variable_layout(spec).axes  # pyright: ignore[reportArgumentType]
                if stored[0] is None and stored[-1] is not None and lookups < spec.shape[0]:
                    continue  # devices send the rows that they look up (FSDP), which are few
            axes = distribution.get_compute_layout(spec).axes if candidate.size(MODEL) > 1 else ()
            elements = math.prod(spec.shape) / (candidate.size(MODEL) if any(axes) else 1)
            computed = elements * self._itemsize(variable)
            is_trained, is_kept = id(variable) in self._trained, id(variable) in kept
            weights += computed / candidate.size(DATA) if is_kept else computed
            if not is_kept:
                gathered += computed
                reduced += computed if is_trained else 0.0
            if is_trained:
                gradients += computed
                updated += elements * jnp.dtype(spec.dtype).itemsize
        passes = 1.0 if is_training else 0.5  # activations are sent forward only
        if step.name == "generate":  # each token is one of a row, and weights are gathered before the first
            gathered, passes = 0.0, passes / (_length(step) or 1)
        all_reduced = 0.0 if solution is None else solution.all_reduced_bytes
        # Those between attention and dense layers, which tensor parallelism over few devices all-reduces.
        activations = self._solutions[min(self._solutions)].all_reduced_bytes if self._solutions else 0.0
        wire: dict[str, float] = dict.fromkeys(PURPOSES, 0.0)
        seconds: dict[tuple, float] = defaultdict(float)
        mesh = distribution.device_mesh.backend_mesh
        interconnect = Interconnect(self._hardware, mesh.devices) if self._hardware is not None else None
        for_tokens = all_reduced * tokens * passes, activations * tokens * passes, exchanged
        payloads = _Payloads(gathered, reduced, gradients, updated, *for_tokens)
        for purpose, kind, axes, payload in _collectives(candidate, payloads):
            if sent := wire_bytes(kind, payload, candidate.size(*axes)):
                groups = groups_along(mesh.devices.shape, [mesh.axis_names.index(axis) for axis in axes])
                rate = None if interconnect is None else interconnect.seconds_per_byte(kind, groups)[1]
                wire[purpose] += sent
                seconds[purpose, axes] += sent * (1 / NOMINAL["link"] if rate is None else rate)
        return Sizes(
            state=sum(held),
            optimizer=held[2] if is_training else 0,
            updated=held[0] + held[2] if is_training else 0,
            batch=sum(map(bytes_on_a_device, specs)),
            weights=weights,
            tokens=tokens,
            sharded_fraction=0.0 if solution is None else solution.sharded_fraction,
            shards_state=any({DATA, CONTEXT} & {*axis_names(getattr(each, "axes", ()))} for each in layouts.values()),
            wire=wire,
            wire_seconds={each: sum(s for (purpose, _), s in seconds.items() if purpose == each) for each in wire},
            min_wire_seconds=max((s for (purpose, _), s in seconds.items() if purpose in _FLOORS), default=0.0),
        )

    def _itemsize(self, variable: Any) -> int:
        """Returns the bytes of an element of a variable in the dtype that layers compute in."""
        return jnp.dtype(self._compute_dtypes.get(id(variable), VariableSpec.of(variable).dtype)).itemsize

    def _kept_experts(self, candidate: Candidate, layouts: Mapping[int, Any], rows: float) -> tuple[set[int], float]:
        """Returns ids of the weights of experts that devices do not gather, and the bytes of rows sent instead."""
        kept, sent = set(), 0.0
        for mixture in self._mixtures if candidate.expert_axis else ():
            weights = [v for v in self._step.model.weights if id(v) in mixture.weights]
            sharded = [v for v in weights if candidate.expert_axis in axis_tuple(layouts[id(v)].axes[0])]
            gathered = [(math.prod(v.shape) * self._itemsize(v), id(v) in self._trained) for v in sharded]
            if row_bytes := mixture.sent_bytes(rows, gathered, candidate.regathers):
                kept |= {id(v) for v in sharded}
                sent += row_bytes
        return kept, sent


class _Payloads(NamedTuple):
    """Bytes that collectives are about, on one device.

    Weights and gradients are counted as if they were not sharded over the axes of batches.
    """

    gathered: float  # weights, but for those of experts that stay sharded
    reduced: float  # gradients of these; 0 without training, as the next two
    gradients: float  # of all weights
    updated: float  # weights as they are stored
    all_reduced: float  # for its tokens, by tensor parallelism
    activations: float  # between sharded layers, which are about half of attention's operands
    exchanged: float  # rows for experts and results, forward and backward


def _collectives(candidate: Candidate, payloads: _Payloads) -> Iterator[tuple[str, str, tuple[str, ...], float]]:
    """Yields the purpose, the kind, the axes and the payload of the collectives that a step runs at least.

    Attention's operands are taken to be exchanged by all-to-alls of queries, keys, values and outputs, forward and
    backward.
    """
    gradients = payloads.gradients
    sharing = tuple(axis for axis in (REPLICA, DATA, CONTEXT) if candidate.size(axis) > 1)
    if candidate.shards_weights:
        shards = tuple(axis for axis in sharing if axis != REPLICA)
        yield WEIGHTS, "all-gather", shards, (2 if candidate.regathers else 1) * payloads.gathered
        yield WEIGHTS, "reduce-scatter", shards, payloads.reduced
        yield WEIGHTS, "all-reduce", (REPLICA,), gradients / candidate.size(*shards)
    elif candidate.strategy == "zero1":
        yield WEIGHTS, "reduce-scatter", sharing, gradients
        yield WEIGHTS, "all-gather", sharing, payloads.updated
    else:
        yield WEIGHTS, "all-reduce", sharing, gradients
    yield SEQUENCE if candidate.sequence_parallel else TENSOR, "all-reduce", (MODEL,), payloads.all_reduced
    yield ATTENTION, "all-to-all", (CONTEXT,), 2 * payloads.activations / candidate.size(MODEL)
    yield EXPERTS, "all-to-all", (DATA,), payloads.exchanged

"""The candidates of `auto`: mesh shapes with the strategies that fit on them."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.planning.frozen_mapping import FrozenMapping
from keras_dist.steps.options import StepOptions
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.data_parallel import DataParallel
from keras_dist.strategies.derived.tensor_parallel import Solution, merged_layout_map
from keras_dist.strategies.fsdp import FullyShardedDataParallel
from keras_dist.strategies.model_parallel import ModelParallel

# The axes of candidates, outermost first: those that communicate most are on the shortest links.
REPLICA, DATA, CONTEXT, MODEL = AXES = ("replica", "data", "context", "model")

# Strategies by the name that `auto` takes, with their names in reports. Context parallelism combines with the others.
STRATEGIES = {
    "dp": "DP",
    "zero1": "ZeRO-1",
    "fsdp": "FSDP",
    "hsdp": "HSDP",
    "tp": "TP",
    "tp_sp": "TP + SP",
    "fsdp_tp": "FSDP x TP",
    "fsdp_tp_sp": "FSDP x TP + SP",
}
CONTEXT_PARALLEL = "cp"


@dataclass(frozen=True)
class Candidate:
    """A strategy on a mesh of a certain shape.

    Attributes:
        strategy: A key of `STRATEGIES`.
        axes: Sizes of the mesh axes, outermost first. Axes of size 1 are left out, but for the axis of batches.
        regathers: Whether FSDP gathers weights again for the backward pass.
        options: Step options, which its distribution has.
    """

    strategy: str
    axes: Mapping[str, int]
    regathers: bool = False
    options: StepOptions = field(default_factory=StepOptions)

    def size(self, *axes: str) -> int:
        """Returns the number of devices along some axes."""
        return math.prod(self.axes.get(axis, 1) for axis in axes)

    @property
    def shards_weights(self) -> bool:
        """Whether weights are sharded over the axes of batches (FSDP)."""
        return self.strategy.startswith(("fsdp", "hsdp"))

    @property
    def shards_state(self) -> bool:
        """Whether optimizer state is sharded over the axes of batches, at least."""
        return self.shards_weights or self.strategy == "zero1"

    @property
    def without_sharded_state(self) -> str:
        """The strategy that is the same but for sharded weights and optimizer state."""
        return {"fsdp_tp": "tp", "fsdp_tp_sp": "tp_sp"}.get(self.strategy, "dp")

    @property
    def sequence_parallel(self) -> bool:
        return self.strategy.endswith("_sp")

    @property
    def sequence_dim_name(self) -> str | None:
        return CONTEXT if CONTEXT in self.axes else None

    @property
    def communicating_less(self) -> tuple["Candidate", ...]:
        """The same without gathering again, and with batches in place of sequences sharded over the axis "context"."""
        found = [replace(self, regathers=False)] if self.regathers else []
        if CONTEXT in self.axes:
            sizes = {**self.axes, DATA: self.size(DATA, CONTEXT)}
            axes = {axis: size for axis, size in sizes.items() if axis != CONTEXT}
            found += [replace(each, axes=FrozenMapping(axes)) for each in (*found, self)]
        return tuple(found)

    @property
    def label(self) -> str:
        """The strategy as reports name it, such as "FSDP x TP + SP + CP, gathering again"."""
        context = " + CP" if self.sequence_dim_name else ""
        options = f", {self.options.text}" if self.options.text else ""
        return STRATEGIES[self.strategy] + context + ", gathering again" * self.regathers + options

    def __str__(self) -> str:
        return f"{self.label} on {spell_axes(self.axes)}"

    def distribution(self, mesh: DeviceMesh, solution: Solution | None) -> Distribution:
        """Returns the distribution on a mesh of these axes; `solution` has the rules of tensor parallelism."""
        options: Any = {} if self.sequence_dim_name is None else {"sequence_dim_name": self.sequence_dim_name}
        if self.strategy in ("dp", "zero1"):
            return DataParallel(mesh, shard_optimizer_state=self.strategy == "zero1", **options)
        options |= {"reshard_after_forward": True} if self.regathers else {}
        if self.strategy in ("fsdp", "hsdp"):
            return FullyShardedDataParallel(mesh, **options)
        assert solution is not None
        rules = solution.rules(mesh, self.sequence_parallel, (CONTEXT,) if self.sequence_dim_name else ())
        kind = FullyShardedDataParallel if self.shards_weights else ModelParallel
        return kind(layout_map=merged_layout_map(rules, mesh), **options)

    def to_source(self, distribution: Distribution, mesh: str) -> str:
        """Returns Python code that creates the distribution; `mesh` is the code that creates its mesh."""
        options = [] if self.sequence_dim_name is None else [f'sequence_dim_name="{self.sequence_dim_name}"']
        options += ["reshard_after_forward=True"] if self.regathers else []
        options += ["shard_optimizer_state=True"] if self.strategy == "zero1" else []
        options += [f"step_options=kd.{self.options}"] if self.options.text else []
        name, first, rules = type(distribution).__name__, "mesh", []
        if isinstance(distribution, ModelParallel) and (rules_of_map := distribution.layout_rules()):
            first = "layout_map=layout_map"
            rules = ["layout_map = kd.LayoutMap(mesh)"]
            rules += [f"layout_map[{pattern!r}] = {axes}" for pattern, axes in rules_of_map]
        arguments = ", ".join([first, *options])
        made = f"distribution = kd.{name}({arguments})"
        return "\n".join(["import keras_dist as kd", "", f"mesh = {mesh}", *rules, made, ""])


def enumerate_candidates(
    devices: int,
    per_network: int,
    strategies: Collection[str],
    keep: Mapping[str, int],
    length: int | None,
    model_sizes: Collection[int],
    is_training: bool = True,
) -> list[Candidate]:
    """Returns all candidates for a number of devices, simple strategies first.

    Args:
        devices: Number of devices.
        per_network: Number of devices of a slice or host. The axes "context" and "model" do not leave one.
        strategies: Names of strategies, and "cp" if sequences may be sharded.
        keep: Sizes of axes that are fixed.
        length: Length of the sequences, None if the model has none.
        model_sizes: Sizes of the axis "model" for which rules of tensor parallelism are known.
        is_training: Whether there is a backward pass, for which weights may be gathered again.
    """
    found = []
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    for context, model in itertools.product(sizes, sizes):
        if per_network % (context * model) or (model > 1 and model not in model_sizes):
            continue
        if context > 1 and (length is None or length % context or CONTEXT_PARALLEL not in strategies):
            continue
        networks = keep.get(REPLICA, devices // per_network)
        for candidate in _on_axes(devices // (context * model), networks, context, model):
            is_kept = all(candidate.axes.get(axis, 1) == size for axis, size in keep.items())
            if candidate.strategy in strategies and is_kept and (is_training or not candidate.regathers):
                found.append(candidate)
    return sorted(found, key=_simplest_first)


def _on_axes(rest: int, networks: int, context: int, model: int) -> Iterator[Candidate]:
    """Yields the candidates with certain sizes of the axes "context" and "model", and `rest` devices for the others.

    With several slices or hosts (`networks`), HSDP has a replica for each of them.
    """

    def candidate(strategy: str, replicas: int = 1, regathers: bool = False) -> Candidate:
        sizes = zip(AXES, (replicas, rest // replicas, context, model), strict=True)
        axes = {axis: size for axis, size in sizes if size > 1 or axis == DATA}
        return Candidate(strategy, FrozenMapping(axes), regathers)

    again = (False, True)
    shards_weights = rest * context > 1
    if model == 1:
        yield candidate("dp")
        if rest > 1:
            yield candidate("zero1")
        if shards_weights:
            yield from (candidate("fsdp", regathers=each) for each in again)
    else:
        yield from map(candidate, ("tp", "tp_sp"))
        if shards_weights:
            yield from (candidate(name, regathers=each) for name in ("fsdp_tp", "fsdp_tp_sp") for each in again)
    for replicas in range(2, rest):
        if rest % replicas == 0 and (replicas == networks or (networks == context == model == 1)):
            names = ("hsdp",) if model == 1 else ("fsdp_tp", "fsdp_tp_sp")
            yield from (candidate(name, replicas, each) for name in names for each in again)


def _simplest_first(candidate: Candidate) -> tuple:
    order: Sequence[str] = list(STRATEGIES)
    others = [candidate.size(axis) for axis in (CONTEXT, MODEL, REPLICA)]
    return order.index(candidate.strategy), candidate.regathers, *others

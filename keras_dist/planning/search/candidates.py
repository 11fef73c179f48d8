"""The candidates of `auto`: mesh shapes with the strategies that fit on them."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.planning.frozen_mapping import FrozenMapping
from keras_dist.steps.options import StepOptions
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.data_parallel import DataParallel
from keras_dist.strategies.derived.merged_rules import merged_layout_map
from keras_dist.strategies.derived.tensor_parallel import Solution
from keras_dist.strategies.fsdp import FullyShardedDataParallel
from keras_dist.strategies.model_parallel import ModelParallel

# The axes of candidates, outermost first: those that communicate most are on the shortest links.
REPLICA, DATA, CONTEXT, MODEL = AXES = ("replica", "data", "context", "model")

# Strategies by the name that `auto` takes, with their names in reports. Context parallelism combines with all of them,
# expert parallelism with FSDP and HSDP.
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
CONTEXT_PARALLEL, EXPERT_PARALLEL = COMBINED = ("cp", "ep")
_SHARDING_WEIGHTS = ("fsdp", "hsdp")


@dataclass(frozen=True)
class Candidate:
    """A strategy on a mesh of a certain shape."""

    strategy: str  # a key of `STRATEGIES`
    axes: FrozenMapping  # sizes of mesh axes, outermost first, without those of size 1 but for that of batches
    regathers: bool = False  # whether FSDP gathers weights again for the backward pass
    expert_axis: str | None = None  # the axis of batches over which FSDP shards experts, too
    options: StepOptions = field(default_factory=StepOptions)  # of its distribution

    def size(self, *axes: str) -> int:
        """Returns the number of devices along some axes."""
        return math.prod(self.axes.get(axis, 1) for axis in axes)

    @property
    def shards_weights(self) -> bool:
        """Whether weights are sharded over the axes of batches (FSDP)."""
        return self.strategy.startswith(_SHARDING_WEIGHTS)

    @property
    def sequence_parallel(self) -> bool:
        return self.strategy.endswith("_sp")

    @property
    def communicating_less(self) -> tuple["Candidate", ...]:
        """The same without gathering again, and with batches in place of sequences sharded over the axis "context"."""
        found = [replace(self, regathers=False)] if self.regathers else []
        if CONTEXT in self.axes:
            sizes = {**self.axes, DATA: self.size(DATA, CONTEXT)}
            axes = FrozenMapping({axis: size for axis, size in sizes.items() if axis != CONTEXT})
            found += [replace(each, axes=axes) for each in (*found, self)]
        return tuple(found)

    @property
    def label(self) -> str:
        """The strategy as reports name it, such as "FSDP x TP + SP + CP, gathering again"."""
        strategy = STRATEGIES[self.strategy] + " + CP" * (CONTEXT in self.axes) + " + EP" * bool(self.expert_axis)
        return ", ".join(filter(None, [strategy, "gathering again" * self.regathers, self.options.text]))

    def __str__(self) -> str:
        return f"{self.label} on {spell_axes(self.axes)}"

    @property
    def _arguments(self) -> dict[str, Any]:
        """Arguments of its distribution, besides the mesh, the layout map and the step options."""
        arguments: dict[str, Any] = {"sequence_dim_name": CONTEXT} if CONTEXT in self.axes else {}
        arguments |= {"expert_dim_name": self.expert_axis} if self.expert_axis else {}
        arguments |= {"reshard_after_forward": True} if self.regathers else {}
        return arguments | ({"shard_optimizer_state": True} if self.strategy == "zero1" else {})

    def distribution(self, mesh: DeviceMesh, solution: Solution | None) -> Distribution:
        """Returns the distribution on a mesh of these axes; `solution` has the rules of tensor parallelism."""
        if self.strategy in ("dp", "zero1"):
            return DataParallel(mesh, **self._arguments)
        if self.strategy in ("fsdp", "hsdp"):
            return FullyShardedDataParallel(mesh, **self._arguments)
        assert solution is not None
        rules = solution.rules(mesh, self.sequence_parallel, (CONTEXT,) if CONTEXT in self.axes else ())
        kind = FullyShardedDataParallel if self.shards_weights else ModelParallel
        return kind(layout_map=merged_layout_map(rules, mesh, solution.model_name), **self._arguments)

    def to_source(self, distribution: Distribution, mesh: str) -> str:
        """Returns Python code that creates the distribution; `mesh` is the code that creates its mesh."""
        arguments = [f"{name}={value!r}".replace("'", '"') for name, value in self._arguments.items()]
        arguments += [f"step_options=kd.{self.options}"] if self.options.text else []
        first, rules = "mesh", []
        if layout_rules := distribution.layout_rules():
            first = "layout_map=layout_map"
            rules = ["layout_map = kd.LayoutMap(mesh)"]
            rules += [f"layout_map[{pattern!r}] = {axes}" for pattern, axes in layout_rules]
        made = f"distribution = kd.{type(distribution).__name__}({', '.join([first, *arguments])})"
        return "\n".join(["import keras_dist as kd", "", f"mesh = {mesh}", *rules, made, ""])


def enumerate_candidates(
    devices: int,
    per_network: int,
    strategies: Collection[str],
    keep: Mapping[str, int],
    length: int | None,
    model_sizes: Collection[int],
    is_training: bool = True,
    num_experts: int = 0,
) -> list[Candidate]:
    """Returns all candidates for a number of devices, simple strategies first.

    The axes "context" and "model" do not leave a slice or host, which has `per_network` devices. They have sizes that
    divide the length of the sequences, if the model has any, and for which rules of tensor parallelism are known. The
    axes of expert parallelism divide `num_experts`, which is 0 for a model without mixtures of experts.
    """
    found = []
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for context, model in itertools.product(divisors, divisors):
        if per_network % (context * model) or (model > 1 and model not in model_sizes):
            continue
        if context > 1 and (length is None or length % context or CONTEXT_PARALLEL not in strategies):
            continue
        rest, networks = devices // (context * model), keep.get(REPLICA, devices // per_network)
        for strategy, replicas in _strategies_on(rest, networks, context, model):
            sizes = zip(AXES, (replicas, rest // replicas, context, model), strict=True)
            axes = FrozenMapping({axis: size for axis, size in sizes if size > 1 or axis == DATA})
            if strategy in strategies and all(axes.get(axis, 1) == size for axis, size in keep.items()):
                # Without a backward pass, there is nothing to gather weights again for.
                again = (False, True) if is_training and strategy.startswith(_SHARDING_WEIGHTS) else (False,)
                # An expert axis of its own, or one that shards sequences or weights, too, is left to users.
                has_experts = EXPERT_PARALLEL in strategies and num_experts and num_experts % axes[DATA] == 0
                can_share = has_experts and strategy in ("fsdp", "hsdp") and CONTEXT not in axes
                shared = (None, DATA) if can_share else (None,)
                found += [Candidate(strategy, axes, *each) for each in itertools.product(again, shared)]
    order = list(STRATEGIES)

    def simplicity(each: Candidate) -> tuple:
        sizes = map(each.size, (CONTEXT, MODEL, REPLICA))
        return order.index(each.strategy), each.regathers, each.expert_axis is not None, *sizes

    return sorted(found, key=simplicity)


def _strategies_on(rest: int, networks: int, context: int, model: int) -> Iterator[tuple[str, int]]:
    """Yields strategies with numbers of replicas, for sizes of the axes "context" and "model".

    The other axes have `rest` devices. With several slices or hosts (`networks`), HSDP has a replica for each of them.
    """
    sharding = ("fsdp_tp", "fsdp_tp_sp") if model > 1 else ("fsdp",)
    names = ("tp", "tp_sp") if model > 1 else ("dp", "zero1") if rest > 1 else ("dp",)
    yield from ((name, 1) for name in (*names, *(sharding if rest * context > 1 else ())))
    for replicas in range(2, rest):
        if rest % replicas == 0 and (replicas == networks or (networks == context == model == 1)):
            yield from ((name, replicas) for name in (sharding if model > 1 else ("hsdp",)))

"""The program of a step, and what passes want to know of it: which axes of the mesh shard the dims of its values."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
from jax.lax import with_sharding_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.mixtures.recognition import MixtureCall
from keras_dist.passes.token_part import LossCall
from keras_dist.tracing.jaxpr_dims import read_dims
from keras_dist.tracing.jaxpr_evaluation import shape_of

DimAxes = Sequence[tuple[str, ...]]
"""The axes of the mesh over which each dim of a value is sharded; `()` for an unsharded dim."""


@dataclass(frozen=True)
class StepProgram:
    """A traced function of a model, or what a whole step computes with its gradients."""

    jaxpr: ClosedJaxpr
    placer: BatchPlacer  # places batches on the mesh
    row_axes: tuple[str, ...]  # over which the rows of the batch are split
    input_axes: Sequence[DimAxes]  # of each input
    num_trained: int = 0  # the leading inputs that have gradients
    num_state: int = 0  # the leading inputs that are state; the others are arrays of a batch
    expert_axes: tuple[str, ...] = ()  # over which experts are sharded, and tokens, too
    mixtures: list[MixtureCall] = field(default_factory=list)  # filled with those that are found
    figures: list[str] | None = None  # if wanted, filled with the names of figures, which follow the program's outputs
    expert_capacity: float | None = None  # that of the options, in a train step
    loss_chunk: int | None = None  # that of the options
    losses: list[LossCall] = field(default_factory=list)  # filled with those that are found
    token_dims: dict[Any, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    """Of variables with tokens that each device has flattened: their dim and its axes. Filled by a pass."""
    is_trained: bool = False  # whether it is that of a train step
    _found: dict[Any, Any] = field(default_factory=dict, init=False)

    @property
    def mesh(self) -> Mesh:
        return self.placer.device_mesh.backend_mesh

    @property
    def device(self) -> Any:
        """One of the devices that the program is compiled for, attached or not."""
        return self.mesh.devices.flat[0]

    def num_shards(self, axes: Collection[str]) -> int:
        return math.prod(self.mesh.shape[name] for name in axes)

    def found(self, find: Callable[[Jaxpr], Any]) -> Any:
        """Returns what a function of the open jaxpr finds. It is called once."""
        if find not in self._found:
            self._found[find] = find(self.jaxpr.jaxpr)
        return self._found[find]

    def axes_of(self, variable: Any) -> DimAxes:
        """Returns the axes of each dim of a value, as they follow from those of the inputs.

        A dim of which nothing is known has none, so a value may be sharded over more axes than these. Positions
        that an operation computes along others, such as those after a convolution, are positions too.
        """
        nodes = () if isinstance(variable, Literal) else self._graph.find(self._graph.dims.get(variable, ()))
        nodes = nodes or (None,) * len(shape_of(variable))
        found: list[tuple[str, ...]] = []
        for node in nodes:
            names = () if node is None else self._axes_of_nodes.get(node, ())
            found.append(() if any(set(names).intersection(other) for other in found) else names)
        if variable in self.token_dims:
            dim, found_axes = self.token_dims[variable]
            found[dim] = found_axes
        return found

    def sequences_sharded(self, equation: Any, result: Any) -> Any:
        """Shards the positions of an operation's result over the sequence axes, after they were gathered for it."""
        axes = self.placer.sequence_axes
        if not axes or self.partitioned_mesh(equation) is not self.mesh:
            return result
        sharded = [
            axes if names == axes and size >= self.placer.num_sequence_shards else PartitionSpec.UNCONSTRAINED
            for names, size in zip(self.axes_of(equation.outvars[0]), result.shape, strict=True)
        ]
        return with_sharding_constraint(result, NamedSharding(self.mesh, PartitionSpec(*sharded)))

    @cached_property
    def _graph(self) -> Any:
        return read_dims(self.jaxpr, 1, num_trained=0)

    @cached_property
    def _axes_of_nodes(self) -> dict[int, tuple[str, ...]]:
        axes: dict[int, tuple[str, ...]] = {}
        for dims, axes_of_dims in zip(self._graph.inputs, self.input_axes, strict=True):
            for node, names in zip(self._graph.find(dims), axes_of_dims, strict=False):
                if node is not None and names:
                    axes.setdefault(node, names)
        for pair in self._graph.successors:
            before, after = self._graph.find(pair)
            if axes.get(before) == self.placer.sequence_axes and after is not None:
                axes.setdefault(after, axes[before])
        return axes

    def partitioned_mesh(self, equation: Any) -> Mesh | AbstractMesh | None:
        """Returns the mesh over which XLA partitions an operation; None in a `jax.shard_map` of all axes."""
        if not equation.invars:
            return self.mesh
        inner = equation.invars[0].aval.sharding.mesh
        if not inner.manual_axes:
            return self.mesh
        return None if {*inner.manual_axes} == {*inner.axis_names} else inner


def batch_axes(leaf: Any, rows: int, row_axes: tuple[str, ...], placer: BatchPlacer) -> DimAxes:
    """Returns the axes of the dims of an array of a batch, whose rows are split over `row_axes`."""
    positions = placer.sequence_axes if placer.is_sequence(leaf.shape) else ()
    axes = [row_axes if leaf.shape and leaf.shape[0] == rows else (), positions, *[()] * leaf.ndim]
    return axes[: leaf.ndim]

"""`FullyShardedDataParallel`: weights, gradients and optimizer state are sharded over the batch axes."""

import numbers
from typing import Any

import jax
import keras

from keras_dist._keras import internals
from keras_dist.layout.layout_map import LayoutMap
from keras_dist.layout.rule_matching import is_for_activations
from keras_dist.layout.tensor_layout import TensorLayout, axis_names, axis_tuple
from keras_dist.mesh.device_mesh import create_device_mesh
from keras_dist.sharding.shard_dim import MIN_SHARD_BYTES, shard_one_more_dim
from keras_dist.steps.options import StepOptions
from keras_dist.strategies.base import BatchDimName
from keras_dist.strategies.model_parallel import ModelParallel

# The states of recurrent layers, and the statistics of `Normalization`: Keras reads them beside a step's state, and JAX
# refuses programs with constants that are sharded over processes.
_READ_AS_CONSTANTS = {"rnn_state", "mean", "variance"}


class FullyShardedDataParallel(ModelParallel):
    """Shards the batch, and with it every weight, its gradient and its optimizer state (FSDP, ZeRO-3).

    Each device stores one shard of each weight. A layer all-gathers a weight as it reads it, in the dtype that it
    computes in; its gradient is reduce-scattered to the shards. On a mesh with a second axis for replicas (HSDP),
    weights are gathered within a shard group only, and the gradients of a shard are all-reduced between the replicas.

    With a layout map, it shards the dims that the map leaves unsharded, and gathers only over its own axis. This is
    FSDP x tensor parallelism, for example with the rules of `tensor_parallel_layout_map`.

    A weight stays replicated if it is no larger than `min_shard_bytes`, if the axis divides none of its dims, or if it
    is the state of a random generator.

    With `expert_dim_name`, dim 0 of weights with three or more dims is sharded over the expert axes first, as that of
    experts. Other layers gather such a weight as any other.

    Args:
        device_mesh: The mesh. By default that of the layout map, or one axis "fsdp" over all devices.
        layout_map: Rules for weights that other axes shard, and for inputs and outputs of layers.
        shard_axis: The mesh axis, or axes, to shard weights over. By default the last one that no rule for a weight
            uses, and those of `sequence_dim_name` and `expert_dim_name`.
        replica_axis: The mesh axis, or axes, of the replicas (HSDP). By default, if `shard_axis` is not passed either,
            the other axis that no rule for a weight uses, if there is one.
        min_shard_bytes: Weights of which a device would store at most this many bytes without FSDP stay replicated.
            Below about 64 KiB, the default, the messages cost more than the memory is worth.
        reshard_after_forward: Whether to free gathered weights after the forward pass and gather them again for the
            backward pass: more traffic, less memory. By default they are kept until the backward pass has used them.
        auto_shard_dataset: As for `ModelParallel`.
        strict: As for `ModelParallel`.
        sequence_dim_name: The mesh axis, or axes, that dim 1 of a batch, the sequence, is sharded over (context
            parallelism). Weights may be sharded over it, too, since its devices compute with the same weights.
        sequence_exchange: As for `ModelParallel`.
        expert_dim_name: The mesh axis, or axes, that experts are sharded over (expert parallelism), as for
            `ModelParallel`, but no rules are needed. It must be among those of `shard_axis`, or in rules for weights.
        step_options: As for `ModelParallel`.

    Raises:
        ValueError: An axis that the mesh does not have or that a rule for a weight uses, a mesh whose axes leave open
            which one to shard over, an expert axis that shards no weights, or a negative `min_shard_bytes`. When a
            step is traced: an expert axis that does not divide the number of experts, or under which no mixture of
            experts is found.

    Example:

    >>> distribution = FullyShardedDataParallel()
    >>> with distribution.scope():
    ...     dense = keras.layers.Dense(256)
    ...     dense.build((None, 512))
    >>> dense.kernel.value.sharding.shard_shape(dense.kernel.shape)
    (64, 256)

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023; Xu et al.,
    "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020.
    """

    def __init__(
        self,
        device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh | None = None,
        *,
        layout_map: keras.distribution.LayoutMap | None = None,
        shard_axis: BatchDimName = None,
        replica_axis: BatchDimName = None,
        min_shard_bytes: int = MIN_SHARD_BYTES,
        reshard_after_forward: bool = False,
        auto_shard_dataset: bool = True,
        strict: bool = False,
        sequence_dim_name: BatchDimName = None,
        sequence_exchange: str | None = None,
        expert_dim_name: BatchDimName = None,
        step_options: StepOptions | None = None,
    ):
        if layout_map is None:
            mesh = create_device_mesh((-1,), axis_names=["fsdp"]) if device_mesh is None else device_mesh
            layout_map = LayoutMap(mesh)
        if not isinstance(min_shard_bytes, numbers.Real):
            raise TypeError(f"min_shard_bytes={min_shard_bytes!r} must be a number of bytes, for example 2**16.")
        if not min_shard_bytes >= 0:  # NaN is not, either
            raise ValueError(f"min_shard_bytes={min_shard_bytes!r} must be at least 0, which shards all weights.")
        layout_map, _ = self._map_and_mesh(layout_map, device_mesh)
        replica_axes, shard_axes = _replica_and_shard_axes(
            layout_map, shard_axis, replica_axis, sequence_dim_name, expert_dim_name
        )
        super().__init__(
            layout_map=layout_map,
            batch_dim_name=tuple(n for n in replica_axes + shard_axes if n not in axis_tuple(sequence_dim_name)),
            auto_shard_dataset=auto_shard_dataset,
            device_mesh=device_mesh,
            strict=strict,
            sequence_dim_name=sequence_dim_name,
            sequence_exchange=sequence_exchange,
            expert_dim_name=expert_dim_name,
            step_options=step_options,
        )
        self._shard_axes, self._min_shard_bytes = shard_axes, min_shard_bytes
        self.reshard_after_forward = reshard_after_forward

    def get_compute_layout(self, variable) -> TensorLayout:
        """Returns the layout in which layers compute with a variable: that of the layout map."""
        return self._layout_by_rule(variable)

    @property
    def lacks_rule_for_experts(self) -> bool:
        return False

    def _stored_layout(self, variable) -> TensorLayout:
        layout, prefers_columns = self._layout_by_rule(variable), internals.is_embedding_table(variable.path)
        if variable.path.rpartition("/")[2] in _READ_AS_CONSTANTS:
            return layout
        named = axis_tuple(self.expert_dim_name)
        by_rule = [name for name in axis_names(layout.axes) if name in named]
        axes = [name for name in self._shard_axes if name not in by_rule]
        expert_axes, others = [[n for n in axes if (n in named) == is_named] for is_named in (True, False)]

        def shard(layout: TensorLayout, axes: list[str], min_bytes: int, **options: Any) -> TensorLayout:
            return shard_one_more_dim(layout, variable, axes, self._device_mesh, min_bytes, **options)

        if expert_axes and len(variable.shape) > 2:  # these may be experts
            for first, then in (([*expert_axes, *others], []), (expert_axes, others)):
                if (sharded := shard(layout, first, self._min_shard_bytes, dims=[0])) != layout:
                    return shard(sharded, then, 0)
        return shard(layout, axes, self._min_shard_bytes, prefers_columns=prefers_columns)


def _replica_and_shard_axes(
    layout_map: LayoutMap,
    shard_axis: BatchDimName,
    replica_axis: BatchDimName,
    sequence_dim_name: BatchDimName,
    expert_dim_name: BatchDimName,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    mesh = layout_map.device_mesh
    sizes = {} if mesh is None else mesh.axis_sizes
    weight_rules = [layout for key, layout in layout_map.items() if not is_for_activations(key)]
    used = {name for layout in weight_rules for name in axis_names(layout.axes)}
    replica_axes, shard_axes = axis_tuple(replica_axis), axis_tuple(shard_axis)
    expert_axes = [name for name in axis_tuple(expert_dim_name) if name in sizes]
    if not shard_axes:
        named = dict.fromkeys((*axis_tuple(sequence_dim_name), *expert_axes))
        named_axes = tuple(name for name in named if name in sizes and name not in replica_axes)
        free = [name for name in sizes if name not in {*used, *replica_axes, *named_axes}]
        if (not free and not named_axes) or len(free) > 2:
            raise ValueError(
                f"FullyShardedDataParallel cannot choose an axis to shard weights over: of the mesh's axes {sizes}, "
                f"{len(free)} are free, and rules for weights use {sorted(used)}. "
                + ("Pass shard_axis, and replica_axis for HSDP." if free else "Add an axis to the mesh.")
            )
        shard_axes = (*free[-1:], *named_axes)
        if not replica_axes and len(free) == 2:
            replica_axes = (free[0],)
    axes = (*replica_axes, *shard_axes)
    for name in axes:
        if name not in sizes:
            fault = f"the mesh has the axes {list(sizes)}"
        elif name in used and name not in expert_axes:
            fault = "a rule for a weight uses it"
        elif axes.count(name) > 1:
            fault = "it is named twice"
        else:
            continue
        raise ValueError(
            f"FullyShardedDataParallel cannot use axis {name!r}: {fault}. Got shard_axis={shard_axis!r} and "
            f"replica_axis={replica_axis!r}. Pass other axes, or neither argument."
        )
    if left_out := [name for name in expert_axes if name not in {*shard_axes, *used}]:
        raise ValueError(
            f"FullyShardedDataParallel shards weights over {shard_axes}, which lacks the axis {left_out[0]!r} of "
            f"expert_dim_name={expert_dim_name!r}. Got shard_axis={shard_axis!r} and replica_axis={replica_axis!r}. "
            f"Add {left_out[0]!r} to shard_axis, or pass neither argument."
        )
    return replica_axes, shard_axes

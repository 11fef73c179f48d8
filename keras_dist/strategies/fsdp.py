"""`FullyShardedDataParallel`: weights, gradients and optimizer state are sharded over the batch axes."""

import jax
import keras

from keras_dist._keras import internals
from keras_dist.layout.layout_map import LayoutMap, as_layout_map
from keras_dist.layout.tensor_layout import TensorLayout, axis_tuple
from keras_dist.mesh.device_mesh import create_device_mesh
from keras_dist.strategies.base import BatchDimName
from keras_dist.strategies.model_parallel import ModelParallel
from keras_dist.strategies.shard_dim import SMALL, sharded_further
from keras_dist.variables.variable_layouts import VariableSpec


class FullyShardedDataParallel(ModelParallel):
    """Shards the batch, and with it every weight, its gradient and its optimizer state (FSDP, ZeRO-3).

    Each device keeps one part of each weight. A layer gathers a weight as it reads it, in the dtype that it computes
    in, and its gradient is reduced and scattered to where the parts lie. On a mesh with a second axis for replicas
    (HSDP) weights travel within a shard group only, and gradients of a part are reduced between the replicas.

    With a layout map it shards what the map leaves free. What the map shards stays so where layers compute: FSDP x
    tensor parallelism, for example with `tensor_parallel_layout_map`.

    Args:
        device_mesh: the mesh. By default that of the layout map, or one axis, "fsdp", over all devices.
        layout_map: rules for weights that other axes shard, and for inputs and outputs of layers.
        shard_axis: the mesh axis to shard weights over, or several. By default the last one that no rule for a weight
            uses.
        replica_axis: the mesh axis, or axes, of the replicas (HSDP). Where neither axis is given, the one before the
            shard axis, if there is one.
        min_shard_bytes: a weight of which a device would hold no more than this many bytes stays as it is.
        reshard_after_forward: whether gathered weights are dropped after the forward pass and gathered again for the
            backward pass: more traffic, less memory. By default they stay until the backward pass has used them.
        auto_shard_dataset: with several processes, whether each is passed the whole dataset and takes its own part.
        strict: as of `ModelParallel`.

    Raises:
        ValueError: axes that the mesh does not have, that a rule for a weight uses, or that are not clear.

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
        min_shard_bytes: int = SMALL,
        reshard_after_forward: bool = False,
        auto_shard_dataset: bool = True,
        strict: bool = False,
    ):
        if layout_map is None:
            mesh = create_device_mesh((-1,), axis_names=["fsdp"]) if device_mesh is None else device_mesh
            layout_map = LayoutMap(mesh)
        layout_map = as_layout_map(layout_map)
        replicas, shards = _data_axes(layout_map, shard_axis, replica_axis)
        super().__init__(
            layout_map=layout_map,
            batch_dim_name=replicas + shards,
            auto_shard_dataset=auto_shard_dataset,
            device_mesh=device_mesh,
            strict=strict,
        )
        self._shard_axes, self._min_shard_bytes = shards, min_shard_bytes
        self.reshard_after_forward = reshard_after_forward

    def get_compute_layout(self, variable) -> TensorLayout:
        """Returns the layout in which layers compute with a variable: what the rules of the layout map say.

        Args:
            variable: a `keras.Variable`.

        Returns:
            The layout.
        """
        return self._by_rule(variable)

    def regathers_weights(self, layer: keras.Layer) -> bool:
        """Returns whether a layer's gathered weights are dropped after the forward pass and gathered again."""
        if not self.reshard_after_forward:
            return False
        specs = map(VariableSpec.of, internals.own_variables(layer))
        return any(self._stored(spec) != self.get_compute_layout(spec) for spec in specs)

    def _stored(self, variable) -> TensorLayout:
        layout = self._by_rule(variable)
        return sharded_further(layout, variable, self._shard_axes, self._device_mesh, small=self._min_shard_bytes)


def _data_axes(
    layout_map: LayoutMap, shard_axis: BatchDimName, replica_axis: BatchDimName
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes of the replicas and those of the shards."""
    mesh = layout_map.device_mesh
    sizes = {} if mesh is None else mesh.axis_sizes
    of_weights = [layout for pattern, layout in layout_map.items() if not pattern.endswith(("/input", "/output"))]
    taken = {name for layout in of_weights for entry in layout.axes for name in axis_tuple(entry)}
    replicas, shards = _names(replica_axis), _names(shard_axis)
    if not shards:
        free = [name for name in sizes if name not in taken and name not in replicas]
        shards = tuple(free[-1:])
        if not replicas and len(free) == 2:
            replicas = (free[0],)
        if len(free) > 2 or not free:
            raise ValueError(
                "Weights are sharded over an axis that no rule for a weight uses, and replicated over another one at "
                f"most. Received: a mesh with the axes {sizes}, of which rules use {sorted(taken)}. Pass shard_axis, "
                "and replica_axis for HSDP."
            )
    wrong = [name for name in (*replicas, *shards) if name not in sizes or name in taken]
    if wrong or set(replicas) & set(shards):
        raise ValueError(
            "The axes of shards and of replicas are different ones of the mesh, and no rule for a weight uses them. "
            f"Received: shard_axis={shard_axis!r}, replica_axis={replica_axis!r}, a mesh with the axes {sizes}, of "
            f"which rules use {sorted(taken)}. Name other axes, or leave both out."
        )
    return replicas, shards


def _names(axes: BatchDimName) -> tuple[str, ...]:
    return axis_tuple(axes if isinstance(axes, (str, type(None))) else tuple(axes))

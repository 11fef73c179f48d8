"""Ready distributions: `DataParallel`, `ModelParallel` and `FullyShardedDataParallel`."""

import warnings
import weakref
from typing import Any

import jax
import keras
import numpy as np

from keras_dist import keras_seam
from keras_dist.distribution import BatchDimName, Distribution
from keras_dist.layout import TensorLayout, axis_tuple
from keras_dist.layout_map import LayoutMap, Rule, as_layout_map
from keras_dist.mesh import DeviceMesh, as_mesh_of_layers, create_device_mesh
from keras_dist.placement import VariableSpec
from keras_dist.shard_choice import SMALL, sharded_further


class DataParallel(Distribution, keras.distribution.DataParallel):
    """Replicates every variable and shards the batch.

    Args:
        device_mesh: a 1-d mesh. Of a mesh with several axes the first is used, with a warning.
        devices: the devices of a 1-d mesh, where no mesh is given. By default all of them.
        auto_shard_dataset: with several processes, whether each is passed the whole dataset and takes its own part.
        shard_optimizer_state: whether each device keeps and updates its part of the optimizer's state only (ZeRO-1).
            Gradients then travel in a reduce-scatter, and new weights in an all-gather, in place of one all-reduce.

    Raises:
        ValueError: both a mesh and devices, an empty list of devices, or no mesh.

    Example:

    >>> DataParallel(devices=["cpu:0", "cpu:1"])
    <DataParallel device_mesh=<DeviceMesh batch:2 on 2 of 8 cpu devices>>

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (P_os).
    """

    def __init__(
        self,
        device_mesh=None,
        devices=None,
        auto_shard_dataset: bool = True,
        *,
        shard_optimizer_state: bool = False,
    ):
        if device_mesh is not None and devices is not None:
            raise ValueError(
                "DataParallel takes a mesh or devices, not both. Received: "
                f"device_mesh={device_mesh}, devices={devices}. Leave one of them out."
            )
        if device_mesh is None:
            if devices is not None and np.size(devices) == 0:
                raise ValueError(
                    "DataParallel needs at least one device. Received: devices=[]. Leave `devices` out for all of them."
                )
            names = [keras_seam.DEFAULT_BATCH_DIM_NAME]
            if devices is None:
                device_mesh = create_device_mesh((-1,), axis_names=names)
            else:
                device_mesh = DeviceMesh(np.shape(devices), names, devices)
        device_mesh = as_mesh_of_layers(device_mesh)
        first_axis = device_mesh.axis_names[0]
        if device_mesh.devices.ndim != 1:
            warnings.warn(
                f"Expect the input mesh to be 1D, but received {device_mesh}. The first axis, {first_axis!r}, will be "
                "used for data-parallel sharding; along the others every device computes the same. To shard the "
                "batch over several axes, use ModelParallel(layout_map=LayoutMap(mesh), batch_dim_name=(...)).",
                stacklevel=2,
            )
        super().__init__(device_mesh, first_axis, auto_shard_dataset)
        self._shard_optimizer_state = shard_optimizer_state

    def get_update_layout(self, variable) -> TensorLayout:
        """Returns the layout of a variable's gradient, and of what an optimizer keeps for the variable.

        Args:
            variable: a `keras.Variable`.

        Returns:
            The layout in which the variable lies; with `shard_optimizer_state` one that shards a dim of it over the
            batch axis, where a dim divides and the variable is not small.
        """
        layout = self.get_variable_layout(variable)
        if not self._shard_optimizer_state:
            return layout
        return sharded_further(layout, variable, self._placer.batch_axes, self._device_mesh)


class ModelParallel(Distribution, keras.distribution.ModelParallel):
    """Shards variables as the rules of a layout map say, and the batch.

    Args:
        layout_map: the rules. A variable that none matches is replicated.
        batch_dim_name: the mesh axis that the batch is sharded over, or a tuple of several. By default the mesh's
            first axis.
        auto_shard_dataset: with several processes, whether each is passed the whole dataset and takes its own part.
        device_mesh: taken for programs that pass it; the mesh is that of the layout map, and must be this one.
        strict: whether rules that match nothing, and weights that are replicated though an axis is meant for
            sharding them, are an error before the first step. By default a `LayoutMapWarning` says so once.

    Raises:
        ValueError: no layout map, one without a mesh, or a batch axis that the mesh does not have.

    Example:

    >>> layout_map = LayoutMap(DeviceMesh((2, 4), ["data", "model"]))
    >>> layout_map["dense.*/kernel"] = (None, "model")
    >>> distribution = ModelParallel(layout_map=layout_map, batch_dim_name="data")
    >>> with distribution.scope():
    ...     dense = keras.layers.Dense(8, name="dense")
    ...     dense.build((None, 16))
    >>> dense.kernel.value.sharding.shard_shape(dense.kernel.shape)
    (16, 2)
    """

    def __init__(
        self,
        *,
        layout_map=None,
        batch_dim_name: BatchDimName = None,
        auto_shard_dataset: bool = True,
        device_mesh=None,
        strict: bool = False,
    ):
        if layout_map is None:
            raise ValueError("You must specify a layout_map argument. Received: None. Make one with LayoutMap(mesh).")
        layout_map = as_layout_map(layout_map)
        mesh = layout_map.device_mesh
        if mesh is None or (device_mesh is not None and as_mesh_of_layers(device_mesh) != mesh):
            raise ValueError(
                f"ModelParallel lies on the mesh of its layout map. Received: layout_map.device_mesh={mesh}, "
                f"device_mesh={device_mesh}. Make the map with LayoutMap(device_mesh)."
            )
        super().__init__(mesh, mesh.axis_names[0] if batch_dim_name is None else batch_dim_name, auto_shard_dataset)
        self._layout_map = layout_map
        self._strict = strict
        self._checked: weakref.WeakKeyDictionary[keras.Model, Any] = weakref.WeakKeyDictionary()
        replicas = self.num_model_replicas
        if self._num_processes > replicas and self._num_processes % replicas:
            raise ValueError(
                "If `num_processes` is greater than `num_model_replicas`, `num_processes` must be divisible by "
                f"`num_model_replicas`. Received: num_processes={self._num_processes}, num_model_replicas={replicas}, "
                f"the product of the batch axes {self._placer.batch_axes}. Choose a mesh where it divides."
            )

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Returns the layout that the rules give a layer's inputs or outputs, None to leave them to the compiler.

        Of several tensors that the layer returns, or is called with by position, each is given the layout that has
        at least as many dims.

        Args:
            path: the path of the layer with `/input` or `/output` behind it.

        Returns:
            The layout, or None.

        Raises:
            ValueError: several rules match.
        """
        return self._layout_map[path]

    def rule(self, path: str) -> Rule | None:
        """Returns the rule of the layout map for the path of a variable, None where it is replicated.

        Args:
            path: the path of a variable.

        Returns:
            The key of the layout map and its layout, or None.

        Raises:
            ValueError: several rules match.
        """
        return self._layout_map.rule(path)

    def _check_rules(self, model) -> None:
        from keras_dist.guard import check_rules  # which explains models under distributions

        rules = [(pattern, layout.axes) for pattern, layout in self._layout_map.items()]
        state = len(model.variables), rules  # LoRA adds variables later, and users add rules
        if self._checked.get(model) != state:
            check_rules(model, self, self._strict)
            self._checked[model] = state


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

    def _regathers(self, layer) -> bool:
        if not self.reshard_after_forward:
            return False
        specs = map(VariableSpec.of, keras_seam.own_variables(layer))
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

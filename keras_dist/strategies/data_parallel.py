"""`DataParallel`: every device holds the whole model and computes with its shard of the batch."""

import warnings

import keras
import numpy as np

from keras_dist._keras import internals
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.mesh.device_mesh import DeviceMesh, as_mesh_of_layers, create_device_mesh
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.shard_dim import sharded_further


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

    >>> DataParallel(devices=jax.devices()[:2])
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
            names = [internals.DEFAULT_BATCH_DIM_NAME]
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

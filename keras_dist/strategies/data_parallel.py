"""`DataParallel`: every device holds all weights and computes with its shard of the batch."""

from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_dist._keras import internals
from keras_dist._report.user_warnings import warn
from keras_dist.layout.tensor_layout import TensorLayout, axis_tuple
from keras_dist.mesh.device_mesh import DeviceMesh, as_auto_mesh, create_device_mesh
from keras_dist.sharding.shard_dim import shard_one_more_dim
from keras_dist.steps.options import StepOptions
from keras_dist.strategies.base import BatchDimName, Distribution


class DataParallel(Distribution, keras.distribution.DataParallel):
    """Replicates every variable and shards the batch.

    Args:
        device_mesh: A 1-d mesh. The first axis of a mesh with several axes is used, with a warning.
        devices: The devices of a 1-d mesh, if no mesh is passed. By default all devices.
        auto_shard_dataset: As for `ModelParallel`.
        shard_optimizer_state: Whether each device stores and updates only its shard of the optimizer state (ZeRO-1).
            Gradients are then reduce-scattered and new weights all-gathered, in place of one all-reduce. Optimizer
            state of a weight of up to 64 KiB, or of one with no dim that the devices divide, stays replicated.
        sequence_dim_name: The axis, or axes, of the mesh after the first one to shard dim 1 of the batch over (context
            parallelism).
        sequence_exchange: As for `ModelParallel`.
        step_options: As for `ModelParallel`.

    Raises:
        ValueError: Both a mesh and devices are passed, or an empty list of devices, or something that is not a mesh, or
            a sequence axis that the mesh does not have or that is its first axis.

    Example:

    >>> DataParallel(devices=jax.devices()[:2])
    <DataParallel device_mesh=<DeviceMesh batch:2 on 2 of 8 cpu devices>>

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (P_os).
    """

    def __init__(
        self,
        device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh | None = None,
        devices: Sequence[Any] | np.ndarray | None = None,
        auto_shard_dataset: bool = True,
        *,
        shard_optimizer_state: bool = False,
        sequence_dim_name: BatchDimName = None,
        sequence_exchange: str | None = None,
        step_options: StepOptions | None = None,
    ):
        if device_mesh is not None and devices is not None:
            raise ValueError(
                f"Pass device_mesh or devices, not both: got device_mesh={device_mesh} and devices={devices}."
            )
        names = [internals.DEFAULT_BATCH_DIM_NAME]
        if devices is not None:
            if np.size(devices) == 0:
                raise ValueError(
                    "DataParallel needs at least one device, but devices=[]. Leave `devices` out to use all."
                )
            if np.ndim(devices) == 0:
                raise TypeError(
                    f"devices={devices!r} must be a list of devices or of their names. Pass, for example, "
                    "devices=jax.devices()[:4]."
                )
            device_mesh = DeviceMesh(np.shape(devices), names, devices)
        elif device_mesh is None:
            device_mesh = create_device_mesh((-1,), axis_names=names)
        device_mesh = as_auto_mesh(device_mesh)
        first_axis = device_mesh.axis_names[0]
        super().__init__(
            device_mesh, first_axis, auto_shard_dataset, sequence_dim_name, sequence_exchange, step_options
        )
        if set(device_mesh.axis_names[1:]) - set(axis_tuple(sequence_dim_name)):
            warn(
                f"DataParallel expects a 1D mesh, but got {device_mesh}. The batch is sharded over the first axis, "
                f"{first_axis!r}, only; along the other axes all devices compute the same. To shard the batch over "
                "several axes, use ModelParallel(layout_map=LayoutMap(mesh), batch_dim_name=(...)).",
            )
        self._shard_optimizer_state = shard_optimizer_state

    def get_update_layout(self, variable) -> TensorLayout:
        """Returns the layout of a variable's gradient and optimizer state: by default that of the variable.

        With `shard_optimizer_state`, one that shards a dim of it over the batch axis, if the variable is larger than
        64 KiB and has a dim that the axis divides.
        """
        layout = self.get_variable_layout(variable)
        if not self._shard_optimizer_state:
            return layout
        return shard_one_more_dim(layout, variable, self._placer.batch_axes, self._device_mesh)

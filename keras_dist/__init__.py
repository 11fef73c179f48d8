"""keras_dist: the distribution layer for Keras 3 on JAX. A drop-in superset of `keras.distribution`."""

from keras_dist.devices import (
    get_device_count,
    initialize,
    list_devices,
    num_processes,
    process_id,
    simulate_devices,
)
from keras_dist.distribution import (
    DataParallel,
    Distribution,
    ModelParallel,
    distribute_tensor,
    distribution,
    set_distribution,
)
from keras_dist.layout import TensorLayout
from keras_dist.layout_map import LayoutMap
from keras_dist.mesh import DeviceMesh
from keras_dist.placement import redistribute

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "DeviceMesh",
    "Distribution",
    "LayoutMap",
    "ModelParallel",
    "TensorLayout",
    "distribute_tensor",
    "distribution",
    "get_device_count",
    "initialize",
    "list_devices",
    "num_processes",
    "process_id",
    "redistribute",
    "set_distribution",
    "simulate_devices",
]

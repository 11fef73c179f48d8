"""keras_dist: the distribution layer for Keras 3 on JAX. A drop-in superset of `keras.distribution`.

Which file does what; each imports only from those above it:

* `axes.py`: names and sizes of mesh axes, as plain data. `path_index.py`: which of many regexes match a path.
  `ordered_rules.py`: what a rule over paths need not spell, and what the order of rules decides.
* `units.py`, `tables.py`, `plain.py`: figures, tables and bars as people read them, and as JSON. `path_groups.py`:
  variables of equal blocks as one.
* `keras_seam.py`: every private name of Keras that is touched. `keras_seam_overrides.py`: how functions of Keras are
  replaced while a distribution of ours is installed, and which is. `keras_seam_replacements.py`: by what, and why.
* `devices.py`: the process and its devices; simulated ones. `mock_devices.py`: devices that are described only.
* `topology.py`: devices in a good order; the links between them. `mesh_picture.py`: which device sits where.
* `mesh.py`: `DeviceMesh` and the ways to make one. `mesh_compat.py`: the mesh APIs of datarax, artifex and eformer.
* `layout.py`: `TensorLayout`.
* `layout_map.py`: `LayoutMap`. `batches.py`: a host batch becomes global arrays. `outputs.py`: what layers
  return. `placement.py`: where the variables of a built model lie, and moving them.
* `shard_choice.py`: which dim of a tensor to shard. `compute.py`: weights where layers compute with them.
* `distribution.py`: `Distribution`. `installed.py`: the one that is installed.
* `strategies.py`: `DataParallel`, `ModelParallel`, `FullyShardedDataParallel`.
* `tensor_parallel.py`: rules for tensor and sequence parallelism, found from what a model computes. `dim_flow.py`:
  which dims of a program are sharded together. `dim_nodes.py`: those dims as nodes, and what each communicates.
* `coverage.py`, `explain.py`: which rule lays out which variable. `nearest.py`, `suggestions.py`: rules that would do
  what was meant. `findings.py`: what was probably not meant. `coverage_report.py`: a coverage as text and HTML.
* `visualize.py`: which device holds which part of a tensor.
* `keras_seam_deferred.py`: what of Keras is replaced while variables are made without values.
* `planning/`: foresight; its files are listed in its own docstring.
* `cli.py`: `keras-dist` in a shell.
"""

from keras_dist import keras_seam as _keras_seam  # noqa: F401  (first, since it chooses the backend)
from keras_dist.coverage import Coverage
from keras_dist.devices import (
    force_cpu,
    get_device_count,
    initialize,
    list_devices,
    num_processes,
    process_id,
    simulate_devices,
)
from keras_dist.distribution import Distribution
from keras_dist.explain import explain
from keras_dist.guard import LayoutMapWarning
from keras_dist.installed import distribute_tensor, distribution, set_distribution
from keras_dist.layout import TensorLayout
from keras_dist.layout_map import LayoutMap
from keras_dist.mesh import DeviceMesh, create_device_mesh
from keras_dist.mesh_compat import (
    DeviceMeshManager,
    calculate_host_mesh_shape,
    cpu_context,
    create_cpu_mesh,
    create_mesh,
    parse_mesh_from_string,
)
from keras_dist.mock_devices import mock_gpus, mock_tpus
from keras_dist.placement import redistribute
from keras_dist.planning.compare import Comparison, compare
from keras_dist.planning.deferred import deferred, materialize
from keras_dist.planning.hardware import GpuCompilerTarget, Hardware, hardware
from keras_dist.planning.plan import Plan, plan
from keras_dist.planning.target import Target, target
from keras_dist.strategies import DataParallel, FullyShardedDataParallel, ModelParallel
from keras_dist.tensor_parallel import tensor_parallel_layout_map
from keras_dist.visualize import visualize

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "Coverage",
    "DataParallel",
    "DeviceMesh",
    "DeviceMeshManager",
    "Distribution",
    "FullyShardedDataParallel",
    "GpuCompilerTarget",
    "Hardware",
    "LayoutMap",
    "LayoutMapWarning",
    "ModelParallel",
    "Plan",
    "Target",
    "TensorLayout",
    "calculate_host_mesh_shape",
    "compare",
    "cpu_context",
    "create_cpu_mesh",
    "create_device_mesh",
    "create_mesh",
    "deferred",
    "distribute_tensor",
    "distribution",
    "explain",
    "force_cpu",
    "get_device_count",
    "hardware",
    "initialize",
    "list_devices",
    "materialize",
    "mock_gpus",
    "mock_tpus",
    "num_processes",
    "parse_mesh_from_string",
    "plan",
    "process_id",
    "redistribute",
    "set_distribution",
    "simulate_devices",
    "target",
    "tensor_parallel_layout_map",
    "visualize",
]

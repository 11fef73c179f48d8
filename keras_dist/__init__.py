"""keras_dist: the distribution layer for Keras 3 on JAX. A drop-in superset of `keras.distribution`.

Which file does what; each imports only from those above it:

* `axes.py`: names and sizes of mesh axes, as plain data. `path_index.py`: which of many regexes match a path.
  `ordered_rules.py`: what a rule over paths need not spell, and what the order of rules decides.
* `units.py`, `tables.py`, `plain.py`: figures, tables and bars as people read them, and as JSON. `path_groups.py`:
  variables of equal blocks as one. `look_ahead.py`: an iterator that a thread runs ahead. `whole_files.py`: a file is
  written whole or not at all.
* `keras_seam.py`, `keras_seam_state.py`: every private name of Keras that is touched; the state of a model that runs.
  `keras_seam_overrides.py`: how functions of Keras are replaced while a distribution of ours is installed, and which.
* `devices.py`: the devices of this process; simulated ones. `mock_devices.py`: devices that are described only.
* `launch.py`: many processes on this machine, for development. `coordination.py`: JAX's coordination service, joined in
  bounded time; `coordination_service.py`: that service as a program. `processes.py`: what processes tell each other,
  and that one failed. `cluster.py`: `initialize`.
* `topology.py`: devices in a good order; the links between them. `mesh_picture.py`: which device sits where.
* `mesh.py`: `DeviceMesh` and the ways to make one. `mesh_compat.py`: the mesh APIs of datarax, artifex and eformer.
* `layout.py`: `TensorLayout`. `stored.py`: a tensor in a file, of which parts are read. `values.py`: a value becomes
  shards. `gather.py`: a global array becomes a host array.
* `layout_map.py`: `LayoutMap`. `followers.py`: variables that lie as another one. `outputs.py`: what layers return.
  `placement.py`: where the variables of a built model lie, and moving them.
* `batches.py`: a host batch becomes global arrays. `agreement.py`: whether processes were given what fits together.
  `feed.py`: batches on their way to the steps.
* `lead.py`: process 0 does something for all. `reading.py`: variables of several processes are read.
* `shard_choice.py`: which dim of a tensor to shard. `compute.py`: weights where layers compute with them.
* What replaces functions of Keras, and why: `keras_seam_replacements.py`; `keras_seam_position.py` and
  `keras_seam_iterator.py`: the batches that a step takes, and where in its data an iterator stands;
  `keras_seam_deferred.py`: variables without values; `keras_seam_loading.py`: values, from memory and from files, go
  straight into shards; `keras_seam_reading.py`, `keras_seam_saving.py`: variables of several processes are read, and
  files written once; `keras_seam_orbax.py`: checkpoints are loaded, with `checkpoint_restore.py`: the variables of a
  model in a checkpoint, and `checkpoint_paths.py`: which entry belongs to which.
* `distribution.py`: `Distribution`. `installed.py`: the one that is installed.
* `strategies.py`: `DataParallel`, `ModelParallel`, `FullyShardedDataParallel`.
* `training_checkpoint.py`: `TrainingCheckpoint`.
* `tensor_parallel.py`: rules for tensor and sequence parallelism, found from what a model computes. `dim_flow.py`:
  which dims of a program are sharded together. `dim_nodes.py`: those dims as nodes, and what each communicates.
  `models.py`: the model of a function that makes one.
* `coverage.py`, `explain.py`: which rule lays out which variable. `nearest.py`, `suggestions.py`: rules that would do
  what was meant. `findings.py`: what was probably not meant. `coverage_report.py`: a coverage as text and HTML.
  `guard.py`: findings are told before the first step.
* `visualize.py`: which device holds which part of a tensor.
* `planning/`: foresight; its files are listed in its own docstring.
* `cli.py`: `keras-dist` in a shell.
"""

from keras_dist import keras_seam as _keras_seam  # noqa: F401  (first, since it chooses the backend)
from keras_dist import keras_seam_orbax as _keras_seam_orbax  # noqa: F401  (marks what replaces)
from keras_dist.cluster import initialize
from keras_dist.coverage import Coverage
from keras_dist.devices import (
    force_cpu,
    get_device_count,
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
from keras_dist.training_checkpoint import TrainingCheckpoint
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
    "TrainingCheckpoint",
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

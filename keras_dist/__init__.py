"""keras_dist: the distribution layer for Keras 3 on JAX. A drop-in superset of `keras.distribution`.

Each subpackage is called a room, and lists its files in its `__init__.py`. docs/architecture.md has a picture of them.
"""

from keras_dist._keras import internals as _internals  # noqa: F401  (first: it selects Keras's backend

# isort: split
from typing import TYPE_CHECKING as _TYPE_CHECKING

from keras_dist import _patches as _patches
from keras_dist._report.argument_errors import attribute_error as _attribute_error
from keras_dist._report.argument_errors import explain_arguments as _explain_arguments
from keras_dist.checkpoint.training_checkpoint import TrainingCheckpoint
from keras_dist.diagnostics.coverage import Coverage
from keras_dist.diagnostics.explain import explain
from keras_dist.diagnostics.layout_warning import LayoutMapWarning
from keras_dist.diagnostics.visualize import visualize
from keras_dist.interchange.adapters import export_adapter, merge_adapter
from keras_dist.interchange.export import export_safetensors
from keras_dist.layout.layout_map import LayoutMap
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.mesh.compat import (
    DeviceMeshManager,
    calculate_host_mesh_shape,
    cpu_context,
    create_cpu_mesh,
    create_mesh,
    parse_mesh_from_string,
)
from keras_dist.mesh.device_mesh import DeviceMesh, create_device_mesh
from keras_dist.mesh.devices import (
    force_cpu,
    get_device_count,
    list_devices,
    num_processes,
    process_id,
    simulate_devices,
)
from keras_dist.mesh.mock_devices import mock_gpus, mock_tpus
from keras_dist.mixtures.experts import experts
from keras_dist.monitoring.step_monitor import StepMonitor
from keras_dist.multihost.initialize import initialize
from keras_dist.planning.hardware.figures import GpuCompilerTarget, Hardware
from keras_dist.planning.hardware.registry import hardware
from keras_dist.planning.plan import plan
from keras_dist.planning.plan import with_remat_chosen as _with_remat_chosen
from keras_dist.planning.reports.compare import Comparison, compare
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.planning.search.auto import auto
from keras_dist.planning.search.choice import Choice
from keras_dist.planning.targets.target import Target, target
from keras_dist.steps.options import StepOptions
from keras_dist.steps.steps import choose_remat_by as _choose_remat_by
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.current import distribute_tensor, distribution, set_distribution
from keras_dist.strategies.data_parallel import DataParallel
from keras_dist.strategies.derived.tensor_parallel import tensor_parallel_layout_map
from keras_dist.strategies.fsdp import FullyShardedDataParallel
from keras_dist.strategies.model_parallel import ModelParallel
from keras_dist.variables.deferred import deferred, materialize
from keras_dist.variables.inference_layout import inference_layout
from keras_dist.variables.variable_layouts import redistribute

__version__ = "0.2.0.dev0"

__all__ = [
    "Choice",
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
    "StepMonitor",
    "StepOptions",
    "Target",
    "TensorLayout",
    "TrainingCheckpoint",
    "auto",
    "calculate_host_mesh_shape",
    "compare",
    "cpu_context",
    "create_cpu_mesh",
    "create_device_mesh",
    "create_mesh",
    "deferred",
    "distribute_tensor",
    "distribution",
    "experts",
    "explain",
    "export_adapter",
    "export_safetensors",
    "force_cpu",
    "get_device_count",
    "hardware",
    "inference_layout",
    "initialize",
    "list_devices",
    "materialize",
    "merge_adapter",
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

_patches.register()
_choose_remat_by(_with_remat_chosen)

for _name in __all__:  # documentation, pickles and error messages show the public name
    globals()[_name].__module__ = __name__

globals().update(_explain_arguments({_name: globals()[_name] for _name in __all__}))

if not _TYPE_CHECKING:  # which would take every name for one that exists

    def __getattr__(name):
        raise _attribute_error(__name__, name, __all__)

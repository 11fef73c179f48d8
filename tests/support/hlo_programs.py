"""Programs with known collectives, compiled for the CPU and, where their compilers are installed, for TPUs and GPUs."""

import functools
import os

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from support.compilers import needs_cuda, needs_libtpu

# libtpu reads these when it is loaded. Without them it looks for the TPU that this machine does not have.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 85520809984 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


ON_TPUS, ON_GPUS = [needs_libtpu, pytest.mark.compiler], [needs_cuda, pytest.mark.compiler]
TPUS = [pytest.param(name, marks=ON_TPUS) for name in ("v5e:2x4", "v5e:4x4", "v5p:2x2x2")]
SLICES = [pytest.param(number, marks=ON_TPUS) for number in (2, 3)]  # of 4 chips each
GPUS = [pytest.param(name, marks=ON_GPUS) for name in ("h100:1x1x8", "h100:1x2x4")]
COMPILERS = [pytest.param("cpu"), *TPUS, *GPUS]


@functools.cache
def devices_of(compiler: str) -> tuple:
    """Returns devices to compile for: "cpu", a TPU topology such as "v5e:2x4", or H100 hosts such as "h100:1x2x4"."""
    if compiler == "cpu":
        return tuple(jax.devices("cpu")[:8])
    if compiler.startswith("h100:"):
        shape = compiler.removeprefix("h100:")
        target = topologies.get_topology_desc("h100", "cuda", topology=shape, target_config=H100)
    else:
        target = topologies.get_topology_desc(compiler, "tpu")
    return tuple(target.devices)


def mesh_of(compiler: str, *names: str, shuffled: bool = False) -> Mesh:
    """A mesh of all devices, in which each axis but the last has 2 of them."""
    devices = np.array(devices_of(compiler))
    if shuffled:
        devices = devices[np.random.default_rng(0).permutation(len(devices))]
    sizes = [2] * (len(names) - 1)
    return Mesh(devices.reshape(*sizes, -1), names)


def axes_of(mesh: Mesh) -> dict[str, int]:
    """The sizes of a mesh's axes by name."""
    return dict(mesh.shape)


@functools.cache
def _chips_of_slices(number: int) -> tuple:
    return tuple(topologies.get_topology_desc("v5e:2x2", "tpu", num_slices=number).devices)


def mesh_of_slices(number: int, axes: dict[str, int], places) -> Mesh:
    """A mesh of slices of 4 TPUs each. `places` holds its devices, counted slice by slice, as an array of any shape."""
    devices = np.array(_chips_of_slices(number))[np.asarray(places)]
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


def mapped(mesh: Mesh, function, in_specs, out_specs, *arguments) -> str:
    """Text of a function that every device runs on its shards, for arguments as (shape of a shard, dtype)."""
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
    whole = []
    for (shape, dtype), spec in zip(arguments, in_specs, strict=True):
        sharding = NamedSharding(mesh, spec)
        parts = [size * _parts(mesh, entry) for size, entry in zip(shape, [*spec, *[None] * len(shape)], strict=False)]
        whole.append(jax.ShapeDtypeStruct(tuple(parts), dtype, sharding=sharding))
    return program.lower(*whole).compile().as_text()


def partitioned(mesh: Mesh, function, out_spec, *arguments) -> str:
    """Text of a function that the partitioner spreads over the mesh, for arguments as (whole shape, dtype, spec)."""
    return partitioned_program(mesh, function, out_spec, *arguments).as_text()


def partitioned_program(mesh: Mesh, function, out_spec, *arguments):
    """The compiled program of `partitioned`."""
    whole = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, dtype, spec in arguments]
    out_shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), out_spec, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    return jax.jit(function, out_shardings=out_shardings).lower(*whole).compile()


def _parts(mesh: Mesh, entry) -> int:
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))

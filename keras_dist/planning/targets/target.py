"""`target("v5e:4x4")`: devices to compile for, attached or not."""

import contextlib
import dataclasses
import functools
import glob
import importlib
import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from keras_dist._report.install_advice import cuda_extra, install_command
from keras_dist._report.units import counted
from keras_dist._report.user_warnings import warn
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.mesh.devices import Device, cpu_thread_count, platform_devices
from keras_dist.mesh.topology import slice_of
from keras_dist.mesh.tpu_generations import TPU_GENERATIONS, tpu_generation_of
from keras_dist.planning.hardware.figures import GpuCompilerTarget, Hardware
from keras_dist.planning.hardware.registry import hardware
from keras_dist.planning.targets.target_names import EXAMPLES, parse_target_name

# With these variables libtpu neither queries a metadata server nor locks the machine's TPUs against other processes. It
# reads them when it is loaded. The accelerator type does not affect what it compiles for.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# How many GPUs NVLink joins: those of NVIDIA's HGX boards; cards in pairs, with a bridge; 18 hosts of 4 in a rack.
_ON_A_BOARD, _ON_A_BRIDGE, _IN_A_RACK = 8, 2, 72
# JAX's CUDA plugin refuses to load without CUDA's libraries, unless this variable is set. Its compiler needs none.
_CUDA_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_OLDEST_OF_CUDA_13 = (7, 5)  # compute capability


@dataclass(frozen=True, repr=False)
class Target(Sequence):
    """Devices of some hardware to compile for, as a sequence: pass it wherever devices are expected.

    Attributes:
        name: Hardware and shape, such as `"v5e:4x4"`.
        hardware: Memory, compute and bandwidths of each device.
        devices: The devices, in JAX's order.
        slices: Number of TPU slices, joined by the data center network (DCN).
    """

    name: str
    hardware: Hardware
    devices: tuple[Device, ...]
    slices: int = 1

    def __getitem__(self, index):
        return self.devices[index]

    def __len__(self):
        return len(self.devices)

    def __repr__(self):
        slices = f" x {self.slices} slices" if self.slices > 1 else ""
        memory = self.hardware.memory_bytes
        each = "" if memory is None else f", {memory / 2**30:.2f} GiB each"
        kind = self.devices[0].device_kind
        return f"<Target {self.name}{slices}: {counted(len(self), f'{kind} device')}{each}>"

    def __reduce__(self):
        return _load, (self.name, self.slices)  # devices cannot leave their process


def _load(name: str, slices: int) -> Target:
    return target(name, slices)


def target(name: str, slices: int = 1) -> Target:
    """Returns devices of hardware that need not be attached, to compile programs for.

    Programs for TPUs are compiled by libtpu, of the extra `tpu`, and for NVIDIA GPUs by JAX's CUDA plugin, of the extra
    `cuda13` or `cuda12`. Neither needs the hardware or its drivers, and the programs cannot be executed.
    CPU devices are those of this process. If JAX has not started yet, `"cpu:8"` makes it start with 8.

    The same name returns the same devices, so meshes of them are equal and nothing is compiled twice. Registered TPUs
    are compiled for like the known TPU of their device kind.

    Args:
        name: Hardware from `keras_dist.hardware`, and its shape or number.

            * TPUs: the sides of a slice in chips, `"v5e:4x4"` or `"v5p:2x2x2"`, or the number of chips, `"v5e:16"`.
            * GPUs: GPUs of one host, `"h100:8"`, or hosts x GPUs per host, `"h100:2x8"`. NVLink or PCIe joins those of
              a host. Hosts that NVLink joins count as one: `"gb200:72"`.
            * CPUs: a number, `"cpu:8"`.
            * Cloud names: `"v5litepod-16"`, `"v5p-8"` (8 TensorCores, so 4 chips), `"a3-highgpu-8g"`, `"p5.48xlarge"`,
              `"g5.12xlarge"`, `"Standard_ND96isr_H100_v5"`, Kaggle's `"GPU T4 x2"`.
        slices: Number of TPU slices of that shape, joined by the data center network.

    Returns:
        The target, a sequence of devices.

    Raises:
        TypeError: `name` is not a string or `slices` not an integer.
        ValueError: The hardware is unknown or not available in that shape, its compiler is not installed, or JAX has
            started with fewer CPU devices.

    Warns:
        UserWarning: More GPUs on a host than NVLink usually joins.

    Example:

    >>> target("cpu:4")[0].platform, len(target("cpu:4"))
    ('cpu', 4)
    """
    if not isinstance(name, str):
        given = f"hardware {name.name!r} without a shape or number" if isinstance(name, Hardware) else repr(name)
        raise TypeError(f"The name of a target must be a string, but got {given}. Write {EXAMPLES}.")
    if not isinstance(slices, int) or isinstance(slices, bool):
        raise TypeError(f"slices must be an integer, but got {slices!r}.")
    entry, shape = parse_target_name(name)
    name = f"{entry.name}:{'x'.join(map(str, shape))}"
    if slices < 1 or (slices > 1 and entry.platform != "tpu"):
        hosts = " Write several hosts of GPUs as 'h100:2x8'." if entry.platform == "gpu" else ""
        limit = "at least 1" if entry.platform == "tpu" else f"1 for {entry.platform.upper()}s"
        raise ValueError(f"slices must be {limit}, but got slices={slices} for target {name!r}.{hosts}")
    if entry.platform == "cpu":
        return _cpu_target(name, shape, entry)
    if entry.platform == "gpu":
        _warn_of_unusual_hosts(name, shape, entry)
    return _compile_only_target(name, shape, slices, entry, hardware.device_kind_for(entry))


def hardware_of(device: Any) -> Hardware | None:
    """Returns the hardware that a device is; None if it is not registered."""
    # A CPU device has a share of this machine's memory, which only a target knows.
    return target("cpu:1").hardware if device.platform == "cpu" else hardware.of_device(device)


def _warn_of_unusual_hosts(name: str, shape: tuple[int, ...], entry: Hardware) -> None:
    gpus = shape[-1]
    if entry.links and re.search("PCIe|NVL$", entry.device_kind) and gpus > _ON_A_BRIDGE:
        warn(
            f"Target {name!r} has {gpus} GPUs on a host, but NVLink joins these GPUs in pairs only. A plan counts "
            f"NVLink between all of them, so its times for collectives among more than {_ON_A_BRIDGE} are too short."
        )
        return
    joined = _IN_A_RACK if entry.device_kind.startswith("NVIDIA GB") else _ON_A_BOARD
    if len(shape) == 1 and gpus > joined:
        by = "NVLink" if entry.links else "PCIe"
        warn(
            f"Target {name!r} is one host with {gpus} GPUs, all joined by {by}. If that is intended, write "
            f"'{entry.name}:1x{gpus}'. For 2 hosts of {joined}, write '{entry.name}:2x{joined}'.",
        )


@functools.cache
def _compile_only_target(name: str, shape: tuple[int, ...], slices: int, entry: Hardware, kind: str) -> Target:
    """Returns the target. It is cached until other figures are registered under its name."""
    try:
        if entry.platform == "tpu":
            devices = _tpu_devices(name, shape, slices, entry)
        else:
            devices = _gpu_devices(name, shape, entry, kind)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if "lockfile" in reason:
            raise ValueError(
                f"Cannot load libtpu for target {name!r}: another process uses the TPUs of this machine. End that "
                "process, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1 before JAX starts."
            ) from None
        raise ValueError(f"The compiler does not support target {name!r}: {reason}. Write {EXAMPLES}.") from None
    return Target(name, entry, tuple(devices), slices)


def _cpu_target(name: str, shape: tuple[int, ...], entry: Hardware) -> Target:
    [count] = shape
    is_set_by_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    configured: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if configured < count and not is_set_by_flag:
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", count)
            os.environ.setdefault("NPROC", str(cpu_thread_count(count)))
    devices = platform_devices("cpu")
    if count > len(devices):
        raise ValueError(
            f"Target {name!r} needs {count} CPU devices, but JAX has started with {len(devices)}. Call "
            f"keras_dist.simulate_devices({count}) right after importing keras_dist."
        )
    if entry.memory_bytes is None and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        source = "memory of this machine divided by the CPU devices of this process"
        entry = dataclasses.replace(
            entry,
            memory_bytes=memory // len(jax.local_devices(backend="cpu")),
            sources={**entry.sources, "memory_bytes": source},
        )
    return Target(name, entry, tuple(devices[:count]))


def _tpu_devices(name: str, shape: tuple[int, ...], slices: int, entry: Hardware) -> list[Device]:
    generation = tpu_generation_of(entry.device_kind)
    if generation is None:
        kinds = ", ".join(known.device_kind for known in TPU_GENERATIONS.values())
        raise ValueError(
            f"libtpu does not know device kind {entry.device_kind!r} of target {name!r}. Register the hardware with "
            f"one of these: {kinds}."
        )
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ValueError(
            f"Target {name!r} needs libtpu to compile for TPUs, which is not installed. Run: {install_command('tpu')}."
        )
    x, y = [*shape, 1][:2]
    options = {}
    if min(x, y) < 2:
        options["chips_per_host_bounds"] = (min(x, 2), min(y, 2), 1)
    if generation.name == "v4":
        options["chip_config_name"] = "megacore"  # the two cores of a chip as one device, as JAX has them
    if slices > 1:
        options["num_slices"] = slices
    is_attached = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    with _default_environment({} if is_attached else _LIBTPU_ENVIRONMENT):
        topology = f"{generation.name}:{'x'.join(map(str, shape))}"
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


@contextlib.contextmanager
def _default_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that the user has not set, for a block."""
    added = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _gpu_devices(name: str, shape: tuple[int, ...], entry: Hardware, kind: str) -> list[Device]:
    if entry.compiler_target is None or entry.memory_bytes is None or entry.memory_bytes_per_second is None:
        raise ValueError(
            f"Cannot compile for target {name!r}: the GPU compiler needs memory_bytes, memory_bytes_per_second and "
            "compiler_target. Register the hardware with them, for example as "
            "dataclasses.replace(keras_dist.hardware['h100'], name=...)."
        )
    plugin = next((plugin for plugin in _CUDA_PLUGINS if importlib.util.find_spec(plugin)), None)
    if plugin is None:
        extra = cuda_extra(entry.compiler_target.compute_capability >= _OLDEST_OF_CUDA_13)
        raise ValueError(
            f"Target {name!r} needs JAX's CUDA plugin to compile for NVIDIA GPUs, which is not installed. Run: "
            f"{install_command(extra)}."
        )
    hosts, gpus = (1, *shape)[-2:]
    get_devices = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        topology_name=entry.name,
        # Slices x hosts per slice x GPUs per host. XLA's slice is what NVLink joins, so each host is one.
        topology=f"{hosts}x1x{gpus}",
        target_config=_gpu_target_config(entry, entry.compiler_target, kind),
    )
    devices = _cuda_devices(name, plugin, get_devices)
    if entry.compiler_target.compute_capability < _OLDEST_OF_CUDA_13:
        _require_assembler(name, entry.compiler_target, devices[0])
    return devices


def _cuda_devices(name: str, plugin: str, get_devices: Callable[[], Any]) -> list[Device]:
    with _default_environment(_CUDA_ENVIRONMENT):
        try:
            return get_devices().devices
        except NotImplementedError:  # JAX started earlier, and failed to load the plugin
            pass
        try:
            importlib.import_module(f"jax_plugins.xla_{plugin.split('_')[1]}").initialize()
            return get_devices().devices
        except Exception as error:
            version = importlib.metadata.version(plugin.replace("_", "-"))
            raise ValueError(
                f"Cannot compile for target {name!r}: JAX {jax.__version__} cannot use {plugin} {version} "
                f"({type(error).__name__}: {error}). Install matching versions: "
                f"{install_command(plugin.split('_')[1])}."
            ) from error


def _require_assembler(name: str, gpu: GpuCompilerTarget, device: Device) -> None:
    """Raises a ValueError if the assembler that XLA finds is too new for an old GPU, by compiling a small program."""
    x = jax.ShapeDtypeStruct((2,), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        if "ptxas" not in str(error):
            raise
        capability = ".".join(map(str, gpu.compute_capability))
        found = re.search(r"\S*/ptxas", str(error))
        raise ValueError(
            f"Cannot compile for target {name!r}: XLA uses {found[0] if found else 'ptxas'}, but CUDA's ptxas knows "
            f'compute capability {capability} up to CUDA 12 only. Run: pip install "nvidia-cuda-nvcc-cu12".'
        ) from error


def cudnn_version(compute_capability: tuple[int, int]) -> tuple[int, int]:
    """Returns the version of cuDNN of a GPU target, which is the oldest that JAX takes for it since JAX 0.12."""
    return (9, 11) if compute_capability == (10, 3) else (9, 10)


def _gpu_target_config(entry: Hardware, gpu: GpuCompilerTarget, kind: str) -> str:
    """Returns the text of a `GpuTargetConfigProto`. The constants are CUDA's limits since compute capability 6.0.

    Source: xla/stream_executor/device_description.proto; CUDA C++ Programming Guide, "Compute Capabilities".
    """
    major, minor = gpu.compute_capability
    cudnn_major, cudnn_minor = cudnn_version(gpu.compute_capability)
    is_of_1536_threads = major == 12 or (8, 0) < gpu.compute_capability < (9, 0)
    threads = 1024 if gpu.compute_capability == (7, 5) else 1536 if is_of_1536_threads else 2048
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""  # compiled as sm_90a, sm_100a
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32
          threads_per_core_limit: {threads}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152
          core_count: {gpu.core_count} fpus_per_core: {gpu.fpus_per_core} clock_rate_ghz: {gpu.clock_rate_ghz}
          l2_cache_size: {gpu.l2_cache_size} shared_memory_per_core: {gpu.shared_memory_per_core}
          shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin}
          memory_bandwidth: {int(entry.memory_bytes_per_second or 0)} device_memory_size: {entry.memory_bytes}
          cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
          device_interconnect_info {{ active_links: {entry.links} }}
        }}
        platform_name: "CUDA" dnn_version_info {{ major: {cudnn_major} minor: {cudnn_minor} }}
        device_description_str: "{kind}"
    """


def require_one_target(mesh: DeviceMesh) -> None:
    """Raises a ValueError if no compiler can compile for a mesh, or if it would crash on the mesh."""
    devices = mesh.backend_mesh.devices.ravel().tolist()
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1 or len({getattr(device, "client", None) for device in devices}) > 1:
        raise ValueError(
            f"Cannot compile for {mesh}: its devices ({', '.join(kinds)}) belong to several targets. Create the mesh "
            "with the devices of one keras_dist.target(...)."
        )
    if devices[0].platform == "tpu" and len(set(map(slice_of, devices))) > 1:
        _require_regular_slices(mesh)


def _require_regular_slices(mesh: DeviceMesh) -> None:
    """Raises a ValueError if groups of TPUs along some axes have different numbers of devices in their slices.

    libtpu crashes on such a mesh. Example: axis 'data' of size 6 over two slices, with 4 devices on the first and 2 on
    the second.
    """
    slices = np.vectorize(slice_of, otypes=[int])(mesh.backend_mesh.devices)
    dims = range(slices.ndim)
    for chosen in itertools.chain.from_iterable(itertools.combinations(dims, n + 1) for n in dims):
        last = np.moveaxis(slices, chosen, range(-len(chosen), 0))
        groups = last.reshape(-1, math.prod(last.shape[-len(chosen) :])).tolist()
        counts = sorted({count for group in groups for count in Counter(group).values()})
        if len(counts) > 1:
            names = ", ".join(repr(mesh.axis_names[dim]) for dim in chosen)
            raise ValueError(
                f"Cannot compile for {mesh}: along {names}, groups have {' and '.join(map(str, counts))} devices per "
                "slice, but libtpu needs equal numbers. Use full slices, in the order of DeviceMesh(shape, axis_names)."
            )

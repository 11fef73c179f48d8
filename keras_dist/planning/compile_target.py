"""`target("v5e:4x4")`: devices of hardware that need not be attached, which programs can be compiled for."""

import contextlib
import dataclasses
import functools
import glob
import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import topologies

from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.mesh.devices import Device, platform_devices
from keras_dist.mesh.topology import slice_of
from keras_dist.mesh.tpu_generations import TPU_GENERATIONS, tpu_generation_of
from keras_dist.planning.hardware import GpuCompilerTarget, Hardware, hardware

# With these libtpu neither asks a metadata server where it runs, nor locks the machine's TPUs against other processes.
# It reads them when it is loaded; which accelerator type it is told has no part in what it compiles for.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

_GPUS_OF_A_HOST = 8  # of NVIDIA's HGX boards, which hosts are built of
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_EXAMPLES = '"v5e:4x4", "v5p:2x2x2", "h100:8" or "h100:2x8" (2 hosts of 8)'


@dataclass(frozen=True, repr=False)
class Target(Sequence):
    """The devices of hardware that a program is compiled for, as a sequence; anything that takes devices takes it.

    Attributes:
        name: hardware and shape: `"v5e:4x4"`.
        hardware: what each device can hold, compute and send.
        devices: the devices, as JAX lists them.
        slices: how many slices of that shape there are, joined by the data center network.
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
        return f"<Target {self.name}{slices}: {len(self)} {kind} device{'s' * (len(self) > 1)}{each}>"

    def __reduce__(self):
        return target, (self.name, self.slices)  # devices belong to this process


def target(name: str, slices: int = 1) -> Target:
    """Returns the devices of hardware that need not be attached: programs can be compiled for them, not run.

    TPUs are compiled for by libtpu, `pip install "keras-dist[tpu]"`, and NVIDIA GPUs by JAX's CUDA plugin, `pip install
    "keras-dist[cuda12]"`; neither needs the hardware. CPUs are those of this process, and programs run on them.

    The same name gives the same devices, so that meshes of them are equal and nothing is compiled twice. TPUs that are
    registered with a known device kind are compiled for as that kind is: libtpu has its own figures.

    Args:
        name: hardware, which `keras_dist.hardware` lists, and shape. TPUs: the sides of a slice in chips,
            `"v5e:4x4"`, `"v5p:2x2x2"`. GPUs: how many a host has, `"h100:8"`, or hosts by that, `"h100:2x8"`, where
            those of one host are joined by NVLink. CPUs: how many, `"cpu:8"`.
        slices: how many TPU slices of that shape there are, joined by the data center network.

    Returns:
        The target, a sequence of devices.

    Raises:
        ValueError: unknown hardware, a shape that it cannot have, or a compiler that is not installed.
        TypeError: `name` is no string or `slices` no integer.

    Warns:
        UserWarning: more than 8 GPUs, without a number of hosts.

    Example:

    >>> target("cpu:4")[0].platform, len(target("cpu:4"))
    ('cpu', 4)
    """
    if not isinstance(name, str):
        raise TypeError(f"A target is named by a string. Received: {name!r}. Write {_EXAMPLES}.")
    if not isinstance(slices, int) or isinstance(slices, bool):
        raise TypeError(f"The number of slices is an integer. Received: slices={slices!r}. Write slices=2.")
    match = re.fullmatch(r"([\w.-]+):([1-9]\d{0,4}(?:x[1-9]\d{0,4}){0,2})", name)
    if match is None:
        raise _refused("A target is named by hardware and shape", name, f"Write {_EXAMPLES}")
    chip, shape = match[1], tuple(map(int, match[2].split("x")))
    if chip not in hardware:
        names = ", ".join(hardware)
        raise _refused("A target is of hardware that is registered", name, f"Use one of {names}, or register yours")
    entry = hardware[chip]
    if slices < 1 or (slices > 1 and entry.platform != "tpu"):
        way_out = (
            "Pass 1 or more"
            if entry.platform == "tpu"
            else "Leave slices out, and write hosts of GPUs as in 'h100:2x8'"
        )
        rule = "There is at least one slice, and only TPUs come in several"
        raise _refused(rule, name, way_out, f", slices={slices}")
    if entry.platform == "cpu":
        return _cpu_target(name, shape, entry)
    if entry.platform == "gpu" and len(shape) == 1 and shape[0] > _GPUS_OF_A_HOST:
        warnings.warn(
            f"{name!r} is one host, whose {shape[0]} GPUs are all joined by NVLink. Write '{chip}:1x{shape[0]}' for "
            f"that, or '{chip}:2x8' for 2 hosts of 8.",
            stacklevel=2,
        )
    return _compile_only_target(name, shape, slices, entry, hardware.device_kind_for(entry))


@functools.cache
def _compile_only_target(name: str, shape: tuple[int, ...], slices: int, entry: Hardware, kind: str) -> Target:
    """The target, made once, and anew where other figures were registered under its name."""
    make = _tpu_devices if entry.platform == "tpu" else _gpu_devices
    try:
        devices = make(name, shape, slices, entry, kind)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if "lockfile" in reason:
            rule = "libtpu was locked by another process that uses the TPUs of this machine"
            raise _refused(rule, name, "End it, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1 before JAX starts") from None
        raise _refused(f"The compiler has no such target ({reason})", name, f"Write {_EXAMPLES}") from None
    return Target(name, entry, tuple(devices), slices)


def _cpu_target(name: str, shape: tuple[int, ...], entry: Hardware) -> Target:
    if len(shape) != 1:
        raise _refused("CPU devices are counted by one number", name, "Write 'cpu:8'")
    devices = platform_devices("cpu")
    if shape[0] > len(devices):
        raise _refused(
            f"A CPU target takes the CPU devices of this process, of which there are {len(devices)}",
            name,
            f"Call keras_dist.simulate_devices({shape[0]}) first, before JAX starts",
        )
    if entry.memory_bytes is None and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        source = "the memory of this machine over the CPU devices of this process"
        entry = dataclasses.replace(
            entry,
            memory_bytes=memory // len(jax.local_devices(backend="cpu")),
            sources={**entry.sources, "memory_bytes": source},
        )
    return Target(name, entry, tuple(devices[: shape[0]]))


def _tpu_devices(name: str, shape: tuple[int, ...], slices: int, entry: Hardware, _: str) -> list[Device]:
    generation = tpu_generation_of(entry.device_kind)
    if generation is None:
        kinds = ", ".join(known.device_kind for known in TPU_GENERATIONS.values())
        raise _refused(f"TPUs are of a device kind that libtpu knows: {kinds}", name, "Register it with one of them")
    x, y, z = [*shape, 1, 1][:3]
    if len(shape) == 1 or (generation.is_2d and z > 1):
        sides, example = ("two", "4x4") if generation.is_2d else ("three", "2x2x2")
        raise _refused(f"A slice of {entry.name} has {sides} sides", name, f"Write '{entry.name}:{example}'")
    largest, side = generation.largest_slice, generation.longest_side
    if math.prod(shape) > largest or (generation.is_2d and max(x, y) > side):
        limit = f"{side}x{side}" if generation.is_2d else f"{largest}"
        raise _refused(
            f"A slice of {entry.name} has at most {limit} chips",
            name,
            "Take several, with slices=2 or more",
        )
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise _refused("Programs are compiled for TPUs by libtpu", name, 'Run: pip install "keras-dist[tpu]"')
    options = {}
    if min(x, y) < 2:
        options["chips_per_host_bounds"] = (min(x, 2), min(y, 2), 1)
    if generation.name == "v4":
        options["chip_config_name"] = "megacore"  # the two cores of a chip as one device, as JAX has them
    if slices > 1:
        options["num_slices"] = slices
    with _environment_of_libtpu():
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{generation.name}:{'x'.join(map(str, shape))}", **options
        ).devices


@contextlib.contextmanager
def _environment_of_libtpu() -> Iterator[None]:
    """Sets what libtpu reads while it loads, where the user has not, on machines without TPUs; restores it after."""
    attached = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    ours = {} if attached else {key: value for key, value in _LIBTPU_ENVIRONMENT.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            os.environ.pop(key, None)


def _gpu_devices(name: str, shape: tuple[int, ...], _: int, entry: Hardware, kind: str) -> list[Device]:
    if len(shape) > 2:
        raise _refused("GPUs are counted by host, or hosts by that", name, "Write 'h100:8' or 'h100:2x8'")
    if entry.compiler_target is None or entry.memory_bytes is None or entry.memory_bytes_per_second is None:
        raise _refused(
            "The compiler of a GPU must know its memory, its bandwidth and its compiler_target",
            name,
            "Register it with these, for example as dataclasses.replace(keras_dist.hardware['h100'], name=...)",
        )
    plugin = next((plugin for plugin in _CUDA_PLUGINS if importlib.util.find_spec(plugin)), None)
    if plugin is None:
        rule = "Programs are compiled for NVIDIA GPUs by JAX's CUDA plugin"
        raise _refused(rule, name, 'Run: pip install "keras-dist[cuda12]"')
    hosts, gpus = (1, *shape)[-2:]
    try:
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=entry.name,
            # Slices, hosts of a slice, and GPUs of a host. A slice is what NVLink joins, so each host is one.
            topology=f"{hosts}x1x{gpus}",
            target_config=_gpu_target_config(entry, entry.compiler_target, kind),
        ).devices
    except NotImplementedError:
        version = importlib.metadata.version(plugin.replace("_", "-"))
        raise _refused(
            f"JAX {jax.__version__} does not work with {plugin} {version}",
            name,
            'Run: pip install --upgrade "keras-dist[cuda12]"',
        ) from None


def _gpu_target_config(entry: Hardware, gpu: GpuCompilerTarget, kind: str) -> str:
    """The text of a `GpuTargetConfigProto`.

    What is the same on all GPUs since compute capability 8.0 are limits of CUDA.
    Source: xla/stream_executor/device_description.proto; CUDA C++ Programming Guide, "Compute Capabilities".
    """
    major, minor = gpu.compute_capability
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""  # compiled as sm_90a, sm_100a
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152
          core_count: {gpu.core_count} fpus_per_core: {gpu.fpus_per_core} clock_rate_ghz: {gpu.clock_rate_ghz}
          l2_cache_size: {gpu.l2_cache_size} shared_memory_per_core: {gpu.shared_memory_per_core}
          shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin}
          memory_bandwidth: {int(entry.memory_bytes_per_second or 0)} device_memory_size: {entry.memory_bytes}
          cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
          device_interconnect_info {{ active_links: {entry.links} }}
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{kind}"
    """


def _refused(rule: str, name: str, way_out: str, more: str = "") -> ValueError:
    return ValueError(f"{rule}. Received: {name!r}{more}. {way_out}.")


def require_one_target(mesh: DeviceMesh) -> None:
    """Raises a ValueError where no compiler compiles for a mesh, or ends the process on it.

    Args:
        mesh: of any devices.
    """
    devices = mesh.backend_mesh.devices.ravel().tolist()
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1 or len({getattr(device, "client", None) for device in devices}) > 1:
        raise ValueError(
            f"A step is compiled for devices of one target. Received: {mesh} of {', '.join(kinds)}, from several. Make "
            "the mesh of one keras_dist.target."
        )
    if devices[0].platform == "tpu" and len(set(map(slice_of, devices))) > 1:
        _require_regular_slices(mesh)


def _require_regular_slices(mesh: DeviceMesh) -> None:
    slices = np.vectorize(slice_of, otypes=[int])(mesh.backend_mesh.devices)
    dims = range(slices.ndim)
    for chosen in itertools.chain.from_iterable(itertools.combinations(dims, n + 1) for n in dims):
        last = np.moveaxis(slices, chosen, range(-len(chosen), 0))
        groups = last.reshape(-1, math.prod(last.shape[-len(chosen) :])).tolist()
        counts = sorted({count for group in groups for count in Counter(group).values()})
        if len(counts) > 1:
            names = ", ".join(repr(mesh.axis_names[dim]) for dim in chosen)
            raise ValueError(
                "The groups of TPUs that talk along an axis have as many devices in each slice they touch. Received: "
                f"{mesh}, whose groups along {names} have {' and '.join(map(str, counts))} devices in a slice. Take "
                "whole slices, in the order that DeviceMesh(shape, axis_names) gives them."
            )

"""`Hardware`: memory, compute, bandwidths and latencies of a device, each figure with its public source."""

import dataclasses
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_dist.mesh.tpu_generations import tpu_generation_of
from keras_dist.planning.frozen_mapping import FrozenMapping
from keras_dist.planning.hardware.compiler_options import CompilerOptions, published_options

PLATFORMS = ("tpu", "gpu", "cpu")
DTYPES = ("float32", "bfloat16", "float16", "float8", "int8")


@dataclass(frozen=True)
class GpuCompilerTarget:
    """What XLA's compiler needs to know of a GPU that is not attached, named as in XLA's `GpuDeviceInfoProto`.

    Attributes:
        compute_capability: CUDA compute capability, `(major, minor)`.
        core_count: Streaming multiprocessors.
        fpus_per_core: float32 units per streaming multiprocessor.
        clock_rate_ghz: Highest clock rate, GHz.
        l2_cache_size: Bytes.
        shared_memory_per_core: Bytes.
        shared_memory_per_block_optin: Bytes that one thread block can request.
    """

    compute_capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int


@dataclass(frozen=True)
class Hardware:
    """Memory, peak compute and bandwidths of one JAX device. No program exceeds them.

    A figure is None if it is unknown; what depends on it is then unknown in plans. To plan for other hardware, change
    known hardware: `dataclasses.replace(hardware["h100"], name="h100-96gb", memory_bytes=...)`.

    Attributes:
        name: Name in targets: `"v5e"`, `"h100"`.
        platform: `"tpu"`, `"gpu"` or `"cpu"`.
        device_kind: `jax.Device.device_kind`, such as `"TPU v5 lite"` or `"NVIDIA H100 80GB HBM3"`.
        memory_bytes: Device memory in bytes: on TPUs what the compiler allots, on GPUs what CUDA reports. By default
            JAX allocates 75% of a GPU's; see XLA_PYTHON_CLIENT_MEM_FRACTION.
        memory_bytes_per_second: Memory bandwidth.
        flops_per_second: Peak of dense matrix multiplications by dtype (`"float32"`, `"bfloat16"`, `"float16"`,
            `"float8"`, `"int8"`), as far as known. Float32 is at JAX's default precision: one bfloat16 pass on TPUs,
            TF32 on NVIDIA GPUs since Ampere. Earlier ones multiply bfloat16 at the rate of float32.
        link_bytes_per_second: Bandwidth of one ICI link or NVLink in one direction; of PCIe for GPUs without NVLinks.
        links: Number of links: NVLinks of a GPU, 0 if PCIe joins those of a host; or ICI links of a TPU chip (4 in a 2D
            torus, 6 in a 3D torus), which several devices may share.
        network_bytes_per_second: Bandwidth of one device to other slices or hosts, in one direction.
        host_bytes_per_second: Bandwidth between a device and its host in one direction: PCIe or NVLink-C2C of a GPU.
        sources: Public source of each figure, by field name. Ignored in comparisons.
        compiler_target: What the compiler needs to know of a GPU; None for TPUs and CPUs.
        clock_hz: Clock rate of a TPU's TensorCore, in which XLA:TPU estimates times; None for other hardware.
        link_latency_seconds: What one hop over an ICI link, NVLink or PCIe takes, however few bytes are sent.
        network_latency_seconds: The same between slices or hosts.

    Raises:
        TypeError: `flops_per_second` or `sources` is not a mapping.
        ValueError: A figure is not a finite positive number or has no source, the platform or a dtype is unknown, or
            the name cannot be written in a target.

    Example:

    >>> hardware["v5e"].memory_bytes / 2**30
    15.75
    >>> import dataclasses
    >>> own = dataclasses.replace(hardware["v5e"], name="v5e-slow", network_bytes_per_second=1e9)
    >>> own == hardware["v5e"], own.flops_per_second["bfloat16"]
    (False, 197000000000000.0)
    """

    name: str
    platform: str
    device_kind: str
    memory_bytes: int | None = None
    memory_bytes_per_second: float | None = None
    flops_per_second: Mapping[str, float] = dataclasses.field(default_factory=dict)
    link_bytes_per_second: float | None = None
    links: int = 0
    network_bytes_per_second: float | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    compiler_target: GpuCompilerTarget | None = None
    clock_hz: float | None = None
    link_latency_seconds: float | None = None
    network_latency_seconds: float | None = None
    host_bytes_per_second: float | None = None

    def __post_init__(self):
        for field in ("flops_per_second", "sources"):
            value = getattr(self, field)
            if not isinstance(value, Mapping):
                raise TypeError(f"{field} must be a mapping, but got {value!r}.")
            object.__setattr__(self, field, FrozenMapping(value))
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(
                f"Hardware cannot be named {self.name!r}, since targets are written 'name:shape'. Use letters, digits, "
                "'-', '_' and '.'."
            )
        if self.platform not in PLATFORMS:
            raise self._error("platform", f"be one of {', '.join(PLATFORMS)}")
        if not isinstance(self.device_kind, str) or not self.device_kind:
            raise self._error("device_kind", "be the device kind that JAX reports")
        for field in _NUMBERS:
            value = getattr(self, field)
            if value is not None and not _is_positive(value):
                raise self._error(field, "be a finite positive number, or None if unknown")
        if self.memory_bytes is not None and not isinstance(self.memory_bytes, numbers.Integral):
            raise self._error("memory_bytes", "be an integer")
        if isinstance(self.links, bool) or not isinstance(self.links, int) or self.links < 0:
            raise self._error("links", "be a number of links, 0 or more")
        for dtype, flops in self.flops_per_second.items():
            if dtype not in DTYPES or not _is_positive(flops):
                raise self._error("flops_per_second", f"have finite positive numbers for some of {', '.join(DTYPES)}")
        is_gpu_target = isinstance(self.compiler_target, GpuCompilerTarget)
        if self.compiler_target is not None and not (self.platform == "gpu" and is_gpu_target):
            raise self._error("compiler_target", "be a GpuCompilerTarget for a GPU, and None otherwise")
        for field in FIGURES:
            source = self.sources.get(field)
            if getattr(self, field) and not (isinstance(source, str) and source.strip()):
                raise self._error("sources", f"name a public source of {field}, such as a datasheet or a measurement")
        unknown = [field for field in self.sources if field not in FIGURES]
        if unknown:
            raise self._error("sources", f"have no {unknown[0]!r}. Figures are {', '.join(FIGURES)}")

    @property
    def recommended_compiler_options(self) -> Mapping[str, CompilerOptions]:
        """Sets of XLA options that others publish for this hardware, by name; pass one as `compiler_options` of a plan.

        Whether one helps depends on the model and the strategy: compare plans with and without it.

        Example:

        >>> options = hardware["v6e"].recommended_compiler_options["large_scoped_vmem"]
        >>> dict(options), "MaxText" in options.source
        ({'xla_tpu_scoped_vmem_limit_kib': 98304}, True)
        """
        generation = tpu_generation_of(self.device_kind) if self.platform == "tpu" else None
        return published_options(self.platform if generation is None else generation.name)

    def _error(self, field: str, rule: str) -> ValueError:
        return ValueError(f"Hardware {self.name!r} has {field}={getattr(self, field)!r}, which must {rule}.")


_NAMES = ("name", "platform", "device_kind", "sources")
FIGURES = tuple(field.name for field in dataclasses.fields(Hardware) if field.name not in _NAMES)
_NUMBERS = tuple(name for name in FIGURES if name not in ("flops_per_second", "links", "compiler_target"))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and 0 < float(value) < math.inf

"""`Hardware`: memory, compute and bandwidths of devices, each figure with its public source; and their registry."""

import dataclasses
import math
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keras_dist._report.tables import Table
from keras_dist.mesh.devices import Device
from keras_dist.mesh.tpu_generations import TPU_GENERATIONS, canonical_device_kind

PLATFORMS = ("tpu", "gpu", "cpu")
DTYPES = ("float32", "bfloat16", "float8", "int8")  # widest first

_FIGURES = (
    "memory_bytes",
    "memory_bytes_per_second",
    "flops_per_second",
    "link_bytes_per_second",
    "links",
    "network_bytes_per_second",
    "compiler_target",
)


class FrozenMapping(Mapping):
    """An immutable, hashable mapping."""

    def __init__(self, pairs: Mapping | Iterable[tuple[Any, Any]] = ()):
        self._values = dict(pairs)

    def __getitem__(self, key):
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def __hash__(self):
        return hash(frozenset(self._values.items()))

    def __repr__(self):
        return repr(self._values)


@dataclass(frozen=True)
class GpuCompilerTarget:
    """What XLA's compiler needs to know of a GPU that is not attached, named as in XLA's `GpuDeviceInfoProto`.

    Attributes:
        compute_capability: CUDA compute capability, `(major, minor)`.
        core_count: streaming multiprocessors.
        fpus_per_core: float32 units per streaming multiprocessor.
        clock_rate_ghz: highest clock rate, GHz.
        l2_cache_size: bytes.
        shared_memory_per_core: bytes.
        shared_memory_per_block_optin: bytes that one thread block can request.
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
        name: name in targets: `"v5e"`, `"h100"`.
        platform: `"tpu"`, `"gpu"` or `"cpu"`.
        device_kind: `jax.Device.device_kind`, such as `"TPU v5 lite"` or `"NVIDIA H100 80GB HBM3"`.
        memory_bytes: device memory in bytes: on TPUs what the compiler allots, on GPUs what CUDA reports. By default
            JAX allocates 75% of a GPU's; see XLA_PYTHON_CLIENT_MEM_FRACTION.
        memory_bytes_per_second: memory bandwidth.
        flops_per_second: peak of dense matrix multiplications by dtype (`"float32"`, `"bfloat16"`, `"float8"`,
            `"int8"`), as far as known. Float32 is at JAX's default precision: one bfloat16 pass on TPUs, TF32 on NVIDIA
            GPUs.
        link_bytes_per_second: bandwidth of one ICI link or NVLink in one direction.
        links: number of links: of a GPU, or of a TPU chip (4 in a 2D torus, 6 in a 3D torus), which several devices may
            share.
        network_bytes_per_second: bandwidth of one device to other slices or hosts, in one direction.
        sources: public source of each figure, by field name. Ignored in comparisons.
        compiler_target: what the compiler needs to know of a GPU; None for TPUs and CPUs.

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
        for field in ("memory_bytes", "memory_bytes_per_second", "link_bytes_per_second", "network_bytes_per_second"):
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
        for field in _FIGURES:
            source = self.sources.get(field)
            if getattr(self, field) and not (isinstance(source, str) and source.strip()):
                raise self._error("sources", f"name a public source of {field}, such as a datasheet or a measurement")
        unknown = [field for field in self.sources if field not in _FIGURES]
        if unknown:
            raise self._error("sources", f"have no {unknown[0]!r}. Figures are {', '.join(_FIGURES)}")

    def _error(self, field: str, rule: str) -> ValueError:
        return ValueError(f"Hardware {self.name!r} has {field}={getattr(self, field)!r}, which must {rule}.")


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and 0 < float(value) < math.inf


class HardwareRegistry(Mapping[str, Hardware]):
    """The hardware that targets can name, as a mapping from names to `Hardware`. Prints as a table.

    Example:

    >>> "h100" in hardware, hardware["h100"].device_kind
    (True, 'NVIDIA H100 80GB HBM3')
    """

    def __init__(self, entries: Iterable[Hardware] = ()):
        self._entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> Hardware:
        if name not in self._entries:
            raise KeyError(f"Unknown hardware {name!r}. Known: {', '.join(self)}; register(...) adds more.")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, hardware: Hardware, replace: bool = False) -> Hardware:
        """Adds hardware under its name.

        Args:
            hardware: The hardware to add.
            replace: Whether it may replace other figures of the same name.

        Returns:
            The hardware.

        Raises:
            TypeError: `hardware` is not a `Hardware`.
            ValueError: The name is taken and `replace` is false, or the hardware is a CPU not named "cpu".
        """
        if not isinstance(hardware, Hardware):
            raise TypeError(
                f"register() takes a Hardware, but got {hardware!r}. Make one with "
                "dataclasses.replace(keras_dist.hardware['h100'], name=...)."
            )
        known = self._entries.get(hardware.name)
        if known is not None and known != hardware and not replace:
            raise ValueError(
                f"Hardware {hardware.name!r} is already registered with other figures. Choose another name, or pass "
                "replace=True."
            )
        if hardware.platform == "cpu" and hardware.name != "cpu":
            raise ValueError(
                f"Cannot register CPU hardware as {hardware.name!r}: CPU targets are this machine's, named 'cpu'. Use "
                "that name, with replace=True."
            )
        self._entries[hardware.name] = hardware
        return hardware

    def of_device(self, device: Device) -> Hardware | None:
        """Returns the hardware of a `jax.Device` or a device of a target by its device kind, or None if unknown."""
        kind = canonical_device_kind(device.device_kind)
        candidates = [entry for entry in self.values() if entry.platform == device.platform]
        labelled = [entry for entry in candidates if kind == _label(entry)]
        return next(iter(labelled + [entry for entry in candidates if kind == entry.device_kind]), None)

    def device_kind_for(self, hardware: Hardware) -> str:
        """Returns a device kind by which `of_device` finds this hardware, even if other hardware has the same kind."""
        first = next((entry for entry in self.values() if entry.device_kind == hardware.device_kind), hardware)
        return hardware.device_kind if first.name == hardware.name else _label(hardware)

    def __repr__(self):
        return self._table().to_text()

    def _repr_html_(self) -> str:
        return self._table().to_html()

    def _table(self) -> Table:
        return Table(_COLUMNS, [_row(entry) for entry in self.values()])


def _label(hardware: Hardware) -> str:
    return f"{hardware.device_kind} ({hardware.name})"


_PEAKS = (f">TFLOP/s: {DTYPES[0]}", *(f">{dtype}" for dtype in DTYPES[1:]))
_COLUMNS = ("name", ">memory", ">HBM", *_PEAKS, ">links", ">network")


def _row(hardware: Hardware) -> list[str]:
    def rate(bytes_per_second: float | None) -> str:
        return "-" if bytes_per_second is None else f"{bytes_per_second / 1e9:g} GB/s"

    memory, peaks = hardware.memory_bytes, hardware.flops_per_second
    return [
        hardware.name,
        "-" if memory is None else f"{memory / 2**30:.2f} GiB",
        rate(hardware.memory_bytes_per_second),
        *(f"{peaks[dtype] / 1e12:g}" if dtype in peaks else "-" for dtype in DTYPES),
        f"{hardware.links} x {rate(hardware.link_bytes_per_second)}" if hardware.links else "-",
        rate(hardware.network_bytes_per_second),
    ]


_LIBTPU = "libtpu 0.0.42, a program that is too large for {}: 'exceeds available HBM ({:.2f}G)'"
_CLOUD = "Google Cloud, 'TPU {0}', https://cloud.google.com/tpu/docs/{0}"
_TPU_BOOK = "Austin et al., 'How to Scale Your Model' (2025), https://jax-ml.github.io/scaling-book/tpus"
_GPU_BOOK = "Austin et al., 'How to Scale Your Model' (2025), https://jax-ml.github.io/scaling-book/gpus"
_JOUPPI = (
    "Jouppi et al., 'A Domain-Specific Supercomputer for Training Deep Neural Networks', CACM 63(7), 2020, "
    "https://doi.org/10.1145/3360307"
)
_POD = "; the all-reduce bandwidth of a pod in {} agrees"
_BIDIRECTIONAL = "{}: bidirectional bandwidth of a chip, over its links and both directions"

# Name, GiB per device as libtpu reports it; per chip: HBM bytes/s, peak FLOP/s, bytes/s of an ICI link in one
# direction, network bytes/s. Gbit/s are divided by 8.
_TPUS = (
    ("v2", 7.48, 700e9, {"bfloat16": 46e12}, 496e9 / 8, None),
    ("v3", 15.48, 900e9, {"bfloat16": 123e12}, 656e9 / 8, None),
    ("v4", 30.75, 1200e9, {"bfloat16": 275e12, "int8": 275e12}, 45e9, 6.25e9),
    ("v5e", 15.75, 819e9, {"bfloat16": 197e12, "int8": 393e12}, 50e9, 6400e9 / 8 / 256),
    ("v5p", 95.74, 2765e9, {"bfloat16": 459e12, "float8": 459e12, "int8": 918e12}, 100e9, 50e9 / 8),
    ("v6e", 31.25, 1638e9, {"bfloat16": 918e12, "float8": 918e12, "int8": 1836e12}, 100e9, 12.5e9),
    ("tpu7x", 94.75, 7380e9, {"bfloat16": 2307e12, "float8": 4614e12}, 100e9, 100e9 / 8),
)

# Sources other than Google Cloud's page about the generation.
_TPU_SOURCES: dict[str, dict[str, str]] = {
    "v2": dict.fromkeys(_FIGURES[1:-1], _JOUPPI),
    "v3": {"link_bytes_per_second": _JOUPPI + _POD.format(_CLOUD.format("v3"))},
    "v4": {
        "link_bytes_per_second": _TPU_BOOK + _POD.format(_CLOUD.format("v4")),
        "network_bytes_per_second": _TPU_BOOK,
    },
    "v5e": {"network_bytes_per_second": _CLOUD.format("v5e") + ": bandwidth of a pod of 256 chips"},
    "v5p": {"flops_per_second": f"{_CLOUD.format('v5p')}; int8: {_TPU_BOOK}"},
    "v6e": {
        "flops_per_second": f"{_CLOUD.format('v6e')}; float8: {_CLOUD.format('tpu7x')}",
        "network_bytes_per_second": _CLOUD.format("tpu7x"),
    },
}


def _tpus() -> Iterator[Hardware]:
    for name, gibibytes, bandwidth, peaks, link, network in _TPUS:
        _, kind, devices, links, _ = TPU_GENERATIONS[name]
        page = _CLOUD.format(name) + (f", of a chip, which is {devices} devices" if devices > 1 else "")
        peaks = {"float32": peaks["bfloat16"], **peaks}  # by default one bfloat16 pass
        sources = {
            **dict.fromkeys(_FIGURES[1:-1], page),
            "link_bytes_per_second": _BIDIRECTIONAL.format(page),
            "memory_bytes": _LIBTPU.format(kind, gibibytes),
        }
        yield Hardware(
            name=name,
            platform="tpu",
            device_kind=kind,
            memory_bytes=round(gibibytes * 2**30),
            memory_bytes_per_second=bandwidth / devices,
            flops_per_second={dtype: flops / devices for dtype, flops in peaks.items()},
            link_bytes_per_second=link,
            links=links,
            network_bytes_per_second=None if network is None else network / devices,
            sources=sources | _TPU_SOURCES.get(name, {}),
        )


_XLA = (
    "OpenXLA, the device as CUDA describes it, "
    "https://github.com/openxla/xla/blob/main/xla/backends/gpu/target_config/specs/{}.txtpb"
)
_XLA_H100 = _XLA.format("h100_sxm")
_A100 = "NVIDIA, 'A100 Tensor Core GPU' datasheet, https://www.nvidia.com/en-us/data-center/a100/"
_H100 = "NVIDIA, 'H100 Tensor Core GPU Architecture' whitepaper, https://resources.nvidia.com/en-us-tensor-core"
_H200 = "NVIDIA, 'H200 Tensor Core GPU' datasheet, https://www.nvidia.com/en-us/data-center/h200/"
_B200 = "NVIDIA, 'DGX B200' datasheet, an eighth of it, https://www.nvidia.com/en-us/data-center/dgx-b200/"
_DGX = "NVIDIA, '{} User Guide': a port of {} Gbit/s for each GPU, https://docs.nvidia.com/dgx/"
_PYTORCH = "PyTorch on H200, when it runs out: 'GPU 0 has a total capacity of 139.80 GiB'"

_AMPERE = GpuCompilerTarget((8, 0), 108, 64, 1.41, 41943040, 167936, 166912)
_HOPPER = GpuCompilerTarget((9, 0), 132, 128, 1.98, 52428800, 233472, 232448)
_BLACKWELL = GpuCompilerTarget((10, 0), 148, 128, 1.965, 132644864, 233472, 232448)
_AMPERE_PEAKS = {"float32": 156e12, "bfloat16": 312e12, "int8": 624e12}
_HOPPER_PEAKS = {"float32": 494.7e12, "bfloat16": 989.4e12, "float8": 1978.9e12, "int8": 1978.9e12}
_BLACKWELL_PEAKS = {"float32": 1125e12, "bfloat16": 2250e12, "float8": 4500e12, "int8": 4500e12}

# In the order of the fields of `Hardware`: name, device kind, bytes, HBM bytes/s, peak dense FLOP/s (float32 as TF32),
# bytes/s of an NVLink in one direction, NVLinks, network bytes/s, compiler target. Below each: the sources of memory,
# memory bandwidth, peaks, network, compiler target.
_GPUS: tuple[tuple[tuple[Any, ...], tuple[str, ...]], ...] = (
    (
        ("a100", "NVIDIA A100-SXM4-80GB", 85100068864, 2039e9, _AMPERE_PEAKS, 25e9, 12, 200e9 / 8, _AMPERE),
        (_XLA.format("a100_sxm_80"), _A100, _A100, _DGX.format("DGX A100", 200), _XLA.format("a100_sxm_80")),
    ),
    (
        ("h100", "NVIDIA H100 80GB HBM3", 84942979072, 3352.32e9, _HOPPER_PEAKS, 25e9, 18, 400e9 / 8, _HOPPER),
        (_XLA_H100, _XLA_H100, _H100, _DGX.format("DGX H100/H200", 400), _XLA_H100),
    ),
    (
        ("h200", "NVIDIA H200", int(139.80 * 2**30), 4800e9, _HOPPER_PEAKS, 25e9, 18, 400e9 / 8, _HOPPER),
        (_PYTORCH, _H200, _H100, _DGX.format("DGX H100/H200", 400), _XLA.format("h200")),
    ),
    (
        ("b200", "NVIDIA B200", 191514411008, 8000e9, _BLACKWELL_PEAKS, 50e9, 18, 400e9 / 8, _BLACKWELL),
        (_XLA.format("b200"), _B200, _B200, _DGX.format("DGX B200", 400), _XLA.format("b200")),
    ),
)


def _gpus() -> Iterator[Hardware]:
    for (name, kind, *figures, compiler_target), sources in _GPUS:
        memory, bandwidth, peaks, network, target = sources
        values = (memory, bandwidth, peaks, _GPU_BOOK, _GPU_BOOK, network, target)
        of_figures: dict[str, str] = dict(zip(_FIGURES, values, strict=True))
        yield Hardware(name, "gpu", kind, *figures, sources=of_figures, compiler_target=compiler_target)


hardware = HardwareRegistry([*_tpus(), *_gpus(), Hardware("cpu", "cpu", "cpu")])

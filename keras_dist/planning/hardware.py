"""`Hardware`: what one device of a kind holds, computes and sends, each figure with its public source; the registry."""

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
    """A mapping that cannot be changed and can be hashed."""

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
    """What XLA's GPU compiler must know of a GPU that is not attached, named as in XLA's `GpuDeviceInfoProto`.

    Attributes:
        compute_capability: CUDA's, as `(major, minor)`.
        core_count: how many streaming multiprocessors there are.
        fpus_per_core: how many float32 units each of them has.
        clock_rate_ghz: their highest clock rate, GHz.
        l2_cache_size: bytes.
        shared_memory_per_core: bytes.
        shared_memory_per_block_optin: bytes that one block of threads can ask for.
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
    """What one JAX device of a kind can hold, compute and send: peaks that no program exceeds.

    A figure is None where it is not known, and what depends on it is then not known either. To plan for a part that is
    not built in, change one that is: `dataclasses.replace(hardware["h100"], name="h100-96gb", memory_bytes=...)`.

    Attributes:
        name: what targets call it: `"v5e"`, `"h100"`.
        platform: `"tpu"`, `"gpu"` or `"cpu"`.
        device_kind: what JAX calls such a device: `"TPU v5 lite"`, `"NVIDIA H100 80GB HBM3"`.
        memory_bytes: the device memory that programs can have, bytes: on TPUs what the compiler allots, on GPUs what
            CUDA reports. JAX takes 75% of a GPU's at its start unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
        memory_bytes_per_second: how fast a device reads and writes its memory, bytes per second.
        flops_per_second: FLOP per second of dense matrix multiplications, by dtype: `"float32"`, `"bfloat16"`,
            `"float8"`, `"int8"`, those that are known. Float32 is what JAX's default precision runs at: one bfloat16
            pass on TPUs, TF32 tensor cores on NVIDIA GPUs.
        link_bytes_per_second: one ICI link or NVLink in one direction, bytes per second.
        links: how many of them there are: of a TPU chip, which several devices may share, 4 on a 2D torus and 6 on a
            3D torus; of a GPU.
        network_bytes_per_second: what one device can send to other slices or hosts, in one direction, bytes per second.
        sources: the public source of each figure, by the name of its field. No part of what makes two equal.
        compiler_target: what the compiler of a GPU must know; None for TPUs and CPUs.

    Raises:
        ValueError: a figure that is NaN, infinite, zero or negative, one without a source, an unknown platform or
            dtype, or a name that a target could not spell.

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
                raise TypeError(f"{field} is a mapping. Received: {value!r}. Write a dict.")
            object.__setattr__(self, field, FrozenMapping(value))
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(
                "The name of hardware is made of letters, digits, '-', '_' and '.', since targets are written "
                f"'name:shape'. Received: name={self.name!r}. Write, for example, 'my-h100'."
            )
        if self.platform not in PLATFORMS:
            raise self._error(f"The platform is one of {', '.join(PLATFORMS)}", "platform", "Choose one of them")
        if not isinstance(self.device_kind, str) or not self.device_kind:
            raise self._error("The device kind is JAX's name of such a device", "device_kind", "Copy it from JAX")
        for field in ("memory_bytes", "memory_bytes_per_second", "link_bytes_per_second", "network_bytes_per_second"):
            value = getattr(self, field)
            if value is not None and not _is_figure(value):
                raise self._error(f"{field} is a finite number above 0", field, "Pass None where it is not known")
        if self.memory_bytes is not None and not isinstance(self.memory_bytes, numbers.Integral):
            raise self._error("memory_bytes is a whole number of bytes", "memory_bytes", "Round it down")
        if isinstance(self.links, bool) or not isinstance(self.links, int) or self.links < 0:
            raise self._error("links is a number of links, 0 where there are none", "links", "Count those of a chip")
        for dtype, flops in self.flops_per_second.items():
            if dtype not in DTYPES or not _is_figure(flops):
                raise self._error(
                    f"Peaks are finite numbers above 0 for {', '.join(DTYPES)}",
                    "flops_per_second",
                    "Leave out what is not known",
                )
        is_gpu_target = isinstance(self.compiler_target, GpuCompilerTarget)
        if self.compiler_target is not None and not (self.platform == "gpu" and is_gpu_target):
            raise self._error("compiler_target is a GpuCompilerTarget of a GPU", "compiler_target", "Pass None")
        for field in _FIGURES:
            source = self.sources.get(field)
            if getattr(self, field) and not (isinstance(source, str) and source.strip()):
                raise ValueError(
                    f"Each figure has a public source. Received: {self.name!r} with {field}, but "
                    f"sources[{field!r}]={source!r}. Name a datasheet or a measurement there."
                )
        unknown = [field for field in self.sources if field not in _FIGURES]
        if unknown:
            raise ValueError(
                f"Sources are those of figures. Received: {self.name!r} with sources of {', '.join(map(str, unknown))}."
                f" Figures are {', '.join(_FIGURES)}."
            )

    def _error(self, rule: str, field: str, way_out: str) -> ValueError:
        return ValueError(f"{rule}. Received: {field}={getattr(self, field)!r} for {self.name!r}. {way_out}.")


def _is_figure(value) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and 0 < float(value) < math.inf


class HardwareRegistry(Mapping[str, Hardware]):
    """The hardware that targets can name: a mapping from names that grows by `register`. It prints as a table.

    Example:

    >>> "h100" in hardware, hardware["h100"].device_kind
    (True, 'NVIDIA H100 80GB HBM3')
    """

    def __init__(self, entries: Iterable[Hardware] = ()):
        self._entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> Hardware:
        if name not in self._entries:
            raise KeyError(f"No hardware is named {name!r}. There are {', '.join(self)}; register others.")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, hardware: Hardware, replace: bool = False) -> Hardware:
        """Adds hardware under its name.

        Args:
            hardware: what to add.
            replace: whether it takes the place of other figures under the same name.

        Returns:
            The hardware.

        Raises:
            TypeError: no `Hardware`.
            ValueError: the name stands for other figures and `replace` is false, or CPUs under another name.
        """
        if not isinstance(hardware, Hardware):
            raise TypeError(
                f"Only a Hardware can be registered. Received: {hardware!r}. Make one with "
                "dataclasses.replace(keras_dist.hardware['h100'], name=...)."
            )
        known = self._entries.get(hardware.name)
        if known is not None and known != hardware and not replace:
            raise ValueError(
                f"A name stands for one set of figures. Received: {hardware.name!r}, which is registered with others. "
                "Choose another name, or pass replace=True."
            )
        if hardware.platform == "cpu" and hardware.name != "cpu":
            raise ValueError(
                f"The CPUs of a target are those of this machine, under the name 'cpu'. Received: {hardware.name!r}. "
                "Use that name, and replace=True."
            )
        self._entries[hardware.name] = hardware
        return hardware

    def of_device(self, device: Device) -> Hardware | None:
        """Returns the hardware of a device, attached or compiled for, by what JAX calls its kind; None if unknown.

        Args:
            device: a `jax.Device`, or a described one.
        """
        kind = canonical_device_kind(device.device_kind)
        candidates = [entry for entry in self.values() if entry.platform == device.platform]
        labelled = [entry for entry in candidates if kind == _label(entry)]
        return next(iter(labelled + [entry for entry in candidates if kind == entry.device_kind]), None)

    def device_kind_for(self, hardware: Hardware) -> str:
        """Returns the device kind that `of_device` takes for this hardware, where others may have the same."""
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


_COLUMNS = ("name", "memory", "HBM", f"TFLOP/s: {DTYPES[0]}", *DTYPES[1:], "links", "network")


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

# Where the sources are others than the page of Google Cloud about the generation.
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

# Name, device kind, bytes, HBM bytes/s, peaks of dense TF32, bfloat16 and so on, bytes/s of an NVLink in one
# direction, NVLinks, network bytes/s, what the compiler is told.
_GPUS = (
    ("a100", "NVIDIA A100-SXM4-80GB", 85100068864, 2039e9, _AMPERE_PEAKS, 25e9, 12, 200e9 / 8, _AMPERE),
    ("h100", "NVIDIA H100 80GB HBM3", 84942979072, 3352.32e9, _HOPPER_PEAKS, 25e9, 18, 400e9 / 8, _HOPPER),
    ("h200", "NVIDIA H200", int(139.80 * 2**30), 4800e9, _HOPPER_PEAKS, 25e9, 18, 400e9 / 8, _HOPPER),
    ("b200", "NVIDIA B200", 191514411008, 8000e9, _BLACKWELL_PEAKS, 50e9, 18, 400e9 / 8, _BLACKWELL),
)

# Of memory, memory bandwidth, peaks, the network, and what the compiler is told.
_GPU_SOURCES = {
    "a100": (_XLA.format("a100_sxm_80"), _A100, _A100, _DGX.format("DGX A100", 200), _XLA.format("a100_sxm_80")),
    "h100": (_XLA_H100, _XLA_H100, _H100, _DGX.format("DGX H100/H200", 400), _XLA_H100),
    "h200": (_PYTORCH, _H200, _H100, _DGX.format("DGX H100/H200", 400), _XLA.format("h200")),
    "b200": (_XLA.format("b200"), _B200, _B200, _DGX.format("DGX B200", 400), _XLA.format("b200")),
}


def _gpus() -> Iterator[Hardware]:
    for name, kind, memory, bandwidth, peaks, link, links, network, compiler_target in _GPUS:
        of_memory, of_bandwidth, of_peaks, of_network, of_target = _GPU_SOURCES[name]
        sources = (of_memory, of_bandwidth, of_peaks, _GPU_BOOK, _GPU_BOOK, of_network, of_target)
        yield Hardware(
            name=name,
            platform="gpu",
            device_kind=kind,
            memory_bytes=memory,
            memory_bytes_per_second=bandwidth,
            flops_per_second=peaks,
            link_bytes_per_second=link,
            links=links,
            network_bytes_per_second=network,
            compiler_target=compiler_target,
            sources=dict(zip(_FIGURES, sources, strict=True)),
        )


hardware = HardwareRegistry([*_tpus(), *_gpus(), Hardware("cpu", "cpu", "cpu")])

"""The figures of known GPUs, with their public sources."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from keras_dist.planning.hardware.figures import GpuCompilerTarget, Hardware

# ---------------------------------------------------------------------------------------------------------- sources

_BOOK = "Austin et al., 'How to Scale Your Model' (2025), https://jax-ml.github.io/scaling-book/gpus"
_NCCL = "NCCL, 'ncclTunerConstantsDefaults', https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc"
_XLA = (
    "OpenXLA, the device as CUDA describes it, "
    "https://github.com/openxla/xla/blob/main/xla/backends/gpu/target_config/specs/{}.txtpb"
)
_CUDA_GUIDE = (
    "; memory of a core: NVIDIA, 'CUDA C++ Programming Guide', 'Compute Capabilities', "
    "https://docs.nvidia.com/cuda/cuda-c-programming-guide/"
)
_SHEET = "NVIDIA, '{}' datasheet, https://www.nvidia.com/en-us/data-center/{}/"
_P100 = _SHEET.format("Tesla P100 for PCIe", "tesla-p100")
_V100 = _SHEET.format("V100 Tensor Core GPU", "v100")
_T4 = _SHEET.format("T4 Tensor Core GPU", "tesla-t4")
_A10 = _SHEET.format("A10 Tensor Core GPU", "products/a10-gpu")
_A10G = (
    "NVIDIA, 'A10G Tensor Core GPU' datasheet, "
    "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
)
_A100 = _SHEET.format("A100 Tensor Core GPU", "a100")
_L4 = _SHEET.format("L4 Tensor Core GPU", "l4")
_L40S = _SHEET.format("L40S", "l40s")
_H100 = "NVIDIA, 'H100 Tensor Core GPU Architecture' whitepaper, https://resources.nvidia.com/en-us-tensor-core"
_H100_NVL = _SHEET.format("H100 Tensor Core GPU", "h100")
_H100_NVL_BRIEF = (
    "NVIDIA, 'H100 NVL GPU' product brief, "
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/h100/PB-11773-001_v01.pdf"
)
_H200 = _SHEET.format("H200 Tensor Core GPU", "h200")
_GH200 = _SHEET.format("GH200 Grace Hopper Superchip", "grace-hopper-superchip")
_RTX_PRO = _SHEET.format("RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-blackwell-server-edition")
_RTX_BLACKWELL = (
    "NVIDIA, 'RTX Blackwell PRO GPU Architecture' whitepaper, of the Workstation Edition, whose clock is faster, "
    "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/"
    "NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
)
_B200 = "NVIDIA, 'DGX B200' datasheet, an eighth of it, https://www.nvidia.com/en-us/data-center/dgx-b200/"
_B300 = "NVIDIA, 'HGX B300' datasheet, an eighth of it, https://www.nvidia.com/en-us/data-center/hgx/"
_GB200 = "NVIDIA, 'GB200 NVL72' datasheet, a 72nd of it, https://www.nvidia.com/en-us/data-center/gb200-nvl72/"
_GB300 = "NVIDIA, 'GB300 NVL72' datasheet, a 72nd of it, https://www.nvidia.com/en-us/data-center/gb300-nvl72/"
_TURING = (
    "NVIDIA, 'Turing GPU Architecture' whitepaper, https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/"
    "technologies/turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
_AMPERE_GA102 = (
    "NVIDIA, 'Ampere GA102 GPU Architecture' whitepaper, "
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
_ADA = (
    "NVIDIA, 'Ada GPU Architecture' whitepaper, "
    "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
)
_FLOAT32_UNITS = "{}; bfloat16: XLA multiplies in float32, since no unit of this GPU multiplies bfloat16"


def _reported(gibibytes: float, gpu: str) -> tuple[int, str]:
    """The memory that CUDA reports, as PyTorch prints it: GDDR loses some of it to error correction."""
    source = f"PyTorch on {gpu}, when it runs out: 'GPU 0 has a total capacity of {gibibytes:.2f} GiB'"
    return int(gibibytes * 2**30), source


# ------------------------------------------------------------------------------------------------------------ links


class _Links(NamedTuple):
    """What joins the GPUs of a host: NVLinks, or PCIe, which counts as none. Bytes per second are in one direction."""

    links: int
    bytes_per_second: float
    latency_seconds: float
    source: str


def _nvlinks(links: int, bytes_per_second: float, source: str = _BOOK) -> _Links:
    return _Links(links, bytes_per_second, 3.4e-6, source)


def _pcie(generation: int, source: str) -> _Links:
    """PCIe with 16 lanes: 16 GB/s for the third generation, and twice that for each later one."""
    return _Links(0, 2e9 * 2**generation, 5.7e-6, f"{source}: half of PCIe's bandwidth in both directions")


class _Network(NamedTuple):
    bytes_per_second: float
    source: str


def _dgx(system: str, gigabits: float) -> _Network:
    source = f"NVIDIA, '{system} User Guide': a port of {gigabits:g} Gbit/s for each GPU, https://docs.nvidia.com/dgx/"
    return _Network(gigabits * 1e9 / 8, source)


_DGX_H100 = _dgx("DGX H100/H200", 400)

# ------------------------------------------------------------------------------------------------------ architectures

_TESLA_P100 = GpuCompilerTarget((6, 0), 56, 64, 1.3285, 4194304, 65536, 49152)
_TESLA_V100 = GpuCompilerTarget((7, 0), 80, 64, 1.53, 6291456, 98304, 98304)
_TESLA_T4 = GpuCompilerTarget((7, 5), 40, 64, 1.59, 4194304, 65536, 65536)
_GA100 = GpuCompilerTarget((8, 0), 108, 64, 1.41, 41943040, 167936, 166912)
_GA102_A10 = GpuCompilerTarget((8, 6), 72, 128, 1.695, 6291456, 102400, 101376)
_GA102_A10G = GpuCompilerTarget((8, 6), 80, 128, 1.71, 6291456, 102400, 101376)
_AD104 = GpuCompilerTarget((8, 9), 58, 128, 2.04, 50331648, 102400, 101376)
_AD102 = GpuCompilerTarget((8, 9), 142, 128, 2.52, 100663296, 102400, 101376)
_GH100 = GpuCompilerTarget((9, 0), 132, 128, 1.98, 52428800, 233472, 232448)
_GH100_NVL = GpuCompilerTarget((9, 0), 132, 128, 1.785, 52428800, 233472, 232448)
_GH100_PCIE = GpuCompilerTarget((9, 0), 114, 128, 1.755, 52428800, 233472, 232448)
_GB100 = GpuCompilerTarget((10, 0), 148, 128, 1.965, 132644864, 233472, 232448)
_GB100_GB200 = GpuCompilerTarget((10, 0), 152, 128, 2.062, 135528448, 233472, 232448)
_GB110 = GpuCompilerTarget((10, 3), 158, 128, 1.965, 135528448, 233472, 232448)
_GB110_GB300 = GpuCompilerTarget((10, 3), 152, 128, 2.07, 135528448, 233472, 232448)
_GB202 = GpuCompilerTarget((12, 0), 188, 128, 2.6, 134217728, 102400, 101376)

# Peak dense FLOP/s: float32 as TF32 where tensor cores have it; float16 as bfloat16 where it is not named.
_GA100_PEAKS = {"float32": 156e12, "bfloat16": 312e12, "int8": 624e12}
_GH100_PEAKS = {"float32": 494.7e12, "bfloat16": 989.4e12, "float8": 1978.9e12, "int8": 1978.9e12}
_GB100_PEAKS = {"float32": 1125e12, "bfloat16": 2250e12, "float8": 4500e12, "int8": 4500e12}

# ------------------------------------------------------------------------------------------------------------- GPUs


def _gpu(
    name: str,
    device_kind: str,
    memory: tuple[int, str],
    bandwidth: tuple[float, str],
    peaks: tuple[Mapping[str, float], str],
    links: _Links | None,
    network: _Network | None,
    compiler_target: tuple[GpuCompilerTarget, str],
) -> Hardware:
    """Returns a GPU. Each figure comes with its source. Links and network are None where a GPU has none of its own."""
    figures: dict[str, tuple[Any, str]] = {
        "memory_bytes": memory,
        "memory_bytes_per_second": bandwidth,
        "flops_per_second": ({"float16": peaks[0]["bfloat16"], **peaks[0]}, peaks[1]),
        "compiler_target": compiler_target,
    }
    if links is not None:
        figures |= {
            "links": (links.links, links.source),
            "link_bytes_per_second": (links.bytes_per_second, links.source),
            "link_latency_seconds": (links.latency_seconds, _NCCL),
        }
    if network is not None:
        figures |= {
            "network_bytes_per_second": (network.bytes_per_second, network.source),
            "network_latency_seconds": (14e-6, _NCCL),
        }
    values: dict[str, Any] = {figure: value for figure, (value, _) in figures.items()}
    sources = {figure: source for figure, (_, source) in figures.items()}
    return Hardware(name, "gpu", device_kind, sources=sources, **values)


def known_gpus() -> Iterator[Hardware]:
    """Yields the GPUs that notebooks and large clouds rent, oldest first."""
    yield _gpu(
        "p100",
        "Tesla P100-PCIE-16GB",
        _reported(15.89, "P100"),
        (732e9, _P100),
        ({"float32": 9.3e12, "bfloat16": 9.3e12, "float16": 18.7e12}, _FLOAT32_UNITS.format(_P100)),
        _pcie(3, _P100),
        None,
        (_TESLA_P100, f"{_XLA.format('p100')}; clock rate: {_P100}"),
    )
    volta_peaks = {"float32": 15.7e12, "bfloat16": 15.7e12, "float16": 125e12}, _FLOAT32_UNITS.format(_V100)
    for name, size, memory in (
        ("v100", 16, (16935682048, _XLA.format("v100"))),
        ("v100-32gb", 32, _reported(31.73, "V100")),
    ):
        yield _gpu(
            name,
            f"Tesla V100-SXM2-{size}GB",
            memory,
            (900e9, _V100),
            volta_peaks,
            _nvlinks(6, 25e9, _V100),
            None,
            (_TESLA_V100, _XLA.format("v100")),
        )
    yield _gpu(
        "t4",
        "Tesla T4",
        _reported(14.56, "T4"),
        (320e9, _T4),
        (
            {"float32": 8.1e12, "bfloat16": 8.1e12, "float16": 65e12, "int8": 130e12},
            _FLOAT32_UNITS.format(_T4),
        ),
        _pcie(3, _T4),
        None,
        (_TESLA_T4, _TURING + _CUDA_GUIDE),
    )
    yield _gpu(
        "a10",
        "NVIDIA A10",
        (22731 * 2**20, "llama.cpp on A10, when it starts: 'NVIDIA A10, compute capability 8.6, VRAM: 22731 MiB'"),
        (600e9, _A10),
        ({"float32": 62.5e12, "bfloat16": 125e12, "int8": 250e12}, _A10),
        _pcie(4, _A10),
        None,
        (_GA102_A10, f"{_A10}; {_AMPERE_GA102}{_CUDA_GUIDE}"),
    )
    yield _gpu(
        "a10g",
        "NVIDIA A10G",
        _reported(22.06, "A10G"),
        (600e9, _A10G),
        ({"float32": 35e12, "bfloat16": 70e12, "int8": 140e12}, _A10G),
        _pcie(4, _A10G),
        None,
        (_GA102_A10G, f"{_A10G}; {_AMPERE_GA102}{_CUDA_GUIDE}"),
    )
    for name, kind, memory, bandwidth, network in (
        ("a100", "SXM4-80GB", (85100068864, _XLA.format("a100_sxm_80")), 2039e9, _dgx("DGX A100", 200)),
        ("a100-40gb", "SXM4-40GB", (42331013120, _XLA.format("a100_sxm_40")), 1555e9, _dgx("DGX A100", 200)),
        ("a100-pcie", "80GB PCIe", _reported(79.14, "A100 80GB PCIe"), 1935e9, None),
    ):
        yield _gpu(
            name,
            f"NVIDIA A100{'-' if kind.startswith('SXM') else ' '}{kind}",
            memory,
            (bandwidth, _A100),
            (_GA100_PEAKS, _A100),
            _nvlinks(12, 25e9),
            network,
            (_GA100, _XLA.format("a100_sxm_80")),
        )
    yield _gpu(
        "l4",
        "NVIDIA L4",
        _reported(22.03, "L4"),
        (300e9, _L4),
        ({"float32": 60e12, "bfloat16": 121e12, "float8": 242.5e12, "int8": 242.5e12}, f"{_L4}, half of it: dense"),
        _pcie(4, _L4),
        None,
        (_AD104, _ADA + _CUDA_GUIDE),
    )
    yield _gpu(
        "l40s",
        "NVIDIA L40S",
        _reported(44.40, "L40S"),
        (864e9, _L40S),
        ({"float32": 183e12, "bfloat16": 362.05e12, "float8": 733e12, "int8": 733e12}, _L40S),
        _pcie(4, _L40S),
        None,
        (_AD102, f"{_L40S}; {_ADA}{_CUDA_GUIDE}"),
    )
    yield _gpu(
        "h100",
        "NVIDIA H100 80GB HBM3",
        (84942979072, _XLA.format("h100_sxm")),
        (3352.32e9, _XLA.format("h100_sxm")),
        (_GH100_PEAKS, _H100),
        _nvlinks(18, 25e9),
        _DGX_H100,
        (_GH100, _XLA.format("h100_sxm")),
    )
    yield _gpu(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        (84942979072, _XLA.format("h100_pcie")),
        (2039.04e9, _XLA.format("h100_pcie")),
        ({"float32": 378e12, "bfloat16": 756e12, "float8": 1513e12, "int8": 1513e12}, _H100),
        _nvlinks(12, 25e9, _H100),
        None,
        (_GH100_PCIE, _XLA.format("h100_pcie")),
    )
    yield _gpu(
        "h100-nvl",
        "NVIDIA H100 NVL",
        _reported(93.09, "H100 NVL"),
        (3938e9, _H100_NVL_BRIEF),
        (
            {"float32": 417.5e12, "bfloat16": 835.5e12, "float8": 1670.5e12, "int8": 1670.5e12},
            f"{_H100_NVL}, half of it: dense",
        ),
        _nvlinks(12, 25e9, _H100_NVL),
        None,
        (_GH100_NVL, f"{_XLA.format('h100_sxm')}; clock rate: {_H100_NVL_BRIEF}"),
    )
    yield _gpu(
        "h200",
        "NVIDIA H200",
        _reported(139.80, "H200"),
        (4800e9, _H200),
        (_GH100_PEAKS, _H100),
        _nvlinks(18, 25e9),
        _DGX_H100,
        (_GH100, _XLA.format("h200")),
    )
    yield _gpu(
        "gh200",
        "NVIDIA GH200 480GB",
        _reported(94.50, "GH200"),
        (4000e9, _GH200),
        (_GH100_PEAKS, _H100),
        None,
        None,
        (_GH100, f"{_GH200}, a GPU as that of H100: {_XLA.format('h100_sxm')}"),
    )
    yield _gpu(
        "b200",
        "NVIDIA B200",
        (191514411008, _XLA.format("b200")),
        (8000e9, _B200),
        (_GB100_PEAKS, _B200),
        _nvlinks(18, 50e9),
        _dgx("DGX B200", 400),
        (_GB100, _XLA.format("b200")),
    )
    yield _gpu(
        "gb200",
        "NVIDIA GB200",
        (197897748480, _XLA.format("gb200")),
        (8000e9, _GB200),
        (
            {"float32": 1250e12, "bfloat16": 2500e12, "float8": 5000e12, "int8": 5000e12},
            f"{_GB200}, and half: dense",
        ),
        _nvlinks(18, 50e9, _GB200),
        _dgx("DGX GB200", 400),
        (_GB100_GB200, _XLA.format("gb200")),
    )
    yield _gpu(
        "b300",
        "NVIDIA B300",
        (297021865984, _XLA.format("b300")),
        (8000e9, _B300),
        ({"float32": 1125e12, "bfloat16": 2250e12, "float8": 4500e12}, f"{_B300}, and half: dense"),
        _nvlinks(18, 50e9, _B300),
        _dgx("DGX B300", 800),
        (_GB110, _XLA.format("b300")),
    )
    yield _gpu(
        "gb300",
        "NVIDIA GB300",
        (297021079552, _XLA.format("gb300")),
        (8000e9, _GB300),
        ({"float32": 1250e12, "bfloat16": 2500e12, "float8": 5000e12}, f"{_GB300}, and half: dense"),
        _nvlinks(18, 50e9, _GB300),
        _dgx("DGX GB300", 800),
        (_GB110_GB300, _XLA.format("gb300")),
    )
    yield _gpu(
        "rtx-pro-6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        _reported(94.97, "RTX PRO 6000"),
        (1597e9, _RTX_PRO),
        ({"float32": 251.9e12, "bfloat16": 503.8e12, "float8": 1007.6e12, "int8": 1007.6e12}, _RTX_BLACKWELL),
        _pcie(5, _RTX_PRO),
        None,
        (_GB202, f"{_XLA.format('rtx6000pro')}{_CUDA_GUIDE}"),
    )

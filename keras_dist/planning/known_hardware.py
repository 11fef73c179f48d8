"""The figures of known TPUs and GPUs, with their public sources."""

from collections.abc import Iterator
from typing import Any

from keras_dist.mesh.tpu_generations import TPU_GENERATIONS
from keras_dist.planning.hardware_figures import FIGURES, GpuCompilerTarget, Hardware

_LIBTPU = "libtpu 0.0.42, a program that is too large for {}: 'exceeds available HBM ({:.2f}G)'"
_CLOUD = "Google Cloud, 'TPU {0}', https://cloud.google.com/tpu/docs/{0}"
_TPU_BOOK = "Austin et al., 'How to Scale Your Model' (2025), https://jax-ml.github.io/scaling-book/tpus"
_GPU_BOOK = "Austin et al., 'How to Scale Your Model' (2025), https://jax-ml.github.io/scaling-book/gpus"
_JOUPPI = (
    "Jouppi et al., 'A Domain-Specific Supercomputer for Training Deep Neural Networks', CACM 63(7), 2020, "
    "https://doi.org/10.1145/3360307"
)
_TPU_V4 = (
    "Jouppi et al., 'TPU v4: An Optically Reconfigurable Supercomputer for Machine Learning', ISCA 2023, "
    "https://arxiv.org/abs/2304.01433"
)
_HOP = "Austin et al., 'How to Scale Your Model' (2025), about 1 us, https://jax-ml.github.io/scaling-book/sharding"
_NCCL = "NCCL, 'ncclTunerConstantsDefaults', https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc"
_POD = "; the all-reduce bandwidth of a pod in {} agrees"
_NETWORK_LATENCY = (
    "OpenXLA, round trip between hosts of H100s, since none is published for TPUs, "
    "https://github.com/openxla/xla/blob/main/xla/service/gpu/model/sol_gpu_cost_model.cc"
)
_XPROF = (
    "OpenXLA XProf, 'GetTensorCoreFrequencyHz', "
    "https://github.com/openxla/xprof/blob/master/xprof/convert/xplane_to_utilization_viewer.cc"
)
_BIDIRECTIONAL = "{}: bidirectional bandwidth of a chip, over its links and both directions"

_OF_PAGE = tuple(name for name in FIGURES[1:] if name != "compiler_target")

# Name, GiB per device as libtpu reports it; per chip: HBM bytes/s, peak FLOP/s, bytes/s of an ICI link in one
# direction, network bytes/s; clock rate in Hz. Gbit/s are divided by 8.
_TPUS = (
    ("v2", 7.48, 700e9, {"bfloat16": 46e12}, 496e9 / 8, None, 0.7e9),
    ("v3", 15.48, 900e9, {"bfloat16": 123e12}, 656e9 / 8, None, 0.94e9),
    ("v4", 30.75, 1200e9, {"bfloat16": 275e12, "int8": 275e12}, 45e9, 6.25e9, 1.05e9),
    ("v5e", 15.75, 819e9, {"bfloat16": 197e12, "int8": 393e12}, 50e9, 6400e9 / 8 / 256, 1.5e9),
    ("v5p", 95.74, 2765e9, {"bfloat16": 459e12, "float8": 459e12, "int8": 918e12}, 100e9, 50e9 / 8, 1.75e9),
    ("v6e", 31.25, 1638e9, {"bfloat16": 918e12, "float8": 918e12, "int8": 1836e12}, 100e9, 12.5e9, 1.75e9),
    ("tpu7x", 94.75, 7380e9, {"bfloat16": 2307e12, "float8": 4614e12}, 100e9, 100e9 / 8, 1.9e9),
)

# Sources other than Google Cloud's page about the generation.
_TPU_SOURCES: dict[str, dict[str, str]] = {
    "v2": dict.fromkeys(_OF_PAGE[:-2], _JOUPPI),
    "v3": {"clock_hz": _JOUPPI, "link_bytes_per_second": _JOUPPI + _POD.format(_CLOUD.format("v3"))},
    "v4": {
        "clock_hz": _TPU_V4,
        "link_bytes_per_second": _TPU_BOOK + _POD.format(_CLOUD.format("v4")),
        "network_bytes_per_second": _TPU_BOOK,
    },
    "v5e": {"network_bytes_per_second": _CLOUD.format("v5e") + ": bandwidth of a pod of 256 chips"},
    "v5p": {"flops_per_second": f"{_CLOUD.format('v5p')}; int8: {_TPU_BOOK}"},
    "v6e": {
        "clock_hz": _XPROF,
        "flops_per_second": f"{_CLOUD.format('v6e')}; float8: {_CLOUD.format('tpu7x')}",
        "network_bytes_per_second": _CLOUD.format("tpu7x"),
    },
    "tpu7x": {"clock_hz": _XPROF},
}


def known_tpus() -> Iterator[Hardware]:
    for name, gibibytes, bandwidth, peaks, link, network, clock in _TPUS:
        _, kind, devices, links, _ = TPU_GENERATIONS[name]
        page = _CLOUD.format(name) + (f", of a chip, which is {devices} devices" if devices > 1 else "")
        peaks = {"float32": peaks["bfloat16"], **peaks}  # by default one bfloat16 pass
        sources = {
            **dict.fromkeys(_OF_PAGE, page),
            "link_bytes_per_second": _BIDIRECTIONAL.format(page),
            "memory_bytes": _LIBTPU.format(kind, gibibytes),
            "clock_hz": _TPU_BOOK,
            "link_latency_seconds": _HOP,
            "network_latency_seconds": _NETWORK_LATENCY,
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
            clock_hz=clock,
            link_latency_seconds=1e-6,
            network_latency_seconds=None if network is None else 31e-6,
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


def known_gpus() -> Iterator[Hardware]:
    for (name, kind, *figures, compiler_target), sources in _GPUS:
        memory, bandwidth, peaks, network, target = sources
        values = (memory, bandwidth, peaks, _GPU_BOOK, _GPU_BOOK, network, target)
        of_figures: dict[str, str] = dict(zip(FIGURES[:7], values, strict=True))
        yield Hardware(
            name,
            "gpu",
            kind,
            *figures,
            sources=of_figures | {"link_latency_seconds": _NCCL, "network_latency_seconds": _NCCL},
            compiler_target=compiler_target,
            link_latency_seconds=3.4e-6,
            network_latency_seconds=14e-6,
        )

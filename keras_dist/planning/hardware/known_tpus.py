"""The figures of known TPUs, with their public sources."""

from collections.abc import Iterator

from keras_dist.mesh.tpu_generations import TPU_GENERATIONS
from keras_dist.planning.hardware.figures import FIGURES, Hardware

_LIBTPU = "libtpu 0.0.42, a program that is too large for {}: 'exceeds available HBM ({:.2f}G)'"
_CLOUD = "Google Cloud, 'TPU {0}', https://cloud.google.com/tpu/docs/{0}"
_TPU_BOOK = "Austin et al., 'How to Scale Your Model' (2025), https://jax-ml.github.io/scaling-book/tpus"
_JOUPPI = (
    "Jouppi et al., 'A Domain-Specific Supercomputer for Training Deep Neural Networks', CACM 63(7), 2020, "
    "https://doi.org/10.1145/3360307"
)
_TPU_V4 = (
    "Jouppi et al., 'TPU v4: An Optically Reconfigurable Supercomputer for Machine Learning', ISCA 2023, "
    "https://arxiv.org/abs/2304.01433"
)
_HOP = "Austin et al., 'How to Scale Your Model' (2025), about 1 us, https://jax-ml.github.io/scaling-book/sharding"
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

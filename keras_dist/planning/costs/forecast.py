"""A forecast of step time: the schedule of the compiled program, with the times of its parts on some hardware."""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from keras_dist.planning.hardware.figures import DTYPES, Hardware
from keras_dist.planning.hardware.interconnect import Interconnect
from keras_dist.planning.hlo.collectives import Collective


def compute_seconds(hardware: Hardware, flops_by_dtype: Mapping[str, float]) -> float | None:
    """Returns the seconds of matrix multiplications, summed over HLO element types (`"bf16"`); None if unknown.

    A dtype without a known peak runs at that of the next wider dtype with one, float16 at that of bfloat16; dtypes
    wider than float32 run at float32's.
    """
    peaks = {element_type: _peak(hardware, element_type) for element_type, flops in flops_by_dtype.items() if flops}
    seconds = (flops_by_dtype[element_type] / peak for element_type, peak in peaks.items() if peak is not None)
    return None if None in peaks.values() else sum(seconds, 0.0)


def _peak(hardware: Hardware, element_type: str) -> float | None:
    """Peak FLOP per second for an HLO element type, or for the next wider dtype that has a known peak."""
    if element_type.startswith(("f8e", "f6e", "f4e")):
        wider = ("float8", "bfloat16", "float32")
    elif element_type in ("s8", "u8", "s4", "u4", "s2", "u2", "s1", "u1", "pred"):
        wider = ("int8", "bfloat16", "float32")
    elif element_type == "f16":
        wider = ("float16", "bfloat16", "float32")
    elif element_type == "bf16":
        wider = ("bfloat16", "float32")
    else:
        wider = DTYPES[:1]
    return next((hardware.flops_per_second[dtype] for dtype in wider if dtype in hardware.flops_per_second), None)


@dataclass(frozen=True)
class Forecast:
    """The time that one step probably takes on a device, in seconds.

    The device computes, or waits for collectives or for copies between memories. Meanwhile the next batch is copied to
    it. `seconds` is no less than that takes, nor than the lower bound on step time.

    Attributes:
        seconds: The whole step.
        compute_seconds: The device computes.
        exposed_seconds: It waits for collectives, which compute does not hide.
        copy_seconds: It waits for copies, such as prefetches from HBM to the on-chip memory of a TPU, or state that is
            in the memory of the host.
        estimated_seconds: The part of `compute_seconds` that the compiler estimated. For the rest, FLOP and bytes count
            at the rates that programs commonly reach.

    Example:

    >>> step = Forecast(0.5, compute_seconds=0.375, exposed_seconds=0.125, copy_seconds=0.0, estimated_seconds=0.1875)
    >>> step.estimated_share
    0.5
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    copy_seconds: float
    estimated_seconds: float

    @property
    def estimated_share(self) -> float:
        """Fraction of the compute time that comes from the compiler's own estimates."""
        return self.estimated_seconds / self.compute_seconds if self.compute_seconds else 0.0


@dataclass(frozen=True)
class _Reached:
    """Which fractions of the peak rates programs commonly reach, and the seconds that a kernel takes to start.

    The same figures serve all models and strategies. Sources:

    * TPU matrix multiplications: 90% of a v6e and 83% of a TPU7x, `microbenchmarks/` of
      https://github.com/AI-Hypercomputer/tpu-recipes; 80 to 90% of a v5e, "Matrix multiplication" in JAX's guide to
      Pallas. HBM: 83% of a v6e, the first of these. Few instructions need them, since XLA:TPU estimates most.
    * TPU attention: no measurement is published. For head size 128, the vector units take about as long for the softmax
      as the matrix units for the products, so half of the peak.
    * GPU matrix multiplications: 6.1 us and 767 of 989 TFLOP/s fit XLA's table of measurements on an H100,
      `default_matmul_perf_table`, with a median error of 7%.
    * GPU attention: about 55% of an H100 for cuDNN, head size 128, causal, forward and backward: Shah et al.,
      "FlashAttention-3" (2024), https://arxiv.org/abs/2407.08608, figures 5 and 6.
    * GPU memory and small kernels: 94% and 1.5 us on an H100: Austin et al., "How to Scale Your Model" (2025), "How to
      Think About GPUs", https://jax-ml.github.io/scaling-book/gpus, question 7.
    * ICI: 82% of the 200 GB/s of both directions of a v5p's link, 86% for a v5e: the same chapter, appendix B.
    * Link to the host: 50 of the 64 GB/s of an H200, "Plans against steps on a GPU" in docs/benchmarks.md. What is
      published of TPUs is a rate that is reached.
    * NVLink: 310 to 362 of 450 GB/s in XLA's table of measurements on 8 H100s, `default_collective_perf_table`.
    """

    matmul: float
    attention: float
    memory: float
    links: float
    host: float
    matmul_start_seconds: float
    start_seconds: float


_REACHED = {
    "tpu": _Reached(0.85, 0.5, memory=0.83, links=0.82, host=1.0, matmul_start_seconds=0.0, start_seconds=0.0),
    "gpu": _Reached(0.775, 0.55, memory=0.94, links=0.75, host=0.78, matmul_start_seconds=6.1e-6, start_seconds=1.5e-6),
}


class TimeModel:
    """How long the parts of a step take on some hardware, for devices in the shape of a mesh.

    * An instruction takes what the compiler estimates: on TPUs cycles over the clock rate; on GPUs the time of fusions
      without matrix multiplications, since XLA:GPU's cost model does not know tensor cores. Without an estimate it
      takes the longer of its FLOP and its memory traffic, at the rates in `_REACHED`. It never takes less than at peak
      rates.
    * A collective takes the latency of its hops, and its bytes over the bandwidth that programs commonly reach.
    """

    def __init__(self, hardware: Hardware, devices: np.ndarray):
        self._hardware, self._reached = hardware, _REACHED[hardware.platform]
        self._interconnect = Interconnect(hardware, devices)
        assert hardware.memory_bytes_per_second is not None
        self._memory_bytes_per_second = hardware.memory_bytes_per_second

    @classmethod
    def of(
        cls, hardware: Hardware | None, devices: np.ndarray, collectives: Iterable[Collective], host_bytes: float = 0.0
    ) -> "TimeModel | None":
        """Returns the times of a step with these collectives that copies so many bytes from the host and back.

        Returns None if a figure that they need is unknown.
        """
        if hardware is None or hardware.platform not in _REACHED or not hardware.flops_per_second:
            return None
        if hardware.memory_bytes_per_second is None or compute_seconds(hardware, {"f32": 1.0}) is None:
            return None
        if host_bytes and hardware.host_bytes_per_second is None:
            return None
        times = cls(hardware, devices)
        is_known = all(times._seconds(each) is not None for each in collectives if each.wire_bytes > 0)
        return times if is_known else None

    def of_work(
        self,
        flops: Mapping[str, float],
        memory_bytes: float,
        cycles: float | None = None,
        microseconds: float | None = None,
        is_attention: bool = False,
    ) -> tuple[float, bool]:
        """Returns the seconds of one instruction, and whether the compiler estimated them.

        `flops` are by HLO element type. `cycles` and `microseconds` are the compiler's own estimates, None if it wrote
        none: XLA:TPU writes the clock cycles of most fusions, XLA:GPU the time of fusions if asked to.
        """
        computing = compute_seconds(self._hardware, flops) or 0.0
        moving = memory_bytes / self._memory_bytes_per_second
        bound, reached = max(computing, moving), self._reached
        if cycles is not None and self._hardware.clock_hz is not None:
            return max(bound, cycles / self._hardware.clock_hz), True
        if microseconds and not flops:
            return max(bound, microseconds * 1e-6) + reached.start_seconds, True
        rate = reached.attention if is_attention else reached.matmul
        start = reached.matmul_start_seconds if flops else reached.start_seconds
        return max(computing / rate, moving / reached.memory) + start, False

    def of_copy(self, memory_bytes: float) -> float:
        return memory_bytes / self._memory_bytes_per_second

    def of_host_copy(self, host_bytes: float) -> float:
        """Returns the seconds of a copy from the host or back; 0 if the bandwidth of the link is unknown."""
        return host_bytes / ((self._hardware.host_bytes_per_second or math.inf) * self._reached.host)

    def of_collective(self, collective: Collective) -> float:
        seconds = self._seconds(collective)
        assert seconds is not None, collective
        return seconds

    def links(self, collective: Collective) -> Iterable[Hashable]:
        """Returns the links on which a collective waits for those before it."""
        return self._interconnect.links(collective.kind, collective.groups)

    def _seconds(self, collective: Collective) -> float | None:
        _, seconds_per_byte = self._interconnect.seconds_per_byte(collective.kind, collective.groups)
        latency = self._interconnect.latency(collective.kind, collective.groups)
        if seconds_per_byte is None or latency is None:
            return None
        return latency + collective.wire_bytes * seconds_per_byte / self._reached.links

"""How long matrix multiplications take at the peak rates of their dtypes."""

from collections.abc import Mapping

from keras_dist.planning.hardware.figures import DTYPES, Hardware


def compute_seconds(hardware: Hardware, flops_by_dtype: Mapping[str, float]) -> float | None:
    """Returns the seconds of matrix multiplications, summed over HLO element types (`"bf16"`); None if unknown.

    A dtype without a known peak runs at that of the next wider dtype with one, float16 at
    that of bfloat16; dtypes wider than float32 run at float32's.
    """
    seconds = 0.0
    for element_type, flops in flops_by_dtype.items():
        if flops:
            peak = _peak(hardware, element_type)
            if peak is None:
                return None
            seconds += flops / peak
    return seconds


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

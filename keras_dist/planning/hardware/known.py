"""The figures of known GPUs and TPUs, read from `gpus.toml` and `tpus.toml`, which have their public sources."""

import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any

from keras_dist.planning.hardware.figures import GpuCompilerTarget, Hardware


def known_hardware() -> Iterator[Hardware]:
    """Yields the GPUs and TPUs that notebooks and large clouds rent."""
    for platform in ("tpu", "gpu"):
        text = resources.files("keras_dist.planning.hardware").joinpath(f"{platform}s.toml").read_text()
        for name, entry in tomllib.loads(text).items():
            kind = entry.pop("device_kind")
            figures: dict[str, Any] = {figure: each["value"] for figure, each in entry.items()}
            if target := figures.get("compiler_target"):
                capability = tuple(target.pop("compute_capability"))
                figures["compiler_target"] = GpuCompilerTarget(capability, **target)
            sources = {figure: each["source"] for figure, each in entry.items()}
            yield Hardware(name, platform, kind, sources=sources, **figures)

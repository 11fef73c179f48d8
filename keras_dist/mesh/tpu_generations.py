"""What distinguishes the generations of TPUs for meshes: their device kinds, and the shapes of their slices."""

import math
from typing import NamedTuple


class TpuGeneration(NamedTuple):
    name: str  # in topologies such as "v5e:4x4", as libtpu spells them
    device_kind: str  # `jax.Device.device_kind`
    devices_per_chip: int
    links_per_chip: int  # ICI links: 4 where slices are 2D tori, 6 where they are 3D tori
    largest_slice: int  # chips

    @property
    def is_2d(self) -> bool:
        return self.links_per_chip == 4

    @property
    def longest_side(self) -> int:
        """The most chips along one side of a 2D slice; only a side of this length closes to a ring."""
        return math.isqrt(self.largest_slice)


# Sources: device kinds and devices per chip: `jax.experimental.topologies` with libtpu 0.0.42, and for TPU v4 JAX's
# default of one device per chip ("megacore"). Links and largest slices ("TPU Pod size"):
# https://cloud.google.com/tpu/docs/{v3,v4,v5e,v5p,v6e,tpu7x}; v2: Jouppi et al., CACM 63(7), 2020. Rings: Austin et
# al., "How to Scale Your Model" (2025), https://jax-ml.github.io/scaling-book/tpus.
TPU_GENERATIONS = {
    generation.name: generation
    for generation in (
        TpuGeneration("v2", "TPU v2", 2, 4, 256),
        TpuGeneration("v3", "TPU v3", 2, 4, 1024),
        TpuGeneration("v4", "TPU v4", 1, 6, 4096),
        TpuGeneration("v5e", "TPU v5 lite", 1, 4, 256),
        TpuGeneration("v5p", "TPU v5", 1, 6, 8960),
        TpuGeneration("v6e", "TPU v6 lite", 1, 4, 256),
        TpuGeneration("tpu7x", "TPU7x", 2, 6, 9216),
    )
}

# JAX also knows these chips by other names.
_ALIASES = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite"}


def canonical_device_kind(device_kind: str) -> str:
    """Returns the usual device kind where JAX has several names for the same chip, such as `"TPU v5e"`."""
    return _ALIASES.get(device_kind, device_kind)


def tpu_generation_of(device_kind: str) -> TpuGeneration | None:
    kind = canonical_device_kind(device_kind)
    return next((each for each in TPU_GENERATIONS.values() if each.device_kind == kind), None)

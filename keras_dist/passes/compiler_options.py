"""Options of XLA with which it computes right numbers.

XLA:CPU of JAX 0.11 and 0.12 fuses some convolutions in bfloat16, the layers between them and a mean of the result, as
at the end of a network for images, into one call of its library YNNPACK, which computes NaN. So an option restricts
that library to single products and convolutions.
"""

import jax
from jax.sharding import Mesh

_SINGLE_CALLS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,"
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Returns the options, by name, with which XLA compiles right numbers for the devices of a mesh."""
    fuses_too_much = (0, 11) <= jax.__version_info__ < (0, 13) and mesh.devices.flat[0].platform == "cpu"
    return _SINGLE_CALLS if fuses_too_much else {}

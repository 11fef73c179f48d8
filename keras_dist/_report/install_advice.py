"""The commands that messages advise, to install what this package uses and does not require."""

import importlib.metadata
import importlib.util
import pathlib
import re

# The oldest supported versions, and what the extras that messages name install, as in pyproject.toml.
OLDEST = {"keras": "3.15", "jax": "0.10.2"}
EXTRAS = {
    "checkpoint": "orbax-checkpoint>=0.12",
    "cuda12": "jax[cuda12]",
    "cuda13": "jax[cuda13]",
    "hub": "keras-hub",
    "plot": "matplotlib",
    "tpu": "jax[tpu]",
}
_CUDA_13_DRIVER = 580  # the oldest. Source: https://docs.jax.dev/en/latest/installation.html
_DRIVER_FILE = pathlib.Path("/proc/driver/nvidia/version")


def install_command(extra: str) -> str:
    """Returns the command that installs an extra of this package, quoted for any shell.

    A package that comes from an index has the extra there. One that comes from a clone, a file or a URL may be on no
    index, and a folder in PYTHONPATH is not installed at all. What the extra requires can be installed beside them all.

    >>> install_command("tpu")
    'pip install "jax[tpu]"'
    """
    return f'pip install "keras-dist[{extra}]"' if _is_from_index() else f'pip install "{EXTRAS[extra]}"'


def cuda_extra(by_cuda_13: bool = True) -> str:
    """Returns the extra for NVIDIA GPUs: that of JAX's installed plugin, else of the newest CUDA that can be used.

    `by_cuda_13` is whether CUDA 13 supports the GPUs.
    """
    for extra in ("cuda12", "cuda13"):
        if importlib.util.find_spec(f"jax_{extra}_plugin"):
            return extra
    text = _DRIVER_FILE.read_text() if _DRIVER_FILE.exists() else ""
    driver = re.search(r"\b(\d{3,})\.\d", text)  # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  ..."
    has_driver = driver is None or int(driver[1]) >= _CUDA_13_DRIVER
    return "cuda13" if by_cuda_13 and has_driver else "cuda12"


def _is_from_index() -> bool:
    """Returns whether this package was installed by its name: installers record the origin of all others (PEP 610)."""
    try:
        return importlib.metadata.distribution("keras-dist").read_text("direct_url.json") is None
    except importlib.metadata.PackageNotFoundError:
        return False

"""What can be found out about a machine: versions, environment, hardware, and the devices that JAX finds."""

import contextlib
import dataclasses
import glob
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jax._src import hardware_utils  # public JAX does not say what a host has before it starts its devices

from keras_dist._report.install_advice import cuda_extra

TIMEOUT = 120  # seconds for JAX to create its devices; a pod slice takes a minute

PACKAGES = (
    "keras-dist",
    "keras",
    "jax",
    "jaxlib",
    "numpy",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "libtpu",
    "orbax-checkpoint",
)
VARIABLES = (
    "KERAS_BACKEND",
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "NPROC",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "CUDA_VISIBLE_DEVICES",
    "TPU_VISIBLE_DEVICES",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK",
)


@dataclasses.dataclass(frozen=True)
class SystemFacts:
    """A machine as a program would find it.

    Attributes:
        python: Version of Python.
        versions: Of installed packages, by name.
        environment: The variables that are set, of those that matter.
        cores: Number of CPU cores that this process may use.
        gpus: Number of NVIDIA GPUs that the driver shows.
        tpus: Number of TPU chips that the host shows.
        cuda_extra: The extra that installs JAX for NVIDIA GPUs here, "cuda12" or "cuda13".
        devices: What `device_facts.py` prints of each device; empty if JAX could not create any.
        longest_link: The longest link between neighbors in JAX's order of devices.
        output: What JAX wrote to standard error.
        failure: Why there are no devices; None if there are.
    """

    python: str
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    cores: int
    gpus: int = 0
    tpus: int = 0
    cuda_extra: str = "cuda13"
    devices: Sequence[Mapping[str, Any]] = ()
    longest_link: str | None = None
    output: str = ""
    failure: str | None = None

    @property
    def platform(self) -> str | None:
        """Platform of the devices, None without any."""
        return self.devices[0]["platform"] if self.devices else None


def collect(keras_backend: str | None) -> SystemFacts:
    """Returns the facts of this machine, given what KERAS_BACKEND was before keras_dist was imported.

    JAX creates its devices in another process.
    """
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    variables = {**os.environ, "KERAS_BACKEND": keras_backend}
    facts = SystemFacts(
        python=platform.python_version(),
        versions=versions,
        environment={name: value for name in VARIABLES if (value := variables.get(name)) is not None},
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpus=len(glob.glob("/dev/nvidia[0-9]*")),
        cuda_extra=cuda_extra(),
        tpus=hardware_utils.num_available_tpu_chips_and_device_id()[0],
    )
    command = [sys.executable, "-m", "keras_dist.monitoring.device_facts"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return dataclasses.replace(facts, failure=f"JAX did not create its devices within {TIMEOUT} seconds")
    if done.returncode != 0:
        return dataclasses.replace(facts, output=done.stderr, failure=_reason(done.stderr))
    return dataclasses.replace(facts, output=done.stderr, **json.loads(done.stdout.splitlines()[-1]))


def _reason(output: str) -> str:
    """Returns the line of a process's output that tells why it ended.

    >>> _reason("F1125 04:44 7 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_a=1\\n*** Check failure")
    'Unknown flag in XLA_FLAGS: --xla_a=1'
    """
    if flag := re.search(r"Unknown flag.*", output):
        return flag[0]
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no output")

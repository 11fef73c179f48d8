"""What can be found out about a machine: versions, environment, hardware, and the devices that JAX finds.

As a program, this file prints the devices as one line of JSON. It has a process of its own, because creating devices
may abort the process (unknown XLA flags), hang (a TPU that another process uses), or claim memory.
"""

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

import jax
from jax._src import hardware_utils  # public JAX does not say what a host has before it starts its devices

from keras_dist._report.install_advice import cuda_extra
from keras_dist.mesh.devices import Device, as_device_array, device_name
from keras_dist.mesh.topology import longest_links
from keras_dist.planning.hardware.registry import hardware, links_text

TIMEOUT = 120  # seconds for JAX to create its devices; a pod slice takes a minute

_PACKAGES = (
    *("keras-dist", "keras", "jax", "jaxlib", "numpy"),
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("libtpu", "orbax-checkpoint"),
)
_VARIABLES = (
    *("KERAS_BACKEND", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "NPROC"),
    *("XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_DEVICES"),
    *("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"),
)


@dataclasses.dataclass(frozen=True)
class SystemFacts:
    python: str  # its version
    versions: Mapping[str, str]  # of installed packages, by name
    environment: Mapping[str, str]  # the variables that are set, of those that matter
    cores: int  # CPU cores that this process may use
    gpus: int = 0  # NVIDIA GPUs that the driver shows
    tpus: int = 0  # TPU chips that the host shows
    cuda_extra: str = "cuda13"  # the extra that installs JAX for NVIDIA GPUs here, or "cuda12"
    devices: Sequence[Mapping[str, Any]] = ()  # `device_facts` of each; empty if JAX could not create any
    longest_link: str | None = None  # between neighbors in JAX's order of devices
    output: str = ""  # what JAX wrote to standard error
    failure: str | None = None  # why there are no devices

    @property
    def platform(self) -> str | None:
        return self.devices[0]["platform"] if self.devices else None


def collect(keras_backend: str | None) -> SystemFacts:
    """Returns the facts of this machine, given what KERAS_BACKEND was before keras_dist was imported."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    variables = {**os.environ, "KERAS_BACKEND": keras_backend}
    facts = SystemFacts(
        python=platform.python_version(),
        versions=versions,
        environment={name: value for name in _VARIABLES if (value := variables.get(name)) is not None},
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpus=len(glob.glob("/dev/nvidia[0-9]*")),
        cuda_extra=cuda_extra(),
        tpus=hardware_utils.num_available_tpu_chips_and_device_id()[0],
    )
    command = [sys.executable, "-m", "keras_dist.monitoring.system_facts"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return dataclasses.replace(facts, failure=f"JAX did not create its devices within {TIMEOUT} seconds")
    if done.returncode != 0:
        return dataclasses.replace(facts, output=done.stderr, failure=_reason(done.stderr))
    return dataclasses.replace(facts, output=done.stderr, **json.loads(done.stdout.splitlines()[-1]))


def collect_devices() -> dict[str, Any]:
    """Returns the devices of this process, and the longest link between neighbors in JAX's order."""
    devices = jax.devices()
    (longest,) = longest_links(as_device_array(devices))
    return {"devices": [device_facts(device) for device in devices], "longest_link": str(longest)}


def device_facts(device: Device) -> dict[str, Any]:
    known = hardware.of_device(device)
    memory = device.memory_stats() or {}
    return {
        "name": device_name(device),
        "kind": device.device_kind,
        "platform": device.platform,
        "process": device.process_index,
        "hardware": None if known is None or device.platform == "cpu" else known.name,
        "links": None if known is None else links_text(known),
        "memory_bytes": memory.get("bytes_limit"),
        "used_bytes": memory.get("bytes_in_use"),
    }


def _reason(output: str) -> str:
    """Returns the line of a process's output that tells why it ended.

    >>> _reason("F1125 04:44 7 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_a=1\\n*** Check failure")
    'Unknown flag in XLA_FLAGS: --xla_a=1'
    """
    if flag := re.search(r"Unknown flag.*", output):
        return flag[0]
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no output")


if __name__ == "__main__":
    print(json.dumps(collect_devices()))

"""A program that prints the devices that JAX finds, as one line of JSON, for `keras-dist doctor`.

It has a process of its own, because creating devices may abort the process (unknown XLA flags), hang (a TPU that
another process uses), or claim memory.
"""

import json
from typing import Any

import jax

from keras_dist.mesh.devices import Device, as_device_array, device_name
from keras_dist.mesh.topology import longest_links
from keras_dist.planning.hardware.registry import hardware, links_text


def collect() -> dict[str, Any]:
    """Returns the devices of this process, and the longest link between neighbors in JAX's order."""
    devices = jax.devices()
    (longest,) = longest_links(as_device_array(devices))
    return {"devices": [_facts_of(device) for device in devices], "longest_link": str(longest)}


def _facts_of(device: Device) -> dict[str, Any]:
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


if __name__ == "__main__":
    print(json.dumps(collect()))

"""Time to create a mesh that is ordered by links, for 8 to 16,384 mock devices.

* plain: a `jax.sharding.Mesh` of the reshaped devices.
* mesh_utils: a `jax.sharding.Mesh` of JAX's `create_device_mesh`, or of `create_hybrid_device_mesh` with the same axes
  across slices, as in eformer's `create_mesh`.
* ours: `keras_dist.create_mesh`, which also returns a `jax.sharding.Mesh`.
* DeviceMesh: `keras_dist.create_device_mesh`, lowered.

The methods take turns. JAX caches meshes, so the names of the axes differ from turn to turn.

Run: python benchmarks/mesh_creation.py [--turns 15]
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd

kd.simulate_devices(1)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import mesh_utils  # noqa: E402

# Devices, the shape of the mesh, and the degree of each axis across slices or hosts.
CLUSTERS = {
    "v3:2x2": (kd.mock_tpus("v3:2x2"), (2, 4), None),
    "v4:4x4x4": (kd.mock_tpus("v4:4x4x4"), (4, 16), None),
    "16 hosts of 8 GPUs": (kd.mock_gpus(16, 8), (16, 8), (16, 1)),
    "v5e:16x16": (kd.mock_tpus("v5e:16x16"), (32, 8), None),
    "2 x v5e:16x16": (kd.mock_tpus("v5e:16x16", slices=2), (64, 8), (2, 1)),
    "v5p:8x16x16": (kd.mock_tpus("v5p:8x16x16"), (128, 16), None),
    "2,048 hosts of 8 GPUs": (kd.mock_gpus(2048, 8), (2048, 8), (2048, 1)),
    "4 x v5p:16x16x16": (kd.mock_tpus("v5p:16x16x16", slices=4), (1024, 16), (4, 1)),
}


def methods(devices: list, shape: tuple, dcn: tuple | None) -> dict:
    """Returns functions that create the mesh, given the names of the axes."""

    def plain(names):
        return jax.sharding.Mesh(np.array(devices).reshape(shape), names)

    def by_mesh_utils(names):
        options = {"allow_split_physical_axes": True}
        if dcn is None:
            array = mesh_utils.create_device_mesh(shape, devices, **options)
        else:
            inner = [size // part for size, part in zip(shape, dcn, strict=True)]
            array = mesh_utils.create_hybrid_device_mesh(inner, dcn, devices, **options)
        return jax.sharding.Mesh(array, names)

    def ours(names):
        return kd.create_mesh(shape, names)

    def device_mesh(names):
        return kd.create_device_mesh(shape, devices, axis_names=names).backend_mesh

    return {"plain": plain, "mesh_utils": by_mesh_utils, "ours": ours, "DeviceMesh": device_mesh}


def main() -> None:
    """Prints a table of times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="number of measurements of each method")
    turns = parser.parse_args().turns
    print(f"medians of {turns} turns; a ratio is the median of the ratios of each turn")
    columns = ("mesh_utils (ms)", "ours/mesh_utils", "ours/plain", "DeviceMesh/mesh_utils")
    print(f"{'cluster':24}{'devices':>8}", *(f"{column:>16}" for column in columns))
    all_devices = jax.devices
    for cluster, (devices, shape, dcn) in CLUSTERS.items():
        jax.devices = lambda *_, devices=devices: devices  # create_mesh uses all devices of JAX
        times: dict[str, list[float]] = {}
        try:
            for turn in range(turns):
                for method, make in methods(devices, shape, dcn).items():
                    begin = time.perf_counter()
                    mesh = make((f"data{turn}{method}", "model"))
                    times.setdefault(method, []).append(time.perf_counter() - begin)
                    assert mesh.devices.shape == shape
        finally:
            jax.devices = all_devices
        milliseconds = 1e3 * statistics.median(times["mesh_utils"])
        ratios = [
            statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))
            for one, other in (("ours", "mesh_utils"), ("ours", "plain"), ("DeviceMesh", "mesh_utils"))
        ]
        print(f"{cluster:24}{len(devices):8}", *(f"{number:16.2f}" for number in (milliseconds, *ratios)))


if __name__ == "__main__":
    main()

"""Texts of `keras_dist/mesh`."""

from unittest import mock

import jax

import keras_dist as kd
from keras_dist.mesh import device_mesh
from keras_dist.mesh.device_mesh import as_auto_mesh, as_device_mesh


def explicit_mesh():
    return kd.DeviceMesh.from_jax_mesh(jax.make_mesh((2, 4), ("data", "model")))


def mesh_without_devices():
    mesh = kd.DeviceMesh((8,), ["data"], jax.devices())
    with mock.patch.object(device_mesh, "is_alive", return_value=False):
        return str(mesh.backend_mesh)


def mesh_on_accelerators():
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        kd.create_device_mesh("data:4,model:4")


CASES = {
    "axes that need more devices than there are": lambda: kd.create_device_mesh("data:3,model:4"),
    "axes that need fewer devices than there are": lambda: kd.create_device_mesh("data:2,model:2"),
    "axes that do not fit the given devices": lambda: kd.DeviceMesh("data:2,model:2", devices=["cpu:0"]),
    "a size that does not divide the devices": lambda: kd.create_device_mesh("data:-1,model:3"),
    "no devices": lambda: kd.create_device_mesh("data:-1", devices=[]),
    "more devices requested than there are": lambda: kd.create_device_mesh("data:-1", devices=9),
    "no axes": lambda: kd.create_device_mesh({}),
    "axes without names": lambda: kd.create_device_mesh((2, 4)),
    "names as one text": lambda: kd.create_device_mesh((2, 4), axis_names="data,model"),
    "fewer names than sizes": lambda: kd.create_device_mesh((2, 4), axis_names=["data"]),
    "other names than in the axes": lambda: kd.create_device_mesh("data:8", axis_names=["model"]),
    "an axis name that is used twice": lambda: kd.create_device_mesh("data:2,data:4"),
    "an axis name that is not a string": lambda: kd.create_device_mesh({2: 8}),
    "an axis of size 0": lambda: kd.create_device_mesh("data:0,model:8"),
    "an axis size that is not an integer": lambda: kd.create_device_mesh({"data": 8.0}),
    "two axes of size -1": lambda: kd.create_device_mesh("data:-1,model:-1"),
    "text that is not a list of axes": lambda: kd.create_device_mesh("data=2,model=4"),
    "sizes and pairs mixed": lambda: kd.create_device_mesh([("data", 2), 4]),
    "axes as arguments": lambda: kd.create_device_mesh(data=2, model=4),
    "a number in place of axes": lambda: kd.create_device_mesh(8),
    "too many axes": lambda: kd.create_device_mesh([(f"axis{i}", 1) for i in range(33)]),
    "an unknown axis in dcn": lambda: kd.create_device_mesh("data:8", dcn="slice"),
    "an axis named twice in dcn": lambda: kd.create_device_mesh("data:8", dcn=["data", "data"]),
    "degrees of dcn that are not the number of slices": lambda: kd.create_device_mesh(
        "data:4,model:2", kd.mock_tpus("v5e:2x2", slices=2), dcn={"data": 4}
    ),
    "a degree of dcn that does not divide its axis": lambda: kd.create_device_mesh(
        "data:3,model:8", kd.mock_tpus("v5e:4x3", slices=2), dcn={"data": 2}
    ),
    "dcn with slices of unequal size": lambda: kd.create_device_mesh(
        "data:3,model:2", kd.mock_tpus("v5e:2x2", slices=2)[:6], dcn="data"
    ),
    "a device in a mesh twice": lambda: kd.DeviceMesh("data:2", devices=["cpu:0", "cpu:0"]),
    "devices that are not a list": lambda: kd.DeviceMesh("data:1", devices="cpu:0"),
    "devices of two types": lambda: kd.create_device_mesh("data:8", kd.mock_gpus(1, 4) + kd.mock_tpus("v5e:2x2")),
    "an unknown device name": lambda: kd.DeviceMesh("data:1", devices=["cpu:99"]).backend_mesh,
    "a device type that is not available": lambda: kd.list_devices("tpu"),
    "a device type that is not a string": lambda: kd.list_devices(3),
    "an unknown axis type": lambda: kd.create_device_mesh("data:8", axis_types="automatic"),
    "an axis type that is not a name": lambda: kd.create_device_mesh("data:8", axis_types=3),
    "too many axis types": lambda: kd.create_device_mesh("data:8", axis_types=["auto", "auto"]),
    "a mesh with explicit axes for a distribution": lambda: as_auto_mesh(explicit_mesh()),
    "a mesh whose devices are gone": mesh_without_devices,
    "a value that is not a mesh": lambda: as_device_mesh("data:8"),
    "a value that is not a mesh of JAX": lambda: kd.DeviceMesh.from_jax_mesh("data:8"),
    "simulated devices after JAX has started": lambda: kd.simulate_devices(4),
    "zero simulated devices": lambda: kd.simulate_devices(0),
    "a number of simulated devices that is not an integer": lambda: kd.simulate_devices("8"),
    "an unknown TPU topology": lambda: kd.mock_tpus("v9:4x4"),
    "a number of GPU hosts below one": lambda: kd.mock_gpus(0),
    "a mesh": lambda: repr(kd.create_device_mesh("data:2,model:-1")),
    "a mesh of some devices": lambda: repr(kd.create_device_mesh("data:2", devices=2)),
    "a mesh with explicit axes": lambda: repr(explicit_mesh()),
    "a table of a mesh": lambda: kd.create_device_mesh("data:2,model:4", kd.mock_tpus("v5e:2x2", slices=2)).picture(),
    "a manager's mesh of too many devices": lambda: kd.DeviceMeshManager.create_data_parallel_mesh(16),
    "a manager's mesh that leaves devices idle": lambda: kd.DeviceMeshManager.create_device_mesh({"data": 2}),
    "more devices than an accelerator machine has": mesh_on_accelerators,
    "a mesh that would split the torus": lambda: kd.mesh.topology.arrange_devices(
        kd.mock_tpus("v5p:4x4x4"), {"data": 8, "model": 8}, allow_split_physical_axes=False
    ),
    "a host mesh of zero devices": lambda: kd.calculate_host_mesh_shape((2, 2), 0, 2),
    "a host mesh that does not fit": lambda: kd.calculate_host_mesh_shape((2, 2), 4, 2),
}

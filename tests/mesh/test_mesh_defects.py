"""Defects in the mesh APIs of datarax, artifex, eformer and Keras; each test fails with the original's behaviour."""

import re
import warnings

import jax
import jax.extend
import numpy as np
import pytest
from jax.sharding import AxisType
from support.new_process import run

import keras_dist as kd


def on(monkeypatch, devices):
    """Pretends that these are all devices."""
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(jax, "device_count", lambda *_: len(devices))
    monkeypatch.setattr(jax, "local_device_count", lambda *_: len(devices))


def test_axes_are_auto_by_default_in_every_function():
    meshes = [
        kd.DeviceMeshManager.create_device_mesh({"data": 8}),
        kd.DeviceMeshManager.create_device_mesh({"data": 8}, jax.devices()),
        kd.create_mesh((8,), ("data",)),
        kd.create_mesh((8,), ("data",), use_jax=True),
        kd.DeviceMesh("data:8").backend_mesh,
    ]
    assert [mesh.axis_types for mesh in meshes] == [(AxisType.Auto,)] * 5
    assert kd.create_mesh((8,), ("data",), axis_types="explicit").axis_types == (AxisType.Explicit,)


def test_repeated_names_and_devices_are_refused():
    twice = [jax.devices()[0]] * 2
    for make in (
        lambda: kd.DeviceMeshManager.create_device_mesh([("x", 2), ("x", 4)]),
        lambda: kd.DeviceMeshManager().create_hybrid_mesh(2, 4, "x", "x"),
        lambda: kd.create_mesh((2, 4), ("x", "x")),
        lambda: kd.DeviceMesh((2, 4), ["x", "x"]),
        lambda: kd.DeviceMesh.from_jax_mesh(jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "x"))),
        lambda: kd.DeviceMeshManager.create_device_mesh({"x": 2}, twice),
        lambda: kd.DeviceMeshManager(twice).create_data_parallel_mesh(),
        lambda: kd.create_device_mesh("x:2", twice),
        lambda: kd.DeviceMesh((2,), ["x"], twice),
    ):
        with pytest.raises(ValueError, match="twice"):
            make()


def test_devices_are_ordered_by_their_links(monkeypatch):
    ring, cores = [0, 1, 2, 3, 6, 7, 4, 5], kd.mock_tpus("v3:2x2")
    assert [device.id for device in kd.create_device_mesh("data:8", cores).devices] == ring
    assert [d.id for d in kd.DeviceMeshManager(cores).create_data_parallel_mesh().devices] == ring
    assert [d.id for d in kd.DeviceMeshManager.create_device_mesh({"data": 8}, cores).devices] == ring
    on(monkeypatch, cores)
    assert [device.id for device in kd.DeviceMeshManager.create_data_parallel_mesh().devices] == ring
    assert [device.id for device in kd.create_mesh((8,), ("data",)).devices] == ring


@pytest.mark.parametrize("dcn", [(99, -7), (2, 1), (99, 1)])
def test_dcn_is_not_ignored_in_one_process(dcn):
    with pytest.raises(ValueError, match=re.escape(f"Invalid dcn {dcn} for mesh data:2 x model:4")):
        kd.create_mesh((2, 4), ("data", "model"), dcn_mesh_dims=dcn)


def test_axis_dims_include_the_slices(monkeypatch):
    on(monkeypatch, kd.mock_tpus("v5e:2x2", slices=2))
    mesh = kd.create_mesh((2, 4), ("data", "model"), dcn_mesh_dims=(1, 2))
    assert mesh.devices.shape == (2, 4)
    assert [[device.slice_index for device in row] for row in mesh.devices] == [[0, 0, 1, 1]] * 2


@pytest.mark.multiprocess
def test_no_mesh_keeps_devices_of_cleared_backends():
    code = (
        "import keras_dist as kd\n"
        "kd.simulate_devices(8)\n"
        "import jax, jax.extend\n"
        "mesh, manager = kd.DeviceMesh('data:8'), kd.DeviceMeshManager()\n"
        "make = [kd.create_mesh, kd.create_cpu_mesh, kd.DeviceMeshManager.create_data_parallel_mesh,\n"
        "        manager.create_model_parallel_mesh, lambda: kd.parse_mesh_from_string('8', ['x']),\n"
        "        lambda: mesh.backend_mesh]\n"
        "old = [f() for f in make]\n"
        "jax.extend.backend.clear_backends()\n"
        "for mesh_of_jax in [f() for f in make]:\n"
        "    assert mesh_of_jax.devices.ravel().tolist() == jax.devices(), 'dead devices'\n"
        "    jax.device_put(1.0, jax.sharding.NamedSharding(mesh_of_jax, jax.P()))\n"
        "assert manager.devices == jax.devices()\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_lowering_reads_the_id_of_each_device_a_constant_number_of_times(monkeypatch):
    reads = []

    class Device:
        platform = "cpu"
        process_index = 0
        device_kind = "cpu"
        client = jax.devices()[0].client

        def __init__(self, number):
            self.number = number

        @property
        def id(self):
            reads.append(self.number)
            return self.number

    devices = [Device(number) for number in range(64)]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    mesh = kd.DeviceMesh((64,), ["data"], [f"cpu:{number}" for number in range(64)])
    assert mesh.backend_mesh.devices.tolist() == devices
    assert len(reads) <= 2 * 64  # in Keras 64 * 64 / 2


def test_unknown_arguments_are_refused():
    layout_map = kd.LayoutMap(kd.DeviceMesh("model:8"))
    with pytest.raises(TypeError, match="devices"):
        kd.ModelParallel(layout_map=layout_map, devices=3)  # pyright: ignore[reportCallIssue]


def test_a_valid_mesh_causes_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kd.DeviceMeshManager.create_device_mesh({"data": 8})
        kd.create_mesh()
        kd.create_device_mesh("data:2,model:4").info()

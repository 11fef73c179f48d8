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


@pytest.mark.parametrize("make", [kd.DeviceMeshManager.create_device_mesh, kd.DeviceMeshManager().create_device_mesh])
def test_sizes_of_zero_and_below_are_refused(make):
    assert make({"data": -1}).devices.size == 8
    assert make([("data", -1), ("model", 2)]).devices.shape == (4, 2)
    for size in (-2, 0):
        with pytest.raises(ValueError, match=f"axis 'data' has size {size}"):
            make({"data": size})
        with pytest.raises(ValueError, match=f"axis 'dp' has size {size}"):
            kd.create_mesh((size, 4), ("dp", "tp"))


def test_more_devices_than_available_are_refused():
    for manager in (kd.DeviceMeshManager, kd.DeviceMeshManager()):
        with pytest.raises(ValueError, match="requires 100 devices, but only 8 are available"):
            manager.create_data_parallel_mesh(100)


def test_fewer_devices_than_available_are_refused_or_warned_of():
    with pytest.raises(ValueError, match="data:4 = 4, but 8 are available"):
        kd.create_device_mesh({"data": 4})
    for manager in (kd.DeviceMeshManager, kd.DeviceMeshManager()):
        with pytest.warns(UserWarning, match="data:4 leaves 4 of 8 devices idle"):
            manager.create_device_mesh({"data": 4})
    asked = kd.create_device_mesh({"data": 4}, devices=4)
    assert "4 of 8" in repr(asked)
    assert (asked.info()["total_devices"], asked.info()["available_devices"]) == (4, 8)


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


@pytest.mark.parametrize(
    ("shape", "devices", "processes"), [((3, 4), 6, 2), ((2, 6), 4, 3), ((6, 4), 6, 4), ((2, 5), 2, 5)]
)
def test_the_mesh_of_a_host_divides_the_whole_mesh(shape, devices, processes):
    local = kd.calculate_host_mesh_shape(shape, devices, processes)
    assert np.prod(local) == devices
    assert all(size % part == 0 for size, part in zip(shape, local, strict=True))


@pytest.mark.parametrize(("shape", "dcn"), [((2, 2, 2), None), ((2, 2, 2), (2, 2, 1)), ((2, 8), None)])
def test_several_axes_can_share_the_slices(monkeypatch, shape, dcn):
    on(monkeypatch, kd.mock_tpus(f"v5e:{np.prod(shape) // 4}x1", slices=4))
    mesh = kd.create_mesh(shape, tuple("abc"[: len(shape)]), dcn)
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert slices.shape == shape
    assert (slices[0] < slices[1]).all()  # the outer axis spans slices
    assert len(np.unique(slices)) == 4


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


def test_text_may_contain_spaces_and_invalid_text_is_refused():
    assert dict(kd.parse_mesh_from_string("dp:2, tp:4", ["dp", "tp"]).shape) == {"dp": 2, "tp": 4}
    with pytest.raises(ValueError, match="'dp:2:3' is neither"):
        kd.parse_mesh_from_string("dp:2:3", ["dp"])
    with pytest.raises(ValueError, match="'a' is used twice"):
        kd.parse_mesh_from_string("2,4", ["a", "a"])


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


class TestKeras:
    def test_a_mesh_of_two_axes_warns(self):
        with pytest.warns(UserWarning, match="1D mesh.*'data'"):
            assert kd.DataParallel(kd.DeviceMesh("data:2,model:4")).batch_dim_name == "data"

    def test_an_empty_list_of_devices_does_not_mean_all(self):
        with pytest.raises(ValueError, match=r"devices=\[\]"):
            kd.DataParallel(devices=[])
        with pytest.raises(ValueError, match="none are given"):
            kd.DeviceMesh((8,), ["data"], [])

    def test_a_layout_map_takes_lists_and_keeps_its_mesh(self):
        one, other = kd.LayoutMap(kd.DeviceMesh("model:8")), kd.LayoutMap(kd.DeviceMesh("data:2,model:4"))
        one["kernel"] = [None, "model"]
        layout = kd.TensorLayout((None, "model"))
        one["shared"] = other["shared"] = layout
        assert one["kernel"].axes == (None, "model")
        assert one["shared"].device_mesh == one.device_mesh
        assert other["shared"].device_mesh == other.device_mesh

    def test_a_layout_map_reports_invalid_patterns_and_missing_paths(self):
        layout_map = kd.LayoutMap(kd.DeviceMesh("model:8"))
        with pytest.raises(ValueError, match="kernel\\["):
            layout_map["kernel["] = (None, "model")
        assert "anything" not in layout_map
        assert layout_map.get("anything", 3) == 3

    def test_unknown_arguments_are_refused(self):
        layout_map = kd.LayoutMap(kd.DeviceMesh("model:8"))
        with pytest.raises(TypeError, match="devices"):
            kd.ModelParallel(layout_map=layout_map, devices=3)  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match="'foo'"):
            kd.set_distribution("foo")


def test_a_valid_mesh_causes_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kd.DeviceMeshManager.create_device_mesh({"data": 8})
        kd.create_mesh()
        kd.create_device_mesh("data:2,model:4").info()

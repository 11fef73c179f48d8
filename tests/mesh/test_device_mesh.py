"""A device mesh is an immutable value, is validated at construction, and lowers to JAX's mesh."""

import copy
import pickle
import re

import jax
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from support.new_process import run

import keras_dist as kd
from keras_dist.mesh.device_mesh import as_device_mesh
from keras_dist.mesh.topology import Link


@st.composite
def meshes(draw):
    """A mesh of 1 to 3 axes over some of the 8 devices, in any order."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3).filter(lambda sizes: np.prod(sizes) <= 8))
    names = draw(st.permutations(["data", "model", "seq"]))[: len(sizes)]
    devices = draw(st.permutations([f"cpu:{i}" for i in range(8)]))[: int(np.prod(sizes))]
    return kd.DeviceMesh(sizes, names, devices)


@given(meshes())
def test_it_lowers_to_the_mesh_of_keras(mesh):
    plain = keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names, mesh.devices)
    assert mesh.backend_mesh == plain.backend_mesh
    assert mesh.backend_mesh.shape == mesh.axis_sizes
    assert mesh.backend_mesh is mesh.backend_mesh


@given(meshes(), meshes())
def test_meshes_are_equal_if_they_lower_to_equal_meshes(one, other):
    assert (one == other) == (one.backend_mesh == other.backend_mesh)
    if one == other:
        assert hash(one) == hash(other)


@given(meshes())
def test_a_mesh_equals_one_of_names_one_of_devices_a_plain_one_and_a_copy(mesh):
    of_devices = kd.DeviceMesh(tuple(mesh.shape), tuple(mesh.axis_names), mesh.backend_mesh.devices)
    plain = keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names, mesh.devices)
    unpickled = pickle.loads(pickle.dumps(mesh))
    for other in (of_devices, plain, unpickled, as_device_mesh(plain)):
        assert mesh == other
        assert other == mesh
    assert hash(mesh) == hash(of_devices) == hash(unpickled)
    assert as_device_mesh(mesh) is mesh


def test_it_can_be_compared_to_any_value():
    assert kd.DeviceMesh((8,), ["data"]) != "data"
    assert kd.DeviceMesh((8,), ["data"]) != kd.DeviceMesh((8,), ["batch"])


def test_properties_are_those_of_keras():
    mesh = kd.DeviceMesh((4, 2), ["data", "model"])
    assert isinstance(mesh, keras.distribution.DeviceMesh)
    assert mesh.shape == (4, 2)
    assert mesh.axis_names == ["data", "model"]
    assert mesh.devices.shape == (4, 2)
    assert kd.DeviceMesh([4, 2], ("data", "model")).shape == [4, 2]
    assert kd.DeviceMesh([4, 2], ("data", "model")).axis_names == ("data", "model")


def test_it_is_immutable():
    names, devices = ["data", "model"], np.array(kd.list_devices())
    mesh = kd.DeviceMesh((4, 2), names, devices)
    names[0] = devices[0] = "other"
    mesh.axis_names.append("more")
    assert mesh == kd.DeviceMesh((4, 2), ["data", "model"])
    with pytest.raises(ValueError, match="read-only"):
        mesh.devices[0, 0] = "cpu:7"


def test_it_may_use_some_of_the_devices():
    mesh = kd.DeviceMesh((2,), ["data"], jax.devices()[3:5])
    assert [device.id for device in mesh.backend_mesh.devices] == [3, 4]


@pytest.mark.parametrize(
    ("shape", "devices", "says"),
    [
        ((4, 4), None, r"data:4 x model:4 = 16, but only 8 are available.*product is 8, or simulate 16"),
        ((2, 2), None, r"data:2 x model:2 = 4, but 8 are available.*devices=4\)"),
        ((-1, 3), None, r"data:-1 x model:3 needs a multiple of 3 devices, but 8 are available"),
        ((2, 2), ["cpu:0"], "= 4, but only 1 is given"),
        ((2, 2), [], "none are given"),
        ((2, 2), ["cpu:0", "cpu:1", "cpu:1", "cpu:2"], "'cpu:1' twice"),
        ((2, 1), ["cpu:1", jax.devices()[1]], "'cpu:1' twice"),
        ((0, 2), None, "axis 'data' has size 0"),
    ],
)
def test_an_invalid_mesh_is_refused_at_construction(shape, devices, says):
    with pytest.raises(ValueError, match=says):
        kd.DeviceMesh(shape, ["data", "model"], devices)


def test_an_unknown_device_is_reported_when_it_is_lowered():
    with pytest.raises(ValueError, match="Device not found: 'cpu:17'"):
        _ = kd.DeviceMesh((2,), ["data"], ["cpu:0", "cpu:17"]).backend_mesh


def test_a_value_that_is_not_a_mesh_is_refused():
    with pytest.raises(ValueError, match="instance of `DeviceMesh`, not 'mesh'"):
        as_device_mesh("mesh")


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ({"data": 4, "model": 2}, None),
        ([("data", 4), ("model", -1)], None),
        ("data:-1,model:2", None),
        ("4,2", ["data", "model"]),
        ((4, -1), ("data", "model")),
    ],
)
def test_axes_take_every_form(shape, names):
    mesh = kd.DeviceMesh((4, 2), ["data", "model"])
    assert kd.DeviceMesh(shape, names) == mesh
    assert kd.DeviceMesh(shape, names, kd.list_devices()) == mesh
    assert kd.create_device_mesh(shape, axis_names=names) == mesh
    assert kd.DeviceMesh(shape, names).axis_sizes == {"data": 4, "model": 2}


def test_given_devices_keep_their_order_and_others_are_ordered_by_links(monkeypatch):
    ring = [0, 1, 2, 3, 6, 7, 4, 5]
    cores = kd.mock_tpus("v3:2x2")
    assert [device.id for device in kd.DeviceMesh("data:8", devices=cores).devices] == list(range(8))
    assert [device.id for device in kd.create_device_mesh("data:8", cores[::-1]).devices] == ring
    # As if the eight devices of this process were these cores.
    of_process = dict(zip(kd.list_devices(), cores, strict=True))
    monkeypatch.setattr(
        "keras_dist.mesh.device_mesh.to_jax_devices", lambda names: [of_process[name] for name in names]
    )
    for mesh in (kd.DeviceMesh("data:8"), kd.create_device_mesh("data:8"), kd.DataParallel().device_mesh):
        assert mesh.devices.tolist() == [f"cpu:{i}" for i in ring]
    # With several processes, Keras assumes the order host by host.
    monkeypatch.setattr("keras_dist.mesh.device_mesh.num_processes", lambda: 2)
    assert kd.DeviceMesh("data:8").devices.tolist() == kd.list_devices()


class TestCreateDeviceMesh:
    def test_it_takes_devices_or_a_number_of_them(self):
        mesh = kd.create_device_mesh("data:2,model:-1", devices=4)
        assert mesh == kd.DeviceMesh((2, 2), ["data", "model"], [f"cpu:{i}" for i in range(4)])
        assert kd.create_device_mesh("data:2", jax.devices()[2:4]).devices.tolist() == jax.devices()[2:4]
        assert kd.create_device_mesh("data:2", ["cpu:5", "cpu:4"]).devices.tolist() == ["cpu:5", "cpu:4"]

    @pytest.mark.parametrize("count", [0, -1, 9])
    def test_a_number_of_devices_that_is_not_available_is_refused(self, count):
        with pytest.raises(ValueError, match=rf"devices={count}, but 8 are available"):
            kd.create_device_mesh("data:-1", devices=count)

    @pytest.mark.parametrize(
        ("axes", "devices", "says"),
        [
            ("data:3,model:4", None, "data:3 x model:4 = 12, but only 8 are available"),
            ("data:4", None, r"data:4 = 4, but 8 are available.*create_device_mesh\(..., devices=4\)"),
            ("data:4", 2, "data:4 = 4, but only 2 are given"),
            ("data:2", ["cpu:0", "cpu:0"], "'cpu:0' twice"),
            ("data:-1", [], "at least one device, but none are given"),
            ("data:1", ["cpu:99"], "Device not found: 'cpu:99'"),
        ],
    )
    def test_an_invalid_mesh_is_refused(self, axes, devices, says):
        with pytest.raises(ValueError, match=says):
            kd.create_device_mesh(axes, devices)

    @pytest.mark.parametrize("devices", ["cpu:0", 2.0, True, [0], [None]])
    @pytest.mark.parametrize("make", [kd.create_device_mesh, lambda axes, devices: kd.DeviceMesh(axes, None, devices)])
    def test_devices_must_be_a_list_of_devices(self, make, devices):
        with pytest.raises(TypeError, match=f"Invalid devices {re.escape(repr(devices))}"):
            make("data:-1", devices)

    def test_devices_must_be_of_one_type(self):
        with pytest.raises(ValueError, match="gpu, tpu"):
            kd.create_device_mesh("data:8", kd.mock_gpus(1, 4) + kd.mock_tpus("v5e:2x2"))

    def test_devices_may_be_nested_or_counted_by_numpy(self):
        nested = [["cpu:3", "cpu:2"], ["cpu:1", "cpu:0"]]
        assert kd.DeviceMesh((2, 2), ["a", "b"], nested).devices.tolist() == nested
        assert kd.DeviceMesh((4,), ["a"], [jax.devices()[:2], jax.devices()[2:4]]).devices.tolist() == jax.devices()[:4]
        assert kd.create_device_mesh("data:-1", np.int64(2)).devices.tolist() == ["cpu:0", "cpu:1"]

    def test_dcn_crosses_slices(self):
        devices = kd.mock_tpus("v5e:4x4", slices=2)
        mesh = kd.create_device_mesh({"data": 4, "model": 8}, devices, dcn={"model": 2})
        assert mesh.axis_sizes == {"data": 4, "model": 8}
        assert {name: link.dcn for name, link in mesh.info()["longest_link"].items()} == {"data": False, "model": True}
        with pytest.raises(ValueError, match="data:2 = 2 slices, but the devices form 1"):
            kd.create_device_mesh("data:4,model:2", dcn="data:2")
        assert kd.create_device_mesh("data:4,model:2", dcn="data") == kd.DeviceMesh("data:4,model:2")


class TestAxisTypes:
    @pytest.mark.parametrize("make", [kd.DeviceMesh, kd.create_device_mesh])
    def test_they_are_auto_by_default(self, make):
        assert make("data:4,model:2").backend_mesh.axis_types == (AxisType.Auto, AxisType.Auto)
        mesh = make("data:4,model:2", axis_types="Explicit")
        assert mesh.backend_mesh.axis_types == mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)
        assert make("data:4,model:2", axis_types=["auto", AxisType.Manual]).axis_types == (
            AxisType.Auto,
            AxisType.Manual,
        )
        assert make("data:8", axis_types=AxisType.Explicit) != make("data:8")

    @pytest.mark.parametrize(
        ("types", "error"), [("automatic", ValueError), (["auto"] * 3, ValueError), (3, TypeError), ([3, 3], TypeError)]
    )
    def test_unknown_types_are_refused(self, types, error):
        with pytest.raises(error, match=rf"Invalid axis_types {re.escape(repr(types))} for 2 axes"):
            kd.create_device_mesh("data:4,model:2", axis_types=types)


class TestMeshOfJax:
    def test_it_is_the_backend_mesh_of_its_conversion(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("data", "model"))
        ours = kd.DeviceMesh.from_jax_mesh(mesh)
        assert ours.backend_mesh is mesh
        assert ours == kd.DeviceMesh((2, 4), ["data", "model"], [f"cpu:{i}" for i in range(7, -1, -1)])
        assert kd.DeviceMesh.from_jax_mesh(jax.make_mesh((8,), ("x",))).axis_types == (AxisType.Explicit,)

    def test_it_is_accepted_wherever_a_mesh_is(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
        ours = kd.DeviceMesh("data:2,model:4")
        line = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
        assert kd.TensorLayout(("data",), mesh).device_mesh == ours
        assert kd.TensorLayout(("data",), mesh).backend_layout.mesh is mesh
        layout_map = kd.LayoutMap(mesh)
        assert layout_map.device_mesh == ours
        assert kd.Distribution(mesh, "data").device_mesh == ours
        assert kd.DataParallel(line).device_mesh == kd.DeviceMesh("data:8")
        assert kd.DataParallel(device_mesh=line).device_mesh == kd.DeviceMesh("data:8")
        assert kd.ModelParallel(layout_map=layout_map, device_mesh=mesh).device_mesh == ours
        layout = kd.TensorLayout((None,))
        layout.device_mesh = mesh
        assert layout.device_mesh == ours

    def test_explicit_axes_are_converted_for_training(self):
        """`jax.make_mesh` makes Explicit axes, which Keras's layers do not work with."""
        mesh = jax.make_mesh((2, 4), ("data", "model"))
        layout_map = kd.LayoutMap(mesh)
        layout_map["dense/kernel"] = (None, "model")
        distribution = kd.ModelParallel(layout_map=layout_map, device_mesh=mesh)
        assert distribution.device_mesh == kd.DeviceMesh("data:2,model:4")
        with distribution.scope():
            model = keras.Sequential([keras.layers.Dense(8, name="dense"), keras.layers.Dropout(0.1)])
            model.compile("sgd", "mse")
            model.fit(np.ones((20, 4)), np.ones((20, 8)), verbose=0)
        assert model.get_layer("dense").kernel.value.sharding.shard_shape((4, 8)) == (4, 2)
        asked = kd.DeviceMesh.from_jax_mesh(mesh)
        for make in (kd.Distribution, kd.LayoutMap):
            with pytest.raises(ValueError, match=r"type Auto.*data:2 \(Explicit\) x model:4"):
                make(asked)
        assert kd.TensorLayout(("data",), mesh).backend_layout.mesh is mesh  # a layout without a layout map keeps them

    @pytest.mark.parametrize("value", ["mesh", jax.sharding.AbstractMesh((8,), ("data",)), None])
    def test_other_values_are_refused(self, value):
        with pytest.raises(TypeError, match=re.escape(repr(value))):
            kd.DeviceMesh.from_jax_mesh(value)

    def test_its_axes_must_differ(self):
        with pytest.raises(ValueError, match="'data' is used twice"):
            kd.DeviceMesh.from_jax_mesh(jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "data")))


def test_info():
    assert kd.DeviceMesh("data:4,model:2").info() == {
        "total_devices": 8,
        "available_devices": 8,
        "axes": {"data": 4, "model": 2},
        "platform": "cpu",
        "device_kind": "cpu",
        "processes": 1,
        "slices": 1,
        "longest_link": {"data": Link(False, 1), "model": Link(False, 1)},
    }
    info = kd.create_device_mesh("data:4,model:128", kd.mock_tpus("v5e:16x16", slices=2)).info()
    assert (info["total_devices"], info["processes"], info["slices"]) == (512, 128, 2)
    assert (info["platform"], info["device_kind"]) == ("tpu", "TPU v5 lite")
    assert list(map(str, info["longest_link"].values())) == ["network", "1 hop"]


def test_mock_meshes_of_different_hardware_differ():
    v5e, again, v6e = (kd.DeviceMesh("data:4", devices=kd.mock_tpus(f"{kind}:2x2")) for kind in ("v5e", "v5e", "v6e"))
    assert v5e == again
    assert v5e != v6e


@pytest.mark.parametrize("copied", [lambda mesh: pickle.loads(pickle.dumps(mesh)), copy.deepcopy])
def test_a_copy_is_equal_and_immutable(copied):
    for mesh in (kd.DeviceMesh("data:8"), kd.DeviceMesh("data:2", devices=jax.devices()[:2])):
        other = copied(mesh)
        assert other == mesh
        assert other.backend_mesh == mesh.backend_mesh
        with pytest.raises(ValueError, match="read-only"):
            other.devices[0] = "cpu:7"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_in_this_process_keeps_the_devices(copied):
    for devices in (kd.mock_tpus("v5e:2x4"), jax.devices()):
        mesh = kd.DeviceMesh("data:8", devices=devices)
        assert copied(mesh).devices[0] is devices[0]


def test_its_shape_is_a_list_if_it_was_given_as_one():
    assert kd.DeviceMesh([8], ["data"]).shape == [8]
    for axes in ([("data", 8)], {"data": 8}, "data:8"):
        assert kd.DeviceMesh(axes).shape == (8,)


def test_its_repr_contains_the_number_of_devices_in_use():
    assert repr(kd.DeviceMesh("data:4,model:2")) == "<DeviceMesh data:4 x model:2 on 8 cpu devices>"
    assert str(kd.create_device_mesh("data:2,model:2", 4)) == "<DeviceMesh data:2 x model:2 on 4 of 8 cpu devices>"
    assert repr(kd.DeviceMesh("data:1", devices=jax.devices()[:1])) == "<DeviceMesh data:1 on 1 of 8 cpu devices>"
    assert repr(kd.DeviceMesh("data:4", devices=kd.mock_gpus(1, 4))) == "<DeviceMesh data:4 on 4 gpu devices>"
    assert repr(kd.DeviceMesh("data:2,model:4", axis_types=["auto", "explicit"])) == (
        "<DeviceMesh data:2 x model:4 (Explicit) on 8 cpu devices>"
    )


def assert_runs(code):
    done = run("import keras_dist as kd\nkd.simulate_devices(8)\nimport jax, numpy as np\n" + code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_mesh_of_names_outlives_cleared_backends():
    assert_runs(
        "import jax.extend\n"
        "mesh = kd.DeviceMesh('data:8')\n"
        "layout = kd.TensorLayout(('data',), mesh)\n"
        "distribution = kd.DataParallel(mesh)\n"
        "of_objects = kd.DeviceMesh('data:8', devices=jax.devices())\n"
        "mixed = kd.DeviceMesh('data:2', devices=['cpu:1', jax.devices()[0]])\n"
        "of_objects.backend_mesh, mixed.backend_mesh\n"
        "old = mesh.backend_mesh, layout.backend_layout, distribution.distribute_batch(np.ones(8)).sharding\n"
        "assert mesh.backend_mesh is old[0] and layout.backend_layout == old[1]\n"
        "jax.extend.backend.clear_backends()\n"
        "assert mesh.backend_mesh.devices.tolist() == jax.devices()\n"
        "assert old[0].devices.tolist() != jax.devices()\n"
        "assert mixed.backend_mesh.devices.tolist() == [jax.devices()[1], jax.devices()[0]]\n"
        "assert layout.backend_layout.mesh is mesh.backend_mesh\n"
        "try:\n"
        "    of_objects.backend_mesh\n"
        "except ValueError as error:\n"
        "    assert 'data:8' in str(error) and 'cleared' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
        "assert kd.distribute_tensor(np.ones(8), layout).sharding.device_set == set(jax.devices())\n"
        "assert distribution.distribute_batch(np.ones(8)).sharding.device_set == set(jax.devices())\n"
    )


@pytest.mark.multiprocess
def test_showing_a_mesh_does_not_start_jax():
    assert_runs(
        "mesh = kd.DeviceMesh('data:4', devices=[f'cpu:{i}' for i in range(4)])\n"
        "assert repr(mesh) == '<DeviceMesh data:4 on 4 cpu devices>' and mesh._repr_html_() is None\n"
        "kd.simulate_devices(6)\n"  # as long as JAX has not started
        "assert kd.get_device_count() == 6\n"
        "assert repr(mesh) == '<DeviceMesh data:4 on 4 of 6 cpu devices>' and '<table>' in mesh._repr_html_()\n"
    )

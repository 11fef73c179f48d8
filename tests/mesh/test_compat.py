"""The mesh APIs of datarax, artifex and eformer: every name, every call form, and the defects that they have there."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import keras_dist as kd

Manager = kd.DeviceMeshManager
CALLERS = {"class": Manager, "instance": Manager(), "instance of four": Manager(jax.devices()[4:])}


@pytest.fixture(params=CALLERS)
def caller(request):
    """datarax calls on the class, artifex on an instance."""
    return CALLERS[request.param]


@pytest.fixture
def count(caller):
    return 4 if caller is CALLERS["instance of four"] else 8


def axes(mesh):
    assert type(mesh) is Mesh
    assert set(mesh.axis_types) == {AxisType.Auto}
    return dict(mesh.shape)


class TestDeviceMeshManager:
    def test_create_device_mesh(self, caller, count):
        shape = {"data": 2, "model": count // 2}
        for form in (shape, list(shape.items()), "data:2,model:-1"):
            mesh = caller.create_device_mesh(form)
            assert axes(mesh) == shape
            assert mesh.devices.ravel().tolist() == jax.devices()[-count:]
        devices = jax.devices()[2:6]
        assert caller.create_device_mesh({"data": 4}, devices).devices.tolist() == devices
        assert caller.create_device_mesh(mesh_shape=[("data", 2)], devices=devices).devices.tolist() == devices[:2]

    def test_data_and_model_parallel_meshes(self, caller, count):
        assert axes(caller.create_data_parallel_mesh()) == {"data": count}
        assert axes(caller.create_data_parallel_mesh(3)) == {"data": 3}
        assert axes(caller.create_data_parallel_mesh(num_devices=2, axis_name="batch")) == {"batch": 2}
        assert axes(caller.create_model_parallel_mesh(4)) == {"model": 4}
        assert axes(caller.create_model_parallel_mesh(num_devices=None, axis_name="tensor")) == {"tensor": count}

    def test_hybrid_meshes(self, caller):
        assert axes(caller.create_hybrid_mesh(2, 2)) == {"data": 2, "model": 2}
        assert axes(caller.create_hybrid_mesh(data_parallel_size=1, model_parallel_size=4)) == {"data": 1, "model": 4}
        assert axes(caller.create_hybrid_mesh()) == {"data": 1, "model": 1}
        assert axes(caller.create_hybrid_mesh(4, 1, "batch", "tensor")) == {"batch": 4, "tensor": 1}

    def test_mesh_info(self, caller):
        info = {"total_devices": 8, "axes": {"a": 2, "b": 4}}
        abstract = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
        for mesh in (jax.make_mesh((2, 4), ("a", "b")), abstract, kd.DeviceMesh("a:2,b:4")):
            assert caller.get_mesh_info(mesh) == info

    @pytest.mark.parametrize(
        "make",
        [
            lambda caller: caller.create_device_mesh({"data": 4, "model": 4}),
            lambda caller: caller.create_device_mesh({"data": 16}, jax.devices()[:3]),
            lambda caller: caller.create_data_parallel_mesh(16),
            lambda caller: caller.create_model_parallel_mesh(16),
            lambda caller: caller.create_hybrid_mesh(4, 4),
        ],
    )
    def test_too_few_devices_are_refused(self, caller, make):
        with pytest.raises(ValueError, match=r"requires 16 devices, but only [348] are available"):
            make(caller)

    def test_sizes_are_validated(self, caller):
        for size, error in ((0, ValueError), (-2, ValueError), (2.0, TypeError)):
            with pytest.raises(error, match="has size"):
                caller.create_data_parallel_mesh(size)
        with pytest.raises(ValueError, match="'x' is used twice"):
            caller.create_hybrid_mesh(2, 2, "x", "x")
        with pytest.raises(ValueError, match="data:-1 x model:16 requires 16 devices"):
            caller.create_device_mesh({"data": -1, "model": 16})
        with pytest.raises(ValueError, match="requires 1 device, but only 0 are available"):
            caller.create_device_mesh({"data": 1}, [])
        with pytest.raises(TypeError, match="Invalid devices 4"):
            Manager(4)
        assert Manager(np.array(jax.devices()).reshape(2, 4)).num_devices == 8

    def test_subclasses_may_replace_a_method_and_the_constructor(self):
        class Half(Manager):
            def __init__(self, name):
                self.name = name

            @property
            def devices(self):
                return jax.devices()[:4]

        assert (
            Half.create_data_parallel_mesh().devices.size == Half("half").create_model_parallel_mesh().devices.size == 4
        )

        class Named(Manager):
            def create_device_mesh(self, mesh_shape, devices=None):
                return mesh_shape

        assert Named().create_data_parallel_mesh(2) == {"data": 2}

    def test_devices_are_a_copy(self):
        manager = Manager(jax.devices()[:2])
        manager.devices.clear()
        assert manager.devices == jax.devices()[:2]
        assert manager.num_devices == 2
        assert Manager().devices == jax.devices()
        assert Manager().num_devices == 8

    def test_idle_devices_are_warned_of_unless_devices_were_given(self, recwarn):
        Manager(jax.devices()[:4]).create_device_mesh({"data": 2})
        Manager.create_device_mesh({"data": 2}, jax.devices()[:4])
        Manager.create_data_parallel_mesh(2)
        Manager.create_hybrid_mesh(2, 2)
        assert not recwarn.list
        for manager in (Manager, Manager()):
            with pytest.warns(UserWarning, match="data:2 leaves 6 of 8 devices idle") as warned:
                assert axes(manager.create_device_mesh({"data": 2})) == {"data": 2}
            assert warned[0].filename == __file__

    def test_a_method_is_documented_on_the_class_and_on_an_instance(self):
        for owner in (Manager, Manager()):
            assert "Creates a mesh of any axes" in owner.create_device_mesh.__doc__


class TestCreateMesh:
    def test_defaults(self):
        assert axes(kd.create_mesh()) == {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}

    def test_its_arguments_in_order(self):
        mesh = kd.create_mesh((2, -1), ("data", "model"), (1, 1), True, True, "cpu", False, "auto")
        assert axes(mesh) == {"data": 2, "model": 4}
        assert axes(kd.create_mesh(axis_dims=(2, 4), axis_names=("data", "model"), use_jax=True)) == {
            "data": 2,
            "model": 4,
        }
        for form in ("data:2,model:4", {"data": 2, "model": -1}, [("data", 2), ("model", 4)]):
            assert axes(kd.create_mesh(form)) == axes(kd.create_mesh(form, None)) == {"data": 2, "model": 4}
            assert axes(kd.create_cpu_mesh(form)) == {"data": 2, "model": 4}

    @pytest.mark.parametrize(
        ("types", "expected"),
        [
            (None, "Auto"),
            ("auto", "Auto"),
            ("EXPLICIT", "Explicit"),
            (" Manual ", "Manual"),
            (AxisType.Explicit, "Explicit"),
            (["explicit"], "Explicit"),
            (["explicit", AxisType.Explicit], "Explicit"),
        ],
    )
    def test_axis_types(self, types, expected):
        mesh = kd.create_mesh((2, 4), ("data", "model"), axis_types=types)
        assert [axis_type.name for axis_type in mesh.axis_types] == [expected] * 2

    def test_it_returns_the_same_mesh_while_that_is_in_use(self):
        mesh = kd.create_mesh((2, 4), ("data", "model"))
        assert kd.create_mesh((2, 4), ("data", "model")) is mesh

    def test_the_order_of_granules(self, monkeypatch):
        devices = kd.mock_gpus(2, 2)[::-1]
        monkeypatch.setattr(jax, "devices", lambda *_: devices)
        hosts = lambda **options: [gpu.process_index for gpu in kd.create_mesh((4,), ("data",), **options).devices]  # noqa: E731
        assert hosts() == [0, 0, 1, 1]
        assert hosts(should_sort_granules_by_key=False) == [1, 1, 0, 0]

    def test_split_axes_of_the_torus(self, monkeypatch):
        monkeypatch.setattr(jax, "devices", lambda *_: kd.mock_tpus("v5p:4x4x4"))
        assert kd.create_mesh((8, 8), ("data", "model")).devices.shape == (8, 8)
        with pytest.raises(ValueError, match=r"8 x 8 .* 4 x 4 x 4"):
            kd.create_mesh((8, 8), ("data", "model"), allow_split_physical_axes=False)

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (((3, 4), ("a", "b")), "a:3 x b:4 = 12, but only 8 are available"),
            (((2, 2), ("a", "b")), "a:2 x b:2 = 4, but 8 are available"),
            (((2, 4), ("a", "b"), (2, 1)), "a:2 x b:1 = 2 slices, but the devices form 1"),
            (((2, 4), ("a", "b"), None, True, True, "abacus"), "No devices of type 'abacus'"),
            (((2, 4),), "should have same size"),
            (((0, 4), ("a", "b")), "axis 'a' has size 0"),
        ],
    )
    def test_invalid_arguments_are_refused(self, arguments, says):
        with pytest.raises(ValueError, match=says):
            kd.create_mesh(*arguments)


def test_a_mesh_of_cpus(monkeypatch):
    all_devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda platform=None: all_devices("cpu") if platform == "cpu" else [])
    assert axes(kd.create_cpu_mesh())["fsdp"] == 8
    assert axes(kd.create_cpu_mesh((2, 4), ("data", "model"))) == {"data": 2, "model": 4}
    assert axes(kd.create_cpu_mesh(axis_dims=(2, -1), axis_names=("data", "model"))) == {"data": 2, "model": 4}


@pytest.mark.parametrize("text", ["dp:2,tp:4", "dp:2, tp:4", "2,4", " 2 , -1", "dp:-1,tp:4"])
def test_a_mesh_from_text(text):
    assert axes(kd.parse_mesh_from_string(text, ["dp", "tp"])) == {"dp": 2, "tp": 4}
    assert axes(kd.parse_mesh_from_string(axis_dims=text, names=("dp", "tp"))) == {"dp": 2, "tp": 4}


def test_text_with_names_determines_the_order():
    assert list(axes(kd.parse_mesh_from_string("tp:4,dp:2", ["dp", "tp"]))) == ["tp", "dp"]
    with pytest.raises(ValueError, match="should have same size"):
        kd.parse_mesh_from_string("tp:8", ["dp", "tp"])


@pytest.mark.parametrize(
    ("shape", "devices", "processes", "local"),
    [
        ((2, 4), 4, 2, (1, 4)),
        ((8,), 2, 4, (2,)),
        ((4, 4), 2, 8, (1, 2)),
        ((2, -1), 4, 2, (1, 4)),
        ((3, 4), 6, 2, (3, 2)),
        ((2, 6), 4, 3, (2, 2)),
        ((6, 4), 6, 4, (3, 2)),
        ((2, 5), 2, 5, (2, 1)),
    ],
)
def test_the_part_of_a_mesh_on_a_host(shape, devices, processes, local):
    assert kd.calculate_host_mesh_shape(shape, devices, processes) == local
    assert kd.calculate_host_mesh_shape(shape, total_devices=devices, num_processes=processes) == local
    assert all(size % part == 0 for size, part in zip(shape, local, strict=True) if size > 0)


def test_the_part_of_a_mesh_on_this_host():
    assert kd.calculate_host_mesh_shape((2, 4)) == (2, 4)
    for form in ("2,4", {"a": 2, "b": 4}, "a:2,b:4"):
        assert kd.calculate_host_mesh_shape(form, 4, 2) == (1, 4)
    with pytest.raises(ValueError, match="axis 0:2 x axis 1:2 = 4, but 8 are available on 2 processes of 4 devices"):
        kd.calculate_host_mesh_shape((2, 2), 4, 2)
    with pytest.raises(ValueError, match="total_devices=0 and num_processes=2"):
        kd.calculate_host_mesh_shape((2, 2), 0, 2)
    with pytest.raises(TypeError, match="Invalid mesh axes 8"):
        kd.calculate_host_mesh_shape(8, 4, 2)
    with pytest.raises(ValueError, match=r"total_devices=2\.0"):
        kd.calculate_host_mesh_shape((2, 2), 2.0, 2)
    assert kd.calculate_host_mesh_shape((2, 2), np.int64(2), 2) == (1, 2)


class TestCpu:
    def test_force_cpu_restores_the_default_device(self):
        before = jax.config.jax_default_device
        with kd.force_cpu() as cpu:
            assert cpu == jax.local_devices(backend="cpu")[0]
            assert jax.config.jax_default_device == cpu
            assert jax.numpy.ones(2).devices() == {cpu}
        assert jax.config.jax_default_device == before
        with jax.default_device(jax.devices()[3]):
            with pytest.raises(KeyError), kd.force_cpu():
                raise KeyError
            assert jax.numpy.ones(2).devices() == {jax.devices()[3]}

    @pytest.mark.filterwarnings("error::DeprecationWarning")
    def test_cpu_context_has_a_mesh_too(self):
        with kd.cpu_context() as mesh:
            assert mesh == kd.create_cpu_mesh()
            assert jax.config.jax_default_device == jax.devices("cpu")[0]
            one = jax.numpy.ones(4)  # on the default device, and free to go elsewhere
            assert one.devices() == {jax.devices("cpu")[0]}
            assert (one + jax.device_put(one, jax.devices()[3])).devices() == {jax.devices()[3]}
            sharded = jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, PartitionSpec("fsdp")))(
                np.ones((16, 2))
            )
            assert sharded.sharding.shard_shape(sharded.shape) == (2, 2)
        assert jax.config.jax_default_device is None
        with pytest.raises(RuntimeError, match="mesh"):
            jax.jit(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("fsdp")))(np.ones((16, 2)))

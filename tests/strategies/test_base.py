"""Distributions answer Keras's questions, take what Keras takes, and refuse what cannot work."""

import jax
import keras
import numpy as np
import pytest
from support.slow_cases import slow

import keras_dist as kd


@pytest.fixture
def layout_map(mesh):
    """Kernels are sharded over their last dim."""
    layout_map = kd.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    return layout_map


class TestDataParallel:
    def test_of_all_devices(self):
        distribution = kd.DataParallel()
        assert isinstance(distribution, keras.distribution.DataParallel)
        assert distribution.device_mesh == kd.DeviceMesh((8,), ["batch"])
        assert distribution.batch_dim_name == "batch"
        assert distribution.num_model_replicas == 8
        assert distribution.auto_shard_dataset

    def test_of_some_devices(self):
        distribution = kd.DataParallel(devices=jax.devices()[:2], auto_shard_dataset=False)
        assert distribution.device_mesh == kd.DeviceMesh((2,), ["batch"], ["cpu:0", "cpu:1"])
        assert not distribution.auto_shard_dataset

    def test_of_a_plain_mesh(self):
        plain = keras.distribution.DeviceMesh((8,), ["data"], kd.list_devices())
        assert kd.DataParallel(plain).device_mesh == plain

    def test_of_a_mesh_with_several_axes_warns_and_uses_the_first(self, mesh):
        with pytest.warns(UserWarning, match="1D mesh.*'data'"):
            distribution = kd.DataParallel(mesh)
        assert distribution.get_data_layout((4, 3)) == kd.TensorLayout(("data", None), mesh)
        assert distribution.num_model_replicas == 2

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"devices": []}, r"devices=\[\]"),
            ({"device_mesh": "mesh"}, r"instance of `DeviceMesh`.*'mesh'"),
            ({"devices": ["cpu:0", "cpu:0"]}, "'cpu:0' twice"),
        ],
    )
    def test_what_is_no_mesh_is_refused(self, arguments, says):
        with pytest.raises(ValueError, match=says):
            kd.DataParallel(**arguments)

    def test_a_mesh_and_devices_are_one_too_many(self, mesh):
        with pytest.raises(ValueError, match=r"devices=\['cpu:0'\]"):
            kd.DataParallel(mesh, devices=["cpu:0"])


class TestModelParallel:
    def test_answers(self, layout_map, mesh):
        distribution = kd.ModelParallel(layout_map=layout_map)
        assert isinstance(distribution, keras.distribution.ModelParallel)
        assert distribution.device_mesh is mesh
        assert distribution.batch_dim_name == "data"
        assert distribution.num_model_replicas == 2
        assert distribution.get_data_layout((4, 3)) == kd.TensorLayout(("data", None), mesh)
        assert distribution.get_data_layout(()) == kd.TensorLayout((), mesh)
        assert str(distribution) == f"<ModelParallel device_mesh={mesh}>"

    def test_a_batch_over_several_axes(self, layout_map, mesh):
        distribution = kd.ModelParallel(layout_map=layout_map, batch_dim_name=("data", "model"))
        assert distribution.batch_dim_name == ("data", "model")
        assert distribution.num_model_replicas == 8
        assert distribution.get_data_layout((4, 3)) == kd.TensorLayout((("data", "model"), None), mesh)

    def test_a_plain_map(self, layout_map, mesh):
        plain = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names, mesh.devices))
        plain[".*kernel"] = (None, "model")
        kd.set_distribution(kd.ModelParallel(layout_map=plain))
        dense = keras.layers.Dense(8)
        dense.build((None, 4))
        assert dense.kernel.value.sharding.shard_shape((4, 8)) == (4, 2)

    def test_our_map_in_a_plain_distribution(self, layout_map):
        with keras.distribution.ModelParallel(layout_map=layout_map).scope():
            dense = keras.layers.Dense(8)
            dense.build((None, 4))
        assert dense.kernel.value.sharding.shard_shape((4, 8)) == (4, 2)

    @pytest.mark.parametrize("name", ["batch", ("data", "batch"), ("data", "data")])
    def test_a_batch_axis_must_be_one_of_the_mesh(self, layout_map, name):
        with pytest.raises(ValueError, match=r"batch_dim_name=.*\['data', 'model'\]"):
            kd.ModelParallel(layout_map=layout_map, batch_dim_name=name)

    def test_the_mesh_is_that_of_the_map(self, layout_map, mesh):
        kd.ModelParallel(layout_map=layout_map, device_mesh=mesh)
        with pytest.raises(ValueError, match="the mesh of its layout map"):
            kd.ModelParallel(layout_map=layout_map, device_mesh=kd.DeviceMesh((8,), ["data"]))
        with pytest.raises(ValueError, match="the mesh of its layout map"):
            kd.ModelParallel(layout_map=kd.LayoutMap(None))

    def test_arguments_are_named_and_known(self, layout_map):
        with pytest.raises(ValueError, match="layout_map"):
            kd.ModelParallel()
        with pytest.raises(TypeError, match=r"'bacth_dim_name'\. Did you mean 'batch_dim_name'"):
            kd.ModelParallel(layout_map=layout_map, bacth_dim_name="data")


class TestVariableLayout:
    def test_a_layout_of_its_own_is_kept(self, layout_map, mesh):
        own = kd.TensorLayout(("model", None), mesh)
        with kd.ModelParallel(layout_map=layout_map).scope():
            variable = keras.Variable(np.ones((8, 8)), name="kernel", layout=own)
        assert variable.value.sharding.shard_shape((8, 8)) == (2, 8)

    @pytest.mark.parametrize(
        ("shape", "says"),
        [
            (
                (8, 6),
                r"Cannot shard 'kernel' \(shape \(8, 6\)\) by the rule '.\*kernel', \(None, 'model'\): dim 1 has",
            ),
            ((8,), r"'kernel' \(shape \(8,\)\) by the rule '.\*kernel'.*has 2 entries, but the tensor has 1 dim"),
        ],
    )
    def test_a_rule_that_does_not_fit_names_all(self, layout_map, shape, says):
        with kd.ModelParallel(layout_map=layout_map).scope(), pytest.raises(ValueError, match=says):
            keras.Variable(np.ones(shape), name="kernel")

    def test_a_rule_may_be_shorter_than_the_rank(self, mesh):
        layout_map = kd.LayoutMap(mesh)
        layout_map["kernel"] = ("model",)
        with kd.ModelParallel(layout_map=layout_map).scope():
            variable = keras.Variable(np.ones((8, 3, 3)), name="kernel")
        assert variable.value.sharding.shard_shape((8, 3, 3)) == (2, 3, 3)

    def test_a_distribution_of_ones_own(self, mesh):
        class LargeOnesSharded(kd.Distribution):
            def get_variable_layout(self, variable):
                axes = ["model" if size >= 64 else None for size in variable.shape]
                return kd.TensorLayout(axes, self.device_mesh)

        with LargeOnesSharded(mesh, batch_dim_name="data").scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64), keras.layers.Dense(3)])
            model.compile("sgd", "mse")
            model.fit(np.ones((7, 4)), np.ones((7, 3)), verbose=0)
        assert [v.value.sharding.shard_shape(v.shape) for v in model.weights] == [(4, 16), (16,), (16, 3), (3,)]


class TestDistributeTensor:
    def test_eager_and_in_a_compiled_function(self, mesh):
        layout = kd.TensorLayout(("data", "model"), mesh)
        for function in (lambda x: kd.distribute_tensor(x, layout), jax.jit(lambda x: kd.distribute_tensor(x, layout))):
            assert function(np.ones((4, 8))).sharding.shard_shape((4, 8)) == (2, 2)

    def test_trees_and_symbolic_tensors(self, mesh):
        layout = kd.TensorLayout(("data",), mesh)
        symbolic = keras.KerasTensor((2, 3))
        placed = kd.distribute_tensor({"a": np.ones((4, 2)), "b": (symbolic,)}, layout)
        assert placed["a"].sharding.shard_shape((4, 2)) == (2, 2)
        assert placed["b"][0] is symbolic

    def test_what_keras_takes(self, mesh):
        plain_mesh = keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names, mesh.devices)
        sharding = jax.sharding.NamedSharding(mesh.backend_mesh, jax.sharding.PartitionSpec("data"))
        for layout in (keras.distribution.TensorLayout(("data",), plain_mesh), sharding):
            assert kd.distribute_tensor(np.ones((4, 2)), layout).sharding.shard_shape((4, 2)) == (2, 2)

    def test_axes_are_of_the_installed_mesh(self, layout_map):
        with pytest.raises(ValueError, match=r"'data', None"):
            kd.distribute_tensor(np.ones((4, 2)), ("data", None))
        with kd.ModelParallel(layout_map=layout_map).scope():
            assert kd.distribute_tensor(np.ones((4, 2)), ["data", None]).sharding.shard_shape((4, 2)) == (2, 2)

    def test_batch_axes_need_not_divide_and_others_must(self, layout_map, mesh):
        with kd.ModelParallel(layout_map=layout_map).scope():
            placed = kd.distribute_tensor(np.ones((5, 8)), kd.TensorLayout(("data", "model"), mesh))
            assert placed.sharding.shard_shape((5, 8)) == (5, 2)
            with pytest.raises(ValueError, match=r"a tensor \(shape \(4, 6\)\).*dim 1 has size 6"):
                kd.distribute_tensor(np.ones((4, 6)), kd.TensorLayout(("data", "model"), mesh))
            with pytest.raises(ValueError, match="has 2 entries, but the tensor has 1 dim"):
                kd.distribute_tensor(np.ones(4), kd.TensorLayout(("data", "model"), mesh))

    def test_an_output_rule_that_does_not_fit_names_the_layer(self, layout_map):
        layout_map["head/output"] = (None, "model")
        with kd.ModelParallel(layout_map=layout_map).scope():
            layer = keras.layers.Activation("relu", name="head")
            with pytest.raises(ValueError, match=r"the output of 'head/output|the output of 'head'"):
                layer(np.ones((4, 6)))


def test_a_loop_of_ones_own_lays_out_batches_as_fit_does():
    distribution = kd.DataParallel()
    with distribution.scope():
        dense = keras.layers.Dense(2)
        dense.build((None, 3))

    @jax.jit
    def loss(kernel, x):
        return (x @ kernel).sum()

    x = np.random.default_rng(0).random((10, 3), dtype=np.float32)
    expected = (x @ np.asarray(dense.kernel.value)).sum()
    np.testing.assert_allclose(loss(dense.kernel.value, distribution.distribute_batch(x)), expected, rtol=1e-5)


@pytest.mark.parametrize("rows", [slow(32), 37])
def test_there_are_no_more_compilations_than_in_keras(rows):
    """One for each function and shape: the remainder of 37 rows is a shape that Keras itself cannot take."""
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compilations.append(event) if event.endswith("backend_compile_duration") else None
    )

    def count(distribution, rows):
        keras.utils.set_random_seed(0)
        with distribution.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)])
            model.compile("sgd", "mse")
            x, y = np.ones((rows, 4), "float32"), np.ones((rows, 3), "float32")
            model.fit(x, y, batch_size=16, verbose=0)
            first = len(compilations)
            model.fit(x, y, batch_size=16, epochs=2, verbose=0)
            model.fit(x, y, batch_size=16, verbose=0)
        return first, len(compilations) - first

    count(kd.DataParallel(), 32)  # what JAX compiles once in a process
    compilations.clear()
    _, later_in_keras = count(keras.distribution.DataParallel(), 32)
    first_in_keras = len(compilations) - later_in_keras
    compilations.clear()
    first, later = count(kd.DataParallel(), rows)
    assert first <= first_in_keras + (rows % 16 > 0)
    assert later == later_in_keras == 0


class Replicating(kd.DataParallel):
    def get_data_layout(self, data_shape):
        return kd.TensorLayout([None] * len(data_shape), self.device_mesh)


def test_a_data_layout_of_a_subclass_is_that_of_batches():
    assert kd.DataParallel().distribute_batch(np.ones((8, 2))).sharding.shard_shape((8, 2)) == (1, 2)
    distribution = Replicating()
    assert distribution.distribute_batch(np.ones((8, 2))).sharding.is_fully_replicated
    with distribution.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((12, 2)), np.ones((12, 1)), batch_size=8, verbose=0)
        assert model.predict(np.ones((5, 2)), verbose=0).shape == (5, 1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: kd.DataParallel().with_step_options({"remat": "full"}), "step_options must be a keras_dist.StepOpt"),
        (lambda: kd.FullyShardedDataParallel(min_shard_bytes="64k"), "min_shard_bytes='64k' must be a number of bytes"),
        (lambda: kd.DataParallel(auto_shard_dataset="False"), "auto_shard_dataset='False' is text"),
        (lambda: kd.FullyShardedDataParallel(shard_axis=0), "Mesh axes 0 must be None, the name of an axis"),
    ],
)
def test_arguments_of_another_type(make, says):
    with pytest.raises(TypeError, match=says):
        make()


@pytest.mark.parametrize("number", [-1, float("nan")])
def test_a_size_of_shards_that_is_no_size(number):
    with pytest.raises(ValueError, match=f"min_shard_bytes={number} must be at least 0"):
        kd.FullyShardedDataParallel(min_shard_bytes=number)


@pytest.mark.parametrize("make", [kd.ModelParallel, kd.FullyShardedDataParallel])
def test_a_map_without_a_mesh(make, mesh):
    with pytest.raises(ValueError, match=f"{make.__name__} uses the mesh of its layout map, None, but got"):
        make(layout_map=kd.LayoutMap(None), device_mesh=mesh)


def test_a_tensor_is_distributed_by_a_partition_spec(mesh):
    with kd.ModelParallel(layout_map=kd.LayoutMap(mesh)).scope():
        assert kd.distribute_tensor(np.ones((8, 8)), jax.P("model")).sharding.shard_shape((8, 8)) == (2, 8)

"""Host batches are placed on a mesh as global arrays."""

import jax
import keras
import numpy as np
import pytest
from jax.experimental import sparse

import keras_dist as kd
from keras_dist.data.batch_placement import BatchPlacer


@pytest.fixture
def placer():
    """Batches over both axes of a 2 x 4 mesh."""
    return BatchPlacer(kd.DeviceMesh((2, 4), ["data", "fsdp"]), ("data", "fsdp"))


@pytest.mark.parametrize(("rows", "rows_per_device"), [(16, 2), (12, 3), (6, 3), (5, 5), (0, 0)])
def test_rows_are_sharded_over_the_largest_subset_of_axes_that_divides_them(placer, rows, rows_per_device):
    values = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    placed = placer.place(values)
    assert placed.sharding.shard_shape(placed.shape) == (rows_per_device, 3)
    np.testing.assert_array_equal(np.asarray(placed), values)


def test_structure_and_none_are_kept(placer):
    batch = ({"a": np.ones((8, 2)), "b": [3, np.float32(0.5)]}, None, (np.ones(5),))
    placed = placer.place(batch)
    assert jax.tree.structure(placed) == jax.tree.structure(batch)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(placed))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(placed)} == {8}
    assert float(placed[0]["b"][1]) == 0.5


@pytest.mark.parametrize("number", [2, 0.5, True])
def test_a_python_number_keeps_its_weak_type(placer, number):
    array = np.full((8, 1), 200, "uint8")
    placed_array, placed_number = placer.place((array, number))
    expected = jax.device_put(array) * jax.device_put(number)
    assert (placed_array * placed_number).dtype == expected.dtype
    np.testing.assert_array_equal(placed_array * placed_number, expected)


def test_without_batch_axes_batches_are_replicated():
    placed = BatchPlacer(kd.DeviceMesh((8,), ["model"]), ()).place(np.ones((16, 2)))
    assert placed.sharding.is_fully_replicated
    assert len(placed.sharding.device_set) == 8


def test_an_array_sharded_on_this_mesh_is_unchanged(placer):
    mine = jax.device_put(np.ones((16, 8)), kd.TensorLayout(("data", "fsdp"), placer.device_mesh).backend_layout)
    replicated = jax.device_put(np.ones((16, 8)), kd.TensorLayout((), placer.device_mesh).backend_layout)
    placed = placer.place((mine, replicated))
    assert placed[0].sharding == mine.sharding
    assert placed[1].sharding.shard_shape((16, 8)) == (2, 8)


def test_an_array_on_another_mesh_is_moved(placer):
    elsewhere = jax.device_put(
        np.arange(8.0), kd.TensorLayout(("x",), kd.DeviceMesh((2,), ["x"], ["cpu:1", "cpu:0"])).backend_layout
    )
    placed = placer.place(elsewhere)
    assert placed.sharding.device_set == set(jax.devices())
    np.testing.assert_array_equal(np.asarray(placed), np.arange(8.0))


def test_a_sparse_array_is_replicated(placer):
    dense = np.eye(6, dtype=np.float32)
    placed = placer.place(sparse.BCOO.fromdense(dense))
    assert placed.data.sharding.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(placed.todense()), dense)


def test_equal_numbers_of_rows_share_a_sharding_object(placer):
    assert placer.sharding((8, 3)) is placer.sharding((16,))


def test_batches_on_explicit_axes_train():
    """`jax.make_mesh` makes such axes by default."""
    mesh = jax.make_mesh((8,), ("data",))
    x, y = (jax.device_put(np.ones((16, width), "float32"), jax.NamedSharding(mesh, jax.P("data"))) for width in (4, 2))
    layout_map = kd.LayoutMap(mesh)
    layout_map["dense/kernel"] = kd.TensorLayout((None, None), mesh)
    layout_map["dense/bias"] = (None,)
    for distribution in (kd.DataParallel(mesh), kd.ModelParallel(layout_map=layout_map)):
        with distribution.scope():
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(2, name="dense", kernel_initializer="ones")]
            )
            model.compile("sgd", "mse")
            np.testing.assert_allclose(model(x), 4)
            np.testing.assert_allclose(model.predict_on_batch(x), 4)
            assert float(model.train_on_batch(x, y)) == pytest.approx(9)
            model.fit(((x, y) for _ in range(2)), steps_per_epoch=2, verbose=0)

"""`TensorLayout` is an immutable value, validated when it is created, and converts to a `NamedSharding`."""

import pickle

import jax
import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import keras_dist as kd
from keras_dist.layout.tensor_layout import as_tensor_layout, layout_error, nearest_fitting_axes


@pytest.mark.parametrize(
    ("axes", "spec", "normalized"),
    [
        ((None, "model"), PartitionSpec(None, "model"), (None, "model")),
        (["data", None], PartitionSpec("data", None), ("data", None)),
        ((("data", "model"), None), PartitionSpec(("data", "model"), None), (("data", "model"), None)),
        ([["model", "data"]], PartitionSpec(("model", "data")), (("model", "data"),)),
        ([("model",), ()], PartitionSpec("model", None), ("model", None)),
        ((), PartitionSpec(), ()),
        (PartitionSpec(("data",), ()), PartitionSpec("data", None), ("data", None)),
        (PartitionSpec(("data", "model")), PartitionSpec(("data", "model")), (("data", "model"),)),
    ],
)
def test_axes_convert_to_a_partition_spec(mesh, axes, spec, normalized):
    layout = kd.TensorLayout(axes, mesh)
    assert layout.axes == normalized
    assert layout.backend_layout == jax.sharding.NamedSharding(mesh.backend_mesh, spec)
    assert isinstance(layout, keras.distribution.TensorLayout)


@pytest.mark.parametrize(
    ("axes", "error", "values"),
    [
        (("data", "seq"), ValueError, r"Invalid axis names for Layout.*'seq'.*\['data', 'model'\]"),
        (("data", "data"), ValueError, "'data' is used twice"),
        ((("data", "model"), "data"), ValueError, "'data' is used twice"),
        ("model", TypeError, r"'model'.*\('model',\)"),
        (None, TypeError, "None"),
        ((None, 3), TypeError, r"\(None, 3\).* 3"),
        ((("data", None),), TypeError, r"\('data', None\)"),
        (PartitionSpec(None, PartitionSpec.UNCONSTRAINED), ValueError, r"P\(None, UNCONSTRAINED"),
        (PartitionSpec("data", unreduced={"model"}), ValueError, "unreduced={'model'}"),
        (PartitionSpec("data", reduced={"model"}), ValueError, " reduced={'model'}"),
        (PartitionSpec("seq"), ValueError, "Invalid axis names"),
    ],
)
def test_invalid_axes_raise_when_the_layout_is_created(mesh, axes, error, values):
    with pytest.raises(error, match=values):
        kd.TensorLayout(axes, mesh)


def test_the_mesh_can_be_set_once(mesh):
    layout = kd.TensorLayout(("data",))
    with pytest.raises(ValueError, match="Cannot create sharding when device mesh is not set"):
        _ = layout.backend_layout
    with pytest.raises(ValueError, match="Invalid axis names"):
        layout.device_mesh = kd.DeviceMesh((8,), ["batch"])
    assert layout.device_mesh is None
    layout.device_mesh = mesh
    assert layout.backend_layout.spec == PartitionSpec("data")
    with pytest.raises(ValueError, match="Cannot override device mesh"):
        layout.device_mesh = mesh


def test_layouts_with_equal_axes_and_meshes_are_equal(mesh):
    layout = kd.TensorLayout((None, "model"), mesh)
    same = kd.TensorLayout([None, ("model",)], kd.DeviceMesh((2, 4), ["data", "model"]))
    plain = keras.distribution.TensorLayout(
        (None, "model"), keras.distribution.DeviceMesh((2, 4), ["data", "model"], mesh.devices)
    )
    copy = pickle.loads(pickle.dumps(layout))
    assert layout == same == copy
    assert layout == plain
    assert plain == layout
    assert len({layout, same, copy}) == 1
    assert layout != kd.TensorLayout((None, "model"))
    assert layout != kd.TensorLayout(("model", None), mesh)
    assert layout != kd.TensorLayout((None, "model"), kd.DeviceMesh((4, 2), ["data", "model"]))
    assert layout != (None, "model")


def test_setting_the_mesh_keeps_the_hash(mesh):
    layout = kd.TensorLayout(("data",))
    held = {layout}
    layout.device_mesh = mesh
    assert layout in held


def test_a_layout_of_keras_is_converted(mesh):
    plain_mesh = keras.distribution.DeviceMesh((2, 4), ["data", "model"], mesh.devices)
    layout = as_tensor_layout(keras.distribution.TensorLayout(("data",), plain_mesh))
    assert type(layout) is kd.TensorLayout
    assert layout == kd.TensorLayout(("data",), mesh)
    assert as_tensor_layout(PartitionSpec("data", None)) == kd.TensorLayout(("data", None))
    with pytest.raises(ValueError, match=r"should be a TensorLayout type.*got int"):
        as_tensor_layout(3)


SIZES = {"data": 2, "model": 4, "seq": 3}


@pytest.mark.parametrize(
    ("axes", "shape"),
    [((None, "model"), (5, 8)), (("data",), (4, 3, 3)), ((("data", "model"), None), (16, 1)), (("data",), (None, 3))],
)
def test_layouts_that_fit(axes, shape):
    assert layout_error(axes, shape, SIZES) is None


@pytest.mark.parametrize(
    ("axes", "shape", "values"),
    [
        ((None, "model"), (5,), ["2 entries", "1 dim", "(None,)"]),
        (("data",), (), ["1 entry", "0 dims", "()"]),
        (
            (None, "model", None),
            (4096, 2, 256),
            ["dim 1 has size 2", "'model' (size 4)", "(None, None, None)", "1 or 2"],
        ),
        ((("data", "seq"),), (4,), ["dim 0 has size 4", "('data', 'seq') (product 6)", "1, 2 or 4"]),
        (("seq",), (7919,), ["size 7919", "'seq' (size 3)", "size 1."]),
        ((None, "model"), (3, 3, 6, 8), ["dim 1 has size 3", "(None, None, None, 'model')", "1 or 3"]),
    ],
)
def test_the_error_of_a_layout_that_does_not_fit_has_the_values_and_a_fix(axes, shape, values):
    error = layout_error(axes, shape, SIZES)
    assert error is not None
    assert [value for value in values if value not in error] == []


@given(
    st.lists(st.sampled_from([None, "data", "model", ("data", "seq")]), max_size=4).map(tuple),
    st.lists(st.integers(0, 24), max_size=4).map(tuple),
)
def test_the_nearest_fitting_axes_fit_and_are_the_given_ones_if_these_fit(axes, shape):
    nearest = nearest_fitting_axes(axes, shape, SIZES)
    assert len(nearest) == len(shape)
    assert layout_error(nearest, shape, SIZES) is None
    if layout_error(axes, shape, SIZES) is None:
        assert nearest == (*axes, *[None] * (len(shape) - len(axes)))

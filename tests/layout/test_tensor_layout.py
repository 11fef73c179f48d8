"""A tensor layout is a value, validated at construction, and lowers to a NamedSharding."""

import pickle

import jax
import keras
import pytest
from jax.sharding import PartitionSpec

import keras_dist as kd
from keras_dist.layout.tensor_layout import as_tensor_layout, layout_error


@pytest.fixture
def mesh():
    """Two axes over 8 devices."""
    return kd.DeviceMesh((2, 4), ["data", "model"])


@pytest.mark.parametrize(
    ("axes", "spec", "stands_as"),
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
def test_axes_lower_to_a_spec(mesh, axes, spec, stands_as):
    layout = kd.TensorLayout(axes, mesh)
    assert layout.axes == stands_as
    assert layout.backend_layout == jax.sharding.NamedSharding(mesh.backend_mesh, spec)
    assert isinstance(layout, keras.distribution.TensorLayout)


@pytest.mark.parametrize(
    ("axes", "error", "says"),
    [
        (("data", "seq"), ValueError, r"Invalid axis names for Layout.*\['data', 'model'\].*'seq'"),
        (("data", "data"), ValueError, "axis 'data' is used twice"),
        ((("data", "model"), "data"), ValueError, "axis 'data' is used twice"),
        ("model", TypeError, r"Received: 'model'. Write, for example, \('model',\)"),
        (None, TypeError, "one entry for each dim"),
        ((None, 3), TypeError, "Received: \\(None, 3\\)"),
        ((("data", None),), TypeError, "tuple of names"),
        (PartitionSpec(None, PartitionSpec.UNCONSTRAINED), ValueError, r"none to the compiler.*P\(None, UNCONSTRAINED"),
        (PartitionSpec("data", unreduced={"model"}), ValueError, "no unreduced or reduced axes. .*Write None"),
        (PartitionSpec("data", reduced={"model"}), ValueError, "no unreduced or reduced axes. .*Write None"),
        (PartitionSpec("seq"), ValueError, "Invalid axis names"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(mesh, axes, error, says):
    with pytest.raises(error, match=says):
        kd.TensorLayout(axes, mesh)


def test_a_mesh_can_be_set_once(mesh):
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


def test_equality_is_of_axes_and_mesh(mesh):
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


def test_a_plain_layout_becomes_ours(mesh):
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
def test_what_fits_has_no_misfit(axes, shape):
    assert layout_error(axes, shape, SIZES) is None


@pytest.mark.parametrize(
    ("axes", "shape", "says"),
    [
        ((None, "model"), (5,), "the rule has 2 entries, but the tensor has 1 dim."),
        ((None, "model"), (5,), "Give tensors of 1 dim a rule of their own, or shorten the rule to (None,)"),
        (("data",), (), "the rule has 1 entry, but the tensor has 0 dims. Give tensors of 0 dims"),
        (
            (None, "model", None),
            (4096, 2, 256),
            "dim 1 has size 2, which axis 'model' (size 4) does not divide. Replicate that dim with "
            "(None, None, None), or use a 'model' axis of size 1 or 2.",
        ),
        ((("data", "seq"),), (4,), "axes ('data', 'seq') (product 6) does not divide"),
        (("seq",), (7919,), "of size 1."),
    ],
)
def test_a_misfit_says_why_and_what_would_fit(axes, shape, says):
    problem = layout_error(axes, shape, SIZES)
    assert problem is not None
    assert says in problem

"""Texts of `keras_dist/layout`."""

from jax.sharding import PartitionSpec

import keras_dist as kd
from keras_dist.layout.tensor_layout import layout_error


def mesh(axes="data:2,model:4"):
    return kd.create_device_mesh(axes)


def layout_map(rules=(), axes="data:2,model:4"):
    layout_map = kd.LayoutMap(None if axes is None else mesh(axes))
    layout_map.update(rules)
    return layout_map


def ordered(*rules):
    return kd.LayoutMap.from_rules(rules, mesh())


def path_with_several_rules():
    return layout_map({".*kernel": (None, "model"), "dense.*": ("model", None)})["dense_1/kernel"]


def second_mesh_for_a_layout():
    kd.TensorLayout(("data",), mesh()).device_mesh = mesh("data:8")


def layout_on_another_mesh():
    return layout_map({"kernel": kd.TensorLayout(("data",), mesh("data:8"))}).to_source()


AXIS_SIZES = {"data": 2, "model": 4}

CASES = {
    "axes as a string": lambda: kd.TensorLayout("model"),
    "an entry that is no axis": lambda: kd.TensorLayout((None, 3)),
    "an axis used twice": lambda: kd.TensorLayout(("data", ("model", "data"))),
    "an axis that the mesh does not have": lambda: kd.TensorLayout((None, "modle"), mesh()),
    "an unconstrained dim": lambda: kd.TensorLayout(PartitionSpec(PartitionSpec.UNCONSTRAINED)),
    "a second mesh for a layout": second_mesh_for_a_layout,
    "a layout without a mesh": lambda: kd.TensorLayout(("data",)).backend_layout,
    "a size that the axis does not divide": lambda: layout_error((None, "model", None), (4096, 2, 256), AXIS_SIZES),
    "a size that two axes do not divide": lambda: layout_error((("data", "model"), None), (12, 8), AXIS_SIZES),
    "a layout with too many entries": lambda: layout_error((None, "model"), (64,), AXIS_SIZES),
    "the layout of a matrix for a convolution": lambda: layout_error((None, "model"), (3, 3, 64, 128), AXIS_SIZES),
    "a map of no mesh": lambda: kd.LayoutMap("data:8"),
    "a value that is no layout": lambda: layout_map({"dense/kernel": 7}),
    "a rule with an unknown axis": lambda: layout_map({"dense/kernel": ("batch", None)}),
    "a key that is no string": lambda: layout_map({7: ()}),
    "a key that is no regex": lambda: layout_map({"dense(": ()}),
    "a glob": lambda: layout_map({"*up/kernel": (None, "model")}),
    "a key that exists already": lambda: layout_map({"a": ()}).__setitem__("a", ("data",)),
    "several rules for one path": path_with_several_rules,
    "a rule that is no pair": lambda: ordered("kernel"),
    "an unreachable rule": lambda: ordered((".*", ()), ("dense/kernel", (None, "model"))),
    "merging maps with different meshes": lambda: layout_map() | layout_map(axes="data:8"),
    "merging an ordered map with another one": lambda: ordered(("a", ())) | layout_map({"b": ()}),
    "source code for a layout on another mesh": layout_on_another_mesh,
    "source code for a mesh object": lambda: layout_map().to_source(mesh()),
    "source code": lambda: layout_map({"block_[0-9]+/up/kernel": (None, "model")}).to_source("mesh"),
    "source code of ordered rules": lambda: ordered(("up/kernel", (None, "model")), (".*", ())).to_source(),
    "repr of a map": lambda: repr(layout_map({"up/kernel": (None, "model")})),
    "no layout map": lambda: kd.ModelParallel(layout_map={"dense/kernel": (None, "model")}),
    "axes without a mesh": lambda: kd.distribute_tensor([1.0], ("data",)),
}

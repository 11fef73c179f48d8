"""A `LayoutMap` is a dict of rules: lookups by path, changes by key."""

import re

import keras
import pytest

import keras_dist as kd
from keras_dist.layout.layout_map import as_layout_map


@pytest.fixture
def layout_map(mesh):
    """Three rules, one of them a path."""
    layout_map = kd.LayoutMap(mesh)
    layout_map["dense.*/kernel"] = (None, "model")
    layout_map["dense_1/kernel"] = ("model", None)
    layout_map[".*bias"] = ["model"]
    return layout_map


def test_it_is_a_layout_map_of_keras(layout_map):
    assert isinstance(layout_map, keras.distribution.LayoutMap)


def test_a_path_finds_its_rule_and_an_exact_key_wins(layout_map, mesh):
    assert layout_map["dense_2/kernel"] == kd.TensorLayout((None, "model"), mesh)
    assert layout_map["dense_1/kernel"].axes == ("model", None)
    assert layout_map["conv/bias"].axes == ("model",)
    assert layout_map["conv/kernel"] is None
    assert layout_map.rule("dense_2/kernel").pattern == "dense.*/kernel"
    assert layout_map.rule("conv/kernel") is None


def test_a_regex_must_match_the_entire_path(layout_map):
    assert layout_map["block/dense_2/kernel"] is None
    assert layout_map["dense_2/kernel/scale"] is None


def test_in_and_get_agree_with_lookup(layout_map):
    assert "dense_2/kernel" in layout_map
    assert ".*bias" in layout_map
    assert "conv/kernel" not in layout_map
    assert 3 not in layout_map
    assert layout_map.get("conv/kernel") is None
    assert layout_map.get("conv/kernel", "default") == "default"
    assert layout_map.get("dense_2/kernel", "default").axes == (None, "model")


def test_a_path_that_several_rules_match_raises(layout_map):
    layout_map["dense_3/.*"] = ()
    with pytest.raises(ValueError, match=r"'dense_3/kernel' matches multiple.*'dense.\*/kernel', 'dense_3/.\*'"):
        layout_map["dense_3/kernel"]
    assert "dense_3/kernel" in layout_map


def test_rules_for_outputs_and_inputs_name_them(layout_map):
    layout_map["up/.*"] = ("model",)
    layout_map["down/.*(output|input)"] = ("data",)
    found = [layout_map[f"{layer}/{name}"] for layer in ("up", "down") for name in ("scale", "output", "input")]
    assert [layout and layout.axes for layout in found] == [("model",), None, None, None, ("data",), ("data",)]


@pytest.mark.parametrize("prefix", ["sequential/", "sequential_3/", "functional_12/", "sequential_1/sequential/"])
def test_rules_need_no_automatic_model_name(layout_map, prefix):
    assert layout_map[f"{prefix}dense_2/kernel"].axes == (None, "model")
    assert layout_map[f"{prefix}dense_1/kernel"].axes == ("model", None)
    assert layout_map[f"{prefix}dense_2/output"] is None


@pytest.mark.parametrize("prefix", ["encoder/", "sequential_x/", "my_sequential/", "block/sequential/"])
def test_rules_need_any_other_model_name(layout_map, prefix):
    assert layout_map[f"{prefix}dense_2/kernel"] is None


def test_a_rule_with_the_automatic_model_name_takes_precedence(layout_map):
    layout_map["sequential/dense_2/kernel"] = ()
    layout_map["sequential_[0-9]/dense_5/.*"] = ()
    assert layout_map["sequential/dense_2/kernel"].axes == ()
    assert layout_map["sequential_4/dense_5/kernel"].axes == ()
    assert layout_map["dense_5/kernel"].axes == (None, "model")


def test_changes_take_effect_after_lookups(layout_map):
    assert layout_map["norm/scale"] is None
    layout_map["norm/.*"] = ()
    assert layout_map["norm/scale"].axes == ()
    del layout_map["norm/.*"]
    assert layout_map["norm/scale"] is None
    del layout_map["dense_1/kernel"]
    assert layout_map["dense_1/kernel"].axes == (None, "model")


def test_it_is_a_dict_of_its_keys(layout_map):
    assert list(layout_map) == ["dense.*/kernel", "dense_1/kernel", ".*bias"]
    assert len(layout_map) == 3
    assert [layout.axes for layout in layout_map.values()] == [(None, "model"), ("model", None), ("model",)]
    with pytest.raises(KeyError):
        del layout_map["dense_2/kernel"]
    with pytest.raises(KeyError):
        layout_map.pop("conv/bias")
    assert layout_map.pop("conv/bias", None) is None
    assert layout_map.pop(".*bias").axes == ("model",)
    assert layout_map.setdefault(".*bias", ("data",)).axes == ("data",)
    assert layout_map.setdefault(".*bias", ("model",)).axes == ("data",)
    layout_map.update({"head/kernel": ("model",)})
    assert len(layout_map) == 4
    layout_map.clear()
    assert not layout_map


@pytest.mark.parametrize(
    ("key", "value", "error", "values"),
    [
        ("dense.*/kernel", ("data",), ValueError, "already exist in the LayoutMap"),
        ("dense(", ("data",), ValueError, r"'dense\(' is not a valid regex"),
        (7, ("data",), TypeError, "must be a string.* 7"),
        ("head", 7, ValueError, "Rule 'head': 7 should be a TensorLayout type"),
        ("head", "data", ValueError, "Rule 'head': 'data' should be a TensorLayout type"),
        ("head", ("seq",), ValueError, "Rule 'head': Invalid axis names"),
        ("head", ("data", "data"), ValueError, "Rule 'head': .*'data' is used twice"),
        ("head", ("data", 3), TypeError, "Rule 'head': "),
    ],
)
def test_an_invalid_rule_raises_and_changes_nothing(layout_map, key, value, error, values):
    before = dict(layout_map)
    with pytest.raises(error, match=values):
        layout_map[key] = value
    assert dict(layout_map) == before


def test_a_layout_without_a_mesh_is_given_the_mesh_of_each_map(mesh):
    other_mesh = kd.DeviceMesh((4, 2), ["data", "model"])
    layout = kd.TensorLayout((None, "model"))
    one, other = kd.LayoutMap(mesh), kd.LayoutMap(other_mesh)
    one["kernel"] = layout
    other["kernel"] = layout
    other["bias"] = one["kernel"]
    assert one["kernel"] is layout
    assert layout.device_mesh is mesh
    assert other["kernel"].device_mesh is other_mesh
    assert other["bias"].device_mesh is other_mesh


def test_a_layout_made_with_a_mesh_keeps_it(mesh):
    own = kd.TensorLayout(("x",), kd.DeviceMesh((8,), ["x"]))
    layout_map = kd.LayoutMap(mesh)
    layout_map["kernel"] = own
    assert layout_map["kernel"] is own


def test_a_map_of_keras_is_converted(mesh):
    plain = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 4), ["data", "model"], mesh.devices))
    plain["dense.*/kernel"] = (None, "model")
    ours = as_layout_map(plain)
    assert type(ours) is kd.LayoutMap
    assert ours["sequential/dense_1/kernel"] == kd.TensorLayout((None, "model"), mesh)
    assert as_layout_map(ours) is ours
    with pytest.raises(ValueError, match=r"must be a `LayoutMap` instance.*dict"):
        as_layout_map({})
    with pytest.raises(ValueError, match="instance of `DeviceMesh`"):
        kd.LayoutMap("mesh")


def test_its_repr_shows_the_rules(layout_map):
    assert re.search(
        r"LayoutMap \{'dense.\*/kernel': \(None, 'model'\), .*DeviceMesh data:2 x model:4", repr(layout_map)
    )

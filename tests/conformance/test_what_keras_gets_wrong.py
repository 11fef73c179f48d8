"""Meshes, layouts and rules that `keras.distribution` gets wrong; each scenario runs on it and on ours."""

import re

import keras
import pytest
from support.keras_scenarios import (
    KERAS,
    check_as_on_one_device,
    fit,
    model_parallel,
    raises_error_of_jax,
    raises_indivisible,
    shard_shape,
    start_anew,
)

import keras_dist as kd


def mesh_2x4(api, names=("data", "model")):
    return api.DeviceMesh((2, 4), list(names))


# ------------------------------------------------------------------------------------- distributions and their mesh


def test_data_parallel_over_a_mesh_of_two_axes_warns_and_takes_the_first():
    with pytest.raises(TypeError, match="category must be a Warning subclass"):
        KERAS.DataParallel(mesh_2x4(KERAS))
    with pytest.warns(UserWarning, match="1D mesh.*'data'"):
        distribution = kd.DataParallel(mesh_2x4(kd))
    assert distribution.batch_dim_name == "data"
    assert distribution.num_model_replicas == 2


@pytest.mark.filterwarnings("ignore:DataParallel expects a 1D mesh")
def test_data_parallel_over_a_mesh_of_two_axes_trains():
    check_as_on_one_device(fit, distribution=lambda api: api.DataParallel(mesh_2x4(api)))


def test_data_parallel_over_no_devices():
    assert KERAS.DataParallel(devices=[]).device_mesh.shape == (8,)  # all of them
    with pytest.raises(ValueError, match=r"devices=\[\]"):
        kd.DataParallel(devices=[])


def test_model_parallel_with_an_unknown_argument():
    def misspelt(api):
        return api.ModelParallel(layout_map=api.LayoutMap(mesh_2x4(api)), batch_dim="model")

    assert misspelt(KERAS).batch_dim_name == "data"
    with pytest.raises(TypeError, match="batch_dim"):
        misspelt(kd)


@pytest.mark.parametrize("value", ["foo", 8, kd.DataParallel])
def test_set_distribution_to_what_is_none(value):
    KERAS.set_distribution(value)
    assert KERAS.distribution() is value
    KERAS.set_distribution(None)
    with pytest.raises(TypeError, match="set_distribution takes a distribution"):
        kd.set_distribution(value)
    assert kd.distribution() is None


def test_set_distribution_to_what_is_none_keeps_the_installed_one():
    installed = kd.DataParallel()
    kd.set_distribution(installed)
    with pytest.raises(TypeError, match="set_distribution takes a distribution"):
        kd.set_distribution("foo")
    assert kd.distribution() is installed


# ------------------------------------------------------------------------------------------------------- layout maps


def test_a_list_of_axes_in_a_layout_map():
    def axes(api):
        layout_map = api.LayoutMap(mesh_2x4(api))
        layout_map["dense/kernel"] = [None, "model"]
        return layout_map["dense/kernel"].axes

    with pytest.raises(ValueError, match="should be a TensorLayout type"):
        axes(KERAS)
    assert axes(kd) == (None, "model")


def test_a_layout_in_two_maps_lies_on_the_mesh_of_each():
    def shapes(api):
        layout = api.TensorLayout((None, "model"))
        maps = [api.LayoutMap(api.DeviceMesh(shape, ["data", "model"])) for shape in ((2, 4), (4, 2))]
        for layout_map in maps:
            layout_map["dense/kernel"] = layout
        return [layout_map["dense/kernel"].backend_layout.shard_shape((8, 8)) for layout_map in maps]

    assert shapes(KERAS) == [(8, 2), (8, 2)]
    assert shapes(kd) == [(8, 2), (8, 4)]


def test_a_bad_regex_is_refused_where_it_is_written():
    def insert(api):
        layout_map = api.LayoutMap(mesh_2x4(api))
        layout_map["(dense/kernel"] = (None, "model")
        return layout_map

    found_late = insert(KERAS)
    with pytest.raises(re.error, match="unterminated subpattern"):
        found_late["conv/kernel"]
    with pytest.raises(ValueError, match=r"\(dense/kernel.*unterminated subpattern"):
        insert(kd)


def test_what_is_in_a_layout_map():
    def contained(api):
        layout_map = api.LayoutMap(mesh_2x4(api))
        layout_map["dense.*/kernel"] = (None, "model")
        return ["dense_1/kernel" in layout_map, "dense_1/bias" in layout_map, "anything" in layout_map]

    assert contained(KERAS) == [True, True, True]
    assert contained(kd) == [True, False, False]


def test_get_with_a_default():
    def got(api):
        layout_map = api.LayoutMap(mesh_2x4(api))
        layout_map["dense.*/kernel"] = (None, "model")
        return layout_map.get("anything", "default"), layout_map.get("dense_1/kernel", "default")

    missing, found = got(KERAS)
    assert missing is None
    assert found.axes == (None, "model")
    missing, found = got(kd)
    assert missing == "default"
    assert found.axes == (None, "model")


# --------------------------------------------------------------------------------- rules that do not fit a variable


def build_layer(api, layer, *shapes, rules=None):
    """Builds a layer under rules."""
    with model_parallel(api, rules).scope():
        layer.build(*shapes)
    return layer


def assert_nothing_is_half_created(layer, *shapes):
    """A build that failed left no variable behind, and works where the rule is gone."""
    assert not layer.built
    assert layer.weights == []
    layer.build(*shapes)
    assert [variable.name for variable in layer.weights] == ["kernel", "bias"]


def test_a_dim_that_the_axis_does_not_divide():
    rules, shape = {".*kernel": (None, "model")}, (None, 4)
    with raises_indivisible() as error:
        build_layer(KERAS, keras.layers.Dense(6, name="odd"), shape, rules=rules)
    assert "odd" not in str(error.value)
    layer = keras.layers.Dense(6, name="odd")
    with pytest.raises(ValueError, match=re.escape("'odd/kernel' (shape (4, 6)) by the rule '.*kernel'")) as error:
        build_layer(kd, layer, shape, rules=rules)
    assert "axis 'model' (size 4)" in str(error.value)
    assert_nothing_is_half_created(layer, shape)


def test_a_rule_longer_than_the_rank():
    rules, shape = {".*kernel": (None, None, "model")}, (None, 4)
    with pytest.raises(IndexError, match="list index out of range"):
        build_layer(KERAS, keras.layers.Dense(8, name="flat"), shape, rules=rules)
    layer = keras.layers.Dense(8, name="flat")
    with pytest.raises(ValueError, match=re.escape("'flat/kernel' (shape (4, 8)) by the rule '.*kernel'")) as error:
        build_layer(kd, layer, shape, rules=rules)
    assert "3 entries, but the tensor has 2 dims" in str(error.value)
    assert_nothing_is_half_created(layer, shape)


def test_an_axis_twice_in_a_rule():
    rules, shape = {".*kernel": ("model", "model")}, (None, 4)
    with raises_error_of_jax("DuplicateSpecError", "duplicate entries"):
        build_layer(KERAS, keras.layers.Dense(4, name="square"), shape, rules=rules)
    # Ours needs no variable to see it: the rule is refused, and the map stays as it was.
    layout_map = kd.LayoutMap(mesh_2x4(kd))
    with pytest.raises(ValueError, match=re.escape("Rule '.*kernel'") + ".*axis 'model' is used twice"):
        layout_map[".*kernel"] = ("model", "model")
    assert len(layout_map) == 0


def test_key_and_value_heads_that_the_axis_does_not_divide():
    rules, shapes = {".*(query|key|value)/kernel": (None, "model", None)}, ((None, 3, 16), (None, 3, 16))

    def attention():
        return keras.layers.GroupQueryAttention(2, 4, 2, name="attention")

    with raises_indivisible() as error:
        build_layer(KERAS, attention(), *shapes, rules=rules)
    assert "attention" not in str(error.value)
    with pytest.raises(ValueError, match=re.escape("'attention/key/kernel' (shape (16, 2, 2))")):
        build_layer(kd, attention(), *shapes, rules=rules)


def test_one_dim_over_two_axes():
    rules = {".*kernel": (("data", "model"), None)}
    with pytest.raises(ValueError, match="Invalid axis names for Layout"):
        build_layer(KERAS, keras.layers.Dense(4), (None, 16), rules=rules)
    assert shard_shape(build_layer(kd, keras.layers.Dense(4), (None, 16), rules=rules).kernel) == (2, 4)


def test_one_dim_over_two_axes_trains():
    rules = {".*a/kernel": (None, ("data", "model")), ".*a/bias": (("model", "data"),)}
    check_as_on_one_device(fit, distribution=lambda api: model_parallel(api, rules))


# --------------------------------------------------------- the same rules for a Sequential and for a functional model


def sequential():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="dense")])


def functional():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(8, name="dense")(inputs))


def kernels(api, build, path, rules):
    """The part of the kernel that lies on one device, for a model and for the same one loaded from a file."""
    start_anew()
    with model_parallel(api, rules).scope():
        model = build()
        model.save(path)
        loaded = keras.saving.load_model(path)
    return [shard_shape(each.get_layer("dense").kernel) for each in (model, loaded)]


def test_the_rules_of_a_functional_model_match_the_same_layers_in_a_sequential(tmp_path):
    path, rules = tmp_path / "model.keras", {"dense/kernel": (None, "model")}
    assert kernels(KERAS, functional, path, rules) == [(4, 2), (4, 2)]
    # Replicated in silence, until the model is loaded: its paths have lost their first name then.
    assert kernels(KERAS, sequential, path, rules) == [(4, 8), (4, 2)]
    assert kernels(kd, functional, path, rules) == [(4, 2), (4, 2)]
    assert kernels(kd, sequential, path, rules) == [(4, 2), (4, 2)]


def test_the_second_sequential_of_a_process_matches_like_the_first():
    def second(api):
        start_anew()
        with model_parallel(api, {"dense/kernel": (None, "model")}).scope():
            sequential()
            model = sequential()
        assert model.weights[0].path == "sequential_1/dense/kernel"
        return shard_shape(model.weights[0])

    assert second(KERAS) == (4, 8)
    assert second(kd) == (4, 2)


@pytest.mark.parametrize("spelt", ["sequential/dense/kernel", "sequential.*/kernel"])
def test_a_rule_that_spells_the_name_of_the_sequential_wins(spelt, tmp_path):
    rules = {"dense/kernel": (None, "model"), spelt: ("data", None)}
    model, loaded = kernels(kd, sequential, tmp_path / "model.keras", rules)
    assert model == (2, 8)
    assert loaded == (4, 2)  # its path is `dense/kernel`


def test_a_name_that_a_user_gave_is_no_prefix_to_strip():
    with model_parallel(kd, {"dense/kernel": (None, "model")}).scope():
        layers = [keras.Input((4,)), keras.layers.Dense(8, name="dense")]
        model = keras.Sequential(layers, name="tower")
    assert model.weights[0].path == "tower/dense/kernel"
    assert shard_shape(model.weights[0]) == (4, 8)

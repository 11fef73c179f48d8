"""Layout maps with ordered rules, and merging, copying, comparing and generating source code of maps."""

import contextlib
import copy
import pickle
import re

import keras
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import keras_dist as kd
from keras_dist.layout.tensor_layout import axis_tuple

MESH = kd.DeviceMesh((2, 4), ["data", "model"])
OTHER_MESH = kd.DeviceMesh((4, 2), ["data", "model"])
COPIES = [copy.copy, copy.deepcopy, lambda layout_map: pickle.loads(pickle.dumps(layout_map))]


def made(rules, mesh=MESH):
    layout_map = kd.LayoutMap(mesh)
    for key, axes in rules.items():
        layout_map[key] = axes
    return layout_map


@pytest.fixture
def ordered():
    """Rules as EasyLM has them, made to match whole paths."""
    return kd.LayoutMap.from_rules(
        [
            (".*attention/(wq|wk|wv)/kernel", PartitionSpec(("data", "model"), None)),
            (".*kernel", [None, "model"]),
            (".*(?:scale|norm).*", ()),
            (".*block_[0-9]/output", ("data",)),
            (".*", PartitionSpec()),
        ],
        MESH,
    )


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("block_1/attention/wq/kernel", ".*attention/(wq|wk|wv)/kernel"),
        ("block_1/attention/wo/kernel", ".*kernel"),
        ("block_1/attention/wo/bias", ".*"),
        ("sequential_3/norm_kernel", ".*kernel"),
        ("sequential/attention/wq/kernel", ".*attention/(wq|wk|wv)/kernel"),
    ],
)
def test_the_first_rule_that_matches_wins(ordered, path, key):
    rule = ordered.rule(path)
    assert rule.pattern == key
    assert ordered[path] == ordered.get(path) == rule.layout == ordered[key]
    assert path in ordered


def test_an_ordered_rule_applies_to_outputs_only_if_it_contains_that_word(ordered):
    assert ordered["block_1/output"].axes == ("data",)
    for path in ("block_1/dense/output", "block_1/norm/output", "block_1/norm/input", "functional/norm/output"):
        assert ordered[path] is None
        assert path not in ordered
    assert ordered["output/kernel"].axes == (None, "model")
    both = kd.LayoutMap.from_rules([(".*attention_output.*", ()), (".*/(output|input)", ("data",))], MESH)
    assert both["block/attention_output/output"].axes == ("data",)
    assert both["block/attention_output/input"].axes == ("data",)
    assert both["block/attention_output/kernel"].axes == ()


def test_rules_before_a_final_catch_all_need_no_automatic_model_name():
    rules = [("dense_1/kernel", ("model",)), ("[^/]*/kernel", ("data",)), (".*", ())]
    layout_map = kd.LayoutMap.from_rules(rules, MESH)
    for prefix in ("", "sequential/", "functional_12/", "sequential_1/sequential/"):
        assert layout_map[f"{prefix}dense_1/kernel"].axes == ("model",)
        assert layout_map[f"{prefix}dense_2/kernel"].axes == ("data",)
        assert layout_map[f"{prefix}dense_2/bias"].axes == ()
    assert layout_map["encoder/dense_1/kernel"].axes == ()


def test_later_rules_of_an_ordered_map_are_tried_last(ordered):
    del ordered[".*"]
    assert ordered["block_1/bias"] is None
    ordered[".*bias"] = ("model",)
    ordered["block_[0-9]/.*"] = ("data",)
    assert list(ordered)[-2:] == [".*bias", "block_[0-9]/.*"]
    assert ordered["block_1/bias"].axes == ("model",)
    assert ordered["block_1/embedding"].axes == ("data",)


@pytest.mark.parametrize(
    ("rules", "hidden", "earlier"),
    [
        ([(".*", ()), ("dense.*/kernel", ())], "dense.*/kernel", ".*"),
        ([(".*(?:.*).*", ()), ("dense.*/kernel", ())], "dense.*/kernel", ".*(?:.*).*"),
        ([("a", ()), ("dense.*", ()), ("dense_1/kernel", ())], "dense_1/kernel", "dense.*"),
        ([("dense/kernel", ()), ("sequential/dense/kernel", ())], "sequential/dense/kernel", "dense/kernel"),
        ([(".*output", ()), ("dense/output", ())], "dense/output", ".*output"),
    ],
)
def test_an_unreachable_rule_raises(rules, hidden, earlier):
    with pytest.raises(ValueError, match=re.escape(f"{hidden!r} is unreachable: rule {earlier!r}")):
        kd.LayoutMap.from_rules(rules, MESH)
    assert len(made(dict(rules))) == len(rules)


def test_a_rule_that_may_be_reachable_is_accepted():
    rules = [("[^/]*kernel", ()), (".*kernel", ()), (".*", ()), (".*/(output|input)", ()), ("dense/output", ())]
    assert kd.LayoutMap.from_rules(rules[:4], MESH)["a/kernel"].axes == ()
    assert kd.LayoutMap.from_rules([*rules[:3], rules[4]], MESH)["dense/output"].axes == ()


@pytest.mark.parametrize(
    ("rules", "error", "values"),
    [
        ({"kernel": ()}, TypeError, "Rule 'kernel'"),
        ([("kernel", None, "model")], TypeError, r"Rule \('kernel', None, 'model'\)"),
        (["ab"], TypeError, "Rule 'ab'"),
        ([("a", ()), ("a", ())], ValueError, "a already exist in the LayoutMap"),
        ([("a", PartitionSpec(PartitionSpec.UNCONSTRAINED))], ValueError, "Rule 'a': .*UNCONSTRAINED"),
        ([("a", PartitionSpec("seq"))], ValueError, "Rule 'a': Invalid axis names"),
    ],
)
def test_invalid_rules_raise(rules, error, values):
    with pytest.raises(error, match=values):
        kd.LayoutMap.from_rules(rules, MESH)


PIECES = ["kernel", "a", "b", "/", ".*", "[^/]+", "(a|b)", r"\d", r"\\", "'", '"', r"\"", "\n", "{x}", "é", "\u2028"]


def is_regex(pattern):
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


entries = st.sampled_from([None, "data", "model", ("data", "model"), ("model", "data")])
layouts = st.lists(entries, max_size=3).filter(
    lambda axes: len(names := [name for entry in axes if entry for name in axis_tuple(entry)]) == len(set(names))
)
keys = st.lists(st.sampled_from(PIECES), max_size=6).map("".join).filter(is_regex)
some_rules = st.lists(st.tuples(keys, layouts.map(tuple)), max_size=6, unique_by=lambda rule: rule[0])
texts = st.lists(st.sampled_from(["a", "b", "kernel", "/", "7", "sequential/", "'", "x"]), min_size=1).map("".join)


def ordered_map(rules, mesh=MESH):
    """The map, or None where a rule is refused because no path can reach it."""
    with contextlib.suppress(ValueError):
        return kd.LayoutMap.from_rules(rules, mesh)


def first_match(rules, path):
    spelled = [path]
    while spelled[-1].startswith("sequential/"):
        spelled.append(spelled[-1].removeprefix("sequential/"))
    return next((key for key, _ in rules if any(re.fullmatch(key, each) for each in spelled)), None)


@given(some_rules, st.lists(texts, min_size=1, max_size=8))
def test_an_ordered_map_finds_what_trying_the_rules_in_order_finds(rules, paths):
    taken = []
    for rule in rules:
        if ordered_map([*taken, rule]) is not None:
            taken.append(rule)
        else:
            assert rule[0] not in [first_match([*taken, rule], path) for path in paths]
    layout_map = kd.LayoutMap.from_rules(taken, MESH)
    assert [(key, layout.axes) for key, layout in layout_map.items()] == taken
    for path in paths:
        rule = layout_map.rule(path)
        assert (rule and rule.pattern) == first_match(taken, path)


@given(some_rules, st.booleans(), st.sampled_from([MESH, None]))
def test_source_code_creates_an_equal_map(rules, is_ordered, mesh):
    layout_map = ordered_map(rules, mesh) if is_ordered else made(dict(rules), mesh)
    assume(layout_map is not None)
    names = {}
    exec(layout_map.to_source(), names)
    assert names["layout_map"] == layout_map
    assert list(names["layout_map"]) == list(layout_map)
    assert repr(names["layout_map"]) == repr(layout_map)


def test_source_code_has_one_rule_per_line(ordered):
    lines = ordered.to_source("mesh").splitlines()
    assert lines[2:5] == ["rules = [", "    ('.*attention/(wq|wk|wv)/kernel', (('data', 'model'), None)),", lines[4]]
    assert lines[-2:] == ["]", "layout_map = kd.LayoutMap.from_rules(rules, mesh)"]
    assert made({"a": ("data",), "b": ()}).to_source("mesh").splitlines()[2:] == [
        "layout_map = kd.LayoutMap(mesh)",
        "layout_map['a'] = ('data',)",
        "layout_map['b'] = ()",
    ]


def test_source_code_can_create_the_mesh(ordered):
    names = {}
    exec(ordered.to_source("kd.create_device_mesh('data:2,model:4')"), names)
    assert names["layout_map"] == ordered


def test_source_code_needs_all_layouts_on_the_mesh_of_the_map():
    layout_map = made({"a": kd.TensorLayout(("data",), OTHER_MESH)})
    with pytest.raises(ValueError, match=r"Rule 'a'.*data:4.*data:2"):
        layout_map.to_source()
    with pytest.raises(TypeError, match="device_mesh=<DeviceMesh"):
        layout_map.to_source(MESH)


def test_maps_are_merged_as_dicts_are():
    left, right = {"a": ("data",), "b": ("data",)}, {"c": ("model",), "a": ("model",)}
    one, other = made(left), made(right)
    merged = one | other
    assert {key: layout.axes for key, layout in merged.items()} == left | right
    assert list(merged) == list(left | right)
    assert (one, other) == (made(left), made(right))
    merged["d"] = ()
    assert "d" not in one
    assert "d" not in other
    held = one
    assert one["c"] is None
    one |= other
    assert held is one
    assert one == made(left | right)
    assert one["c"].axes == ("model",)


@pytest.mark.parametrize("has_mesh", [(True, True), (True, False), (False, True), (False, False)])
def test_a_merged_map_has_the_mesh_of_either_map(has_mesh):
    meshes = [MESH if each else None for each in has_mesh]
    one, other = made({"a": ("data",)}, meshes[0]), made({"b": ("model",)}, meshes[1])
    merged = one | other
    assert merged == made({"a": ("data",), "b": ("model",)}, MESH if any(has_mesh) else None)
    assert (one["a"].device_mesh, other["b"].device_mesh) == tuple(meshes)


def test_a_map_of_keras_can_be_merged():
    plain_mesh = keras.distribution.DeviceMesh((2, 4), ["data", "model"], MESH.devices)
    plain = keras.distribution.LayoutMap(plain_mesh)
    plain["b"] = ("model",)
    merged = made({"a": ("data",), "b": ()}) | plain
    assert merged == made({"a": ("data",), "b": ("model",)})
    assert type(merged["b"]) is kd.TensorLayout
    assert len(plain) == 1


def test_ordered_maps_are_merged_in_their_order():
    left, right = [("a.*", ("data",)), ("b.*", ("data",))], [("ab.*", ()), ("a.*", ("model",)), (".*", ())]
    merged = kd.LayoutMap.from_rules(left, MESH) | kd.LayoutMap.from_rules(right, None)
    assert merged == kd.LayoutMap.from_rules((dict(left) | dict(right)).items(), MESH)
    assert merged["abc"].axes == ("model",)
    assert merged["bc"].axes == ("data",)


@pytest.mark.parametrize(
    ("other", "error", "values"),
    [
        (kd.LayoutMap.from_rules([], OTHER_MESH), ValueError, "data:2.*data:4"),
        (made({"c": ()}), ValueError, r"Cannot merge <LayoutMap .*attention.* and <LayoutMap {'c'"),
        (kd.LayoutMap.from_rules([("c.*", ())], MESH), ValueError, r"'c.\*' is unreachable: rule '.\*'"),
        (kd.LayoutMap.from_rules([("c", ("x",))], None), ValueError, "Rule 'c': Invalid axis names"),
        ({"c": ()}, TypeError, "unsupported operand"),
    ],
)
def test_maps_that_cannot_be_merged_raise_and_stay_unchanged(ordered, other, error, values):
    before = copy.copy(ordered)
    if "Invalid" in values:
        del ordered[".*"], before[".*"]
    with pytest.raises(error, match=values):
        ordered | other
    with pytest.raises(error, match=values):
        ordered |= other
    assert ordered == before


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("devices", [None, kd.mock_tpus("v5e:2x4")])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_copy_keeps_kind_and_order_and_is_independent(copied, devices, is_ordered):
    mesh = kd.DeviceMesh("data:2,model:4", devices=devices)
    rules = {"b.*": ("data",), "bb": ()} if not is_ordered else {"bb": (), "b.*": ("data",)}
    layout_map = kd.LayoutMap.from_rules(rules.items(), mesh) if is_ordered else made(rules, mesh)
    assert layout_map["c"] is None
    other = copied(layout_map)
    assert other == layout_map
    assert list(other) == list(layout_map)
    assert repr(other) == repr(layout_map)
    other["c"] = ("model",)
    del layout_map["bb"]
    assert (other["c"].axes, layout_map["c"]) == (("model",), None)
    assert (other["bb"].axes, layout_map["bb"].axes) == ((), ("data",))


def test_results_of_lookups_are_not_pickled(ordered):
    before = pickle.dumps(ordered)
    for number in range(100):
        assert ordered.rule(f"dense_{number}/kernel")
    assert len(pickle.dumps(ordered)) == len(before)


def test_a_deep_copy_has_layouts_of_its_own_and_the_same_mesh():
    layout_map = made({"a": ("data",)}, None)
    copy.deepcopy(layout_map)["a"].device_mesh = MESH
    assert layout_map["a"].device_mesh is None
    assert copy.deepcopy(made({"a": ("data",)}))["a"].device_mesh is MESH


def test_maps_with_equal_rules_and_meshes_are_equal_and_ordered_maps_in_equal_order():
    rules = {"a": ("data",), "b": ()}
    backwards = dict(reversed(rules.items()))
    assert made(rules) == made(backwards)
    assert made(rules) != made(rules | {"a": ()})
    assert made(rules) != made({"a": ("data",)})
    assert made(rules) != made(rules, OTHER_MESH)
    assert made({}) != made({}, OTHER_MESH)
    assert made({}) != made({}, None)
    in_order = kd.LayoutMap.from_rules(rules.items(), MESH)
    assert in_order == kd.LayoutMap.from_rules(rules.items(), MESH)
    assert in_order != kd.LayoutMap.from_rules(backwards.items(), MESH)
    assert in_order != made(rules)
    assert made(rules) != 3
    assert made(rules) == dict(made(rules))


def test_a_map_of_keras_may_be_equal():
    plain = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 4), ["data", "model"], MESH.devices))
    plain["a"] = ("data",)
    assert plain == made({"a": ("data",)})
    assert made({"a": ("data",)}) == plain
    assert made({"a": ("model",)}) != plain
    assert made({"a": ("data",)}, OTHER_MESH) != plain
    assert kd.LayoutMap.from_rules([("a", ("data",))], MESH) != plain


def test_the_repr_of_an_ordered_map_tells_that_the_first_match_wins(ordered):
    assert "first match wins" in repr(ordered)
    assert "first match wins" not in repr(made({}))


def test_a_changed_rule_is_found_at_once():
    layout_map = made({"a/kernel": ("data",)})
    assert layout_map["b/kernel"] is None
    layout_map["b/.*"] = ("model",)
    assert layout_map["b/kernel"].axes == ("model",)
    assert copy.copy(layout_map)["b/kernel"].axes == ("model",)
    del layout_map["b/.*"]
    assert layout_map["b/kernel"] is None


def test_a_rule_for_variables_hides_no_rule_for_inputs():
    layout_map = made({".*up.*": ("data", None), "up/input": (None, "model")})
    assert layout_map["up/input"].axes == layout_map["sequential/up/input"].axes == (None, "model")


def test_alternatives_of_inputs_and_outputs_are_no_rule_for_weights():
    rules = made({".*norm/(input|output)": ("data", "model", None)})
    assert kd.ModelParallel(layout_map=rules, sequence_dim_name="model").sequence_dim_name == "model"
    with pytest.raises(ValueError, match="shards a weight over 'model'"):
        kd.ModelParallel(layout_map=made({".*norm/(kernel|output)": ("model",)}), sequence_dim_name="model")


def test_a_memory_kind_of_a_rule_is_refused():
    with pytest.raises(ValueError, match="Rule 'a': memory_kind='pinned_host' cannot be that of a rule"):
        made({"a": kd.TensorLayout((None,), MESH, memory_kind="pinned_host")})

"""`explain` says of each variable what lays it out, and what that leaves on each device."""

import json
import math

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_dist as kd


def rules(patterns, mesh="data:2,model:4", batch="data"):
    layout_map = kd.LayoutMap(mesh if isinstance(mesh, kd.DeviceMesh) else kd.create_device_mesh(mesh))
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name=batch)


def blocks(depth=3, width=16, optimizer="adam"):
    x = y = keras.Input((width,))
    for number in range(depth):
        y = layers.Dense(width, name=f"block{number}_dense")(y)
    model = keras.Model(x, y, name="blocks")
    if optimizer:
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
    return model


KERNELS = {".*kernel": (None, "model")}


def test_a_row_says_all_of_a_variable():
    kernel = kd.explain(blocks, rules(KERNELS)).variables[0]
    assert (kernel.path, kernel.part, kernel.shape, kernel.dtype) == (
        "block0_dense/kernel",
        "weights",
        (16, 16),
        "float32",
    )
    assert (kernel.rule, kernel.axes, kernel.why) == (".*kernel", (None, "model"), "rule '.*kernel'")
    assert (kernel.shard_shape, kernel.whole_bytes, kernel.bytes) == ((16, 4), 1024, 256)
    assert kernel.trainable
    assert kernel.fits
    assert not kernel.is_replicated


def test_it_says_what_lies_there_when_the_model_is_made():
    distribution = rules(KERNELS | {".*bias": ("model",)})
    coverage = kd.explain(blocks, distribution)
    with distribution.scope():
        model = blocks()
    variables = [*model.variables, *model.optimizer.variables]
    shards = {v.path: v.value.sharding.shard_shape(v.shape) for v in variables}
    assert {v.path: v.shard_shape for v in coverage.variables if v.part != "other"} == shards
    by_device = {f"cpu:{n}": 0 for n in range(8)}
    for variable in variables:
        for shard in variable.value.addressable_shards:
            by_device[f"cpu:{shard.device.id}"] += shard.data.nbytes
    others = sum(v.bytes for v in coverage.variables if v.part == "other")
    assert coverage.device_bytes == {name: size + others for name, size in by_device.items()}


@pytest.mark.parametrize("kind", ["builder", "deferred", "real, before", "real, under it", "real, under another"])
def test_any_model_gives_the_same_rows(kind):
    distribution = rules(KERNELS)
    expected = kd.explain(blocks, distribution)
    if kind == "builder":
        model = blocks
    elif kind == "deferred":
        with kd.deferred(), distribution.scope():
            model = blocks()
    else:
        under = {"real, before": None, "real, under it": distribution}.get(kind, kd.DataParallel())
        kd.set_distribution(under)
        model = blocks()
    assert kd.explain(model, distribution).variables == expected.variables


def test_optimizer_slots_follow_their_weights():
    rows = {v.path: v for v in kd.explain(blocks, rules(KERNELS)).variables}
    slot = rows["adam/block1_dense_kernel_velocity"]
    assert (slot.part, slot.rule, slot.shard_shape) == ("optimizer", ".*kernel", (16, 4))
    assert rows["adam/iteration"].why == "no rule matches"


def test_totals():
    coverage = kd.explain(lambda: blocks(optimizer=None), rules(KERNELS))
    assert coverage.whole_bytes == 3 * (1024 + 64)
    assert coverage.bytes == 3 * (256 + 64)
    assert coverage.replicated_bytes == 3 * 64
    assert coverage.imbalance == 1.0
    assert coverage.copies == pytest.approx(8 * 320 / 1088)


def test_a_variable_that_brought_its_layout_keeps_it_and_counts_where_it_lies():
    distribution = rules({".*kernel": (None, "model"), "own/.*": ()})  # which is not asked

    class Own(layers.Layer):
        def __init__(self):
            super().__init__(name="own")
            spec = jax.sharding.PartitionSpec("data", None)
            mesh = distribution.device_mesh
            sharding = jax.sharding.NamedSharding(mesh.backend_mesh, spec)
            self.kernel = keras.Variable("zeros", shape=(8, 4), layout=kd.TensorLayout(("data",), mesh), name="kernel")
            self.named = keras.Variable("zeros", shape=(8, 4), layout=sharding, name="named")
            self.built = True

    for model in (Own, Own()):
        kernel, named = kd.explain(model, distribution).variables
        assert kernel.axes == named.axes == ("data", None)
        assert kernel.shard_shape == named.shard_shape == (4, 4)
        assert kernel.why == named.why == "brought its own layout"
        assert kernel.rule is None


def test_a_rule_that_does_not_fit_is_said_and_not_raised():
    coverage = kd.explain(blocks, rules({".*dense/.*": (None, "model")}))
    bias = coverage.variables[1]
    assert bias.why == "rule '.*dense/.*' does not fit: the rule has 2 entries, but the tensor has 1 dim"
    assert (bias.fits, bias.rule, bias.axes, bias.shard_shape) == (False, ".*dense/.*", (None,), (16,))
    assert coverage.findings[0].kind == "does not fit"


def test_a_rule_that_does_not_fit_outputs_is_no_error_either():
    assert not kd.explain(blocks, rules({".*": (None, "data", "model")})).variables[0].fits


def test_paths_that_several_rules_match_are_said_and_not_raised():
    coverage = kd.explain(blocks, rules(KERNELS | {"block0_dense/k.*": ()}))
    assert coverage.variables[0].why == "several rules match"
    assert coverage.unused == {}


def test_what_a_distribution_of_ones_own_does_is_said():
    class FirstDim(kd.Distribution):
        def get_variable_layout(self, variable):
            if len(variable.shape) == 3:
                raise ValueError("No.")
            return kd.TensorLayout(["data"] if variable.shape else [], self.device_mesh)

    class Cube(layers.Layer):
        def build(self, shape=None):
            self.cube = self.add_weight(shape=(2, 2, 2), name="cube")
            self.matrix = self.add_weight(shape=(16, 2), name="matrix")

    cube = Cube(name="layer")
    cube.build()
    coverage = kd.explain(cube, FirstDim(kd.create_device_mesh("data:8"), "data"))
    first, second = coverage.variables
    assert coverage.findings[0].message == "The distribution must lay out 'layer/cube': No."
    assert (first.why, first.fits) == ("No.", False)
    assert (second.why, second.shard_shape) == ("laid out by FirstDim", (2, 2))
    assert kd.explain(blocks, kd.DataParallel()).variables[0].why == "replicated by DataParallel"


def test_rules_that_match_nothing_and_rules_for_outputs():
    coverage = kd.explain(
        blocks,
        rules(KERNELS | {"block1_dense/output": ("data",), "block1_dense/input": ("data",), "block9_dense/output": ()}),
    )
    assert coverage.unused == {"block9_dense/output": {}}
    assert "blocks" in coverage.layers
    assert "block1_dense" in coverage.layers


def test_the_layers_are_those_that_keras_asks_for():
    asked = []

    class Asked(kd.DataParallel):
        def get_tensor_layout(self, path):
            asked.append(path)

    distribution = Asked()
    with distribution.scope():
        x = keras.Input((4, 8))
        inner = keras.Sequential([layers.Dense(8), layers.Dropout(0.1)], name="tower")
        model = keras.Model(x, layers.Softmax()(layers.MultiHeadAttention(2, 4)(inner(x), x)))
        asked.clear()
        model.predict(np.ones((8, 4, 8)), verbose=0)
    called = {path.rpartition("/")[0] for path in asked}
    assert called <= set(kd.explain(model, distribution).layers)
    assert {"tower/dense", "tower", "multi_head_attention/query"} <= called


def test_absent_hardware():
    mesh = kd.create_device_mesh("data:64,model:4", devices=kd.mock_tpus("v5e:16x16"))
    coverage = kd.explain(blocks, rules(KERNELS, mesh))
    assert len(coverage.device_bytes) == 256
    assert coverage.variables[0].shard_shape == (16, 4)


def test_the_installed_distribution_is_the_default():
    distribution = rules(KERNELS)
    kd.set_distribution(distribution)
    assert kd.explain(blocks).variables == kd.explain(blocks, distribution).variables


def test_nothing_is_left_of_a_builder():
    def build():
        assert isinstance(kd.distribution(), kd.ModelParallel)
        return keras.Sequential([keras.Input((4,)), layers.Dense(2), layers.Dropout(0.1)])

    kd.explain(build, rules(KERNELS))
    assert kd.distribution() is None
    assert build_without_distribution().layers[0].name == "dense"


def build_without_distribution():
    return keras.Sequential([keras.Input((4,)), layers.Dense(2)])


def test_what_is_no_model_and_no_distribution():
    with pytest.raises(ValueError, match=r"Received: none.*set_distribution"):
        kd.explain(blocks)
    with pytest.raises(TypeError, match=r"explain takes a distribution of keras_dist\. Received: .*'data:8'"):
        kd.explain(blocks, "data:8")
    with pytest.raises(TypeError, match=r"\b3 \(int\)"):
        kd.explain(3, kd.DataParallel())
    with pytest.raises(TypeError, match=r"None \(NoneType\)"):
        kd.explain(lambda: None, kd.DataParallel())
    with pytest.raises(ValueError, match="'unbuilt'"):
        kd.explain(keras.Sequential([layers.Dense(2)], name="unbuilt"), kd.DataParallel())


# ------------------------------------------------------------------------------------------------------ the report


def test_equal_blocks_are_one_row():
    lines = str(kd.explain(lambda: blocks(80), rules(KERNELS))).split("\n")
    assert len(lines) < 40
    [row] = [number for number, line in enumerate(lines) if line.startswith("block{0..79}_dense/kernel")]
    assert lines[row].split()[1:] == ["80", "float32[16,", "16]", "(None,", "model)", "20", "KiB"]
    assert lines[row + 1].split() == ["rule", "'.*kernel'", "[16,", "4]"]


def test_the_report_begins_with_what_a_device_holds_and_what_was_found():
    text = str(kd.explain(lambda: blocks(optimizer=None), rules(KERNELS | {".*karnel": ()})))
    assert text.startswith("blocks, 816 parameters ─")
    assert "8 devices, mesh data:2 x model:4, ModelParallel" in text
    assert "Of 3.19 KiB, a device holds 960 B; 2.35 copies of each byte." in text
    assert "Replicated on every device: 192 B (5.88%)." in text
    assert "2 rules, 1 of which lay nothing out." in text
    assert "1. A rule must match a variable, or the output of a layer. Received: '.*karnel'" in text
    assert "\n    layout_map['.*kernel'] = (None, None)?\n" in text
    assert max(map(len, text.split("\n"))) <= 120


def test_html_is_escaped():
    page = kd.explain(blocks, rules({"<b>.*": ()}))._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert page.count("<table>") == 1


def test_a_coverage_is_plain_data_too():
    coverage = kd.explain(blocks, rules(KERNELS | {".*karnel": ()}))
    data = json.loads(coverage.to_json())
    assert data["mesh"] == {"data": 2, "model": 4}
    assert data["rules"] == {".*kernel": [None, "model"], ".*karnel": []}
    assert data["findings"][0]["kind"] == "no match"
    assert sum(math.prod(v["shape"]) for v in data["variables"] if v["part"] == "weights") == 816
    assert repr(coverage) == f"<Coverage of 'blocks': {len(data['variables'])} variables, 1 findings>"


def test_a_model_without_variables():
    model = keras.Sequential([keras.Input((4,)), layers.Softmax()], name="none")
    coverage = kd.explain(model, rules(KERNELS))
    assert (coverage.bytes, coverage.imbalance, coverage.copies) == (0, 1.0, 1.0)
    assert "none, 0 parameters" in str(coverage)


# ------------------------------------------------------------------------------------------------ other distributions


def test_what_a_ready_distribution_shards_beside_the_rules():
    def build():
        model = keras.Sequential([keras.Input((512,)), layers.Dense(256, name="up"), layers.Dense(512, name="down")])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    layout_map = kd.LayoutMap(kd.create_device_mesh("fsdp:2,model:4"))
    layout_map["up/kernel"] = (None, "model")
    distribution = kd.FullyShardedDataParallel(layout_map=layout_map)
    coverage = kd.explain(build, distribution)
    rows = {v.path.removeprefix("sequential/"): v for v in coverage.variables}
    assert rows["up/kernel"].why == "rule 'up/kernel' and FullyShardedDataParallel"
    assert rows["down/kernel"].why == "laid out by FullyShardedDataParallel"
    assert rows["up/bias"].why == "no rule matches"
    with distribution.scope():
        model = build()
    shards = {v.path: v.value.sharding.shard_shape(v.shape) for v in [*model.variables, *model.optimizer.variables]}
    found = {v.path: v.shard_shape for v in coverage.variables if v.path in shards}
    assert {path.partition("/")[2]: shape for path, shape in found.items()} == {
        path.partition("/")[2]: shape for path, shape in shards.items() if path in found
    }
    assert len(found) == len(shards)
    [finding] = coverage.findings
    assert "layout_map['down/kernel'] = (None, 'model')" in finding.message


def test_slots_that_lie_elsewhere_than_their_weights():
    class ZeRO1(kd.ModelParallel):
        def get_update_layout(self, variable):
            return kd.TensorLayout(["data"] if variable.shape else [], self.device_mesh)

    distribution = ZeRO1(layout_map=kd.LayoutMap(kd.create_device_mesh("data:8")))
    rows = {v.path: v for v in kd.explain(blocks, distribution).variables}
    assert rows["block0_dense/kernel"].shard_shape == (16, 16)
    slot = rows["adam/block0_dense_kernel_momentum"]
    assert (slot.shard_shape, slot.why) == ((2, 16), "follows 'block0_dense/kernel', changed by ZeRO1")

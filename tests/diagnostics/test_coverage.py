"""`explain` reports the layout of each variable, the reason for it, and the memory per device."""

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


def test_the_attributes_of_a_variable():
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


def test_shards_and_bytes_are_those_of_the_real_model():
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


def test_optimizer_state_has_the_layout_of_its_weight():
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


def test_a_variable_created_with_a_layout_keeps_it():
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
        assert kernel.why == named.why == "created with its own layout"
        assert kernel.rule is None


def test_a_rule_that_does_not_fit_is_reported():
    coverage = kd.explain(blocks, rules({".*dense/.*": (None, "model")}))
    bias = coverage.variables[1]
    assert bias.why == "rule '.*dense/.*' does not fit: the layout has 2 entries, but the tensor has 1 dim"
    assert (bias.fits, bias.rule, bias.axes, bias.shard_shape) == (False, ".*dense/.*", (None,), (16,))
    assert coverage.findings[0].kind == "does not fit"


def test_a_rule_that_does_not_fit_outputs_raises_no_error():
    assert not kd.explain(blocks, rules({".*": (None, "data", "model")})).variables[0].fits


def test_paths_that_several_rules_match_are_reported():
    coverage = kd.explain(blocks, rules(KERNELS | {"block0_dense/k.*": ()}))
    assert coverage.variables[0].why == "several rules match"
    assert coverage.unused == {}


def test_the_layouts_of_a_custom_distribution():
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
    assert (coverage.findings[0].kind, coverage.findings[0].paths) == ("does not fit", ("layer/cube",))
    assert "No." in coverage.findings[0].message
    assert (first.why, first.fits) == ("No.", False)
    assert (second.why, second.shard_shape) == ("sharded by FirstDim", (2, 2))
    assert kd.explain(blocks, kd.DataParallel()).variables[0].why == "replicated by DataParallel"


def test_rules_that_match_nothing_and_rules_for_outputs():
    coverage = kd.explain(
        blocks,
        rules(KERNELS | {"block1_dense/output": ("data",), "block1_dense/input": ("data",), "block9_dense/output": ()}),
    )
    assert coverage.unused == {"block9_dense/output": {}}
    assert "blocks" in coverage.layers
    assert "block1_dense" in coverage.layers


def test_the_layers_are_those_whose_layouts_keras_requests():
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


def test_a_builder_leaves_no_traces():
    def build():
        assert isinstance(kd.distribution(), kd.ModelParallel)
        return keras.Sequential([keras.Input((4,)), layers.Dense(2), layers.Dropout(0.1)])

    kd.explain(build, rules(KERNELS))
    assert kd.distribution() is None
    assert build_without_distribution().layers[0].name == "dense"


def build_without_distribution():
    return keras.Sequential([keras.Input((4,)), layers.Dense(2)])


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="none is active"):
        kd.explain(blocks)
    with pytest.raises(TypeError, match="got 'data:8'"):
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


def test_the_report_starts_with_memory_per_device_and_findings():
    text = str(kd.explain(lambda: blocks(optimizer=None), rules(KERNELS | {".*karnel": ()})))
    assert text.startswith("blocks, 816 parameters ─")
    assert "8 devices, mesh data:2 x model:4, ModelParallel" in text
    assert "Each device holds 960 B of 3.19 KiB (average replication factor 2.35)." in text
    assert "Replicated on every device: 192 B (5.88%)." in text
    assert "2 rules, 1 unused." in text
    assert "1. Layout map rule '.*karnel' matches no variable of 'blocks'." in text
    assert "has the rule '.*kernel' already" in " ".join(text.split())
    assert max(map(len, text.split("\n"))) <= 120


def test_html_is_escaped():
    page = kd.explain(blocks, rules({"<b>.*": ()}))._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert page.count("<table>") == 1


def test_a_coverage_as_json():
    coverage = kd.explain(blocks, rules(KERNELS | {".*karnel": ()}))
    data = json.loads(coverage.to_json())
    assert data["mesh"] == {"data": 2, "model": 4}
    assert data["rules"] == {".*kernel": [None, "model"], ".*karnel": []}
    assert data["findings"][0]["kind"] == "no match"
    assert sum(math.prod(v["shape"]) for v in data["variables"] if v["part"] == "weights") == 816
    assert repr(coverage) == f"<Coverage of 'blocks': {len(data['variables'])} variables, 1 finding>"


def test_a_model_without_variables():
    model = keras.Sequential([keras.Input((4,)), layers.Softmax()], name="none")
    coverage = kd.explain(model, rules(KERNELS))
    assert (coverage.bytes, coverage.imbalance, coverage.copies) == (0, 1.0, 1.0)
    assert "none, 0 parameters" in str(coverage)


# ------------------------------------------------------------------------------------------------ other distributions


def test_fsdp_shards_further_than_the_rules():
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
    assert rows["down/kernel"].why == "sharded by FullyShardedDataParallel"
    assert rows["up/bias"].why == "replicated: at most 64 KiB (min_shard_bytes)"
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


def test_optimizer_state_may_be_sharded_further_than_its_weight():
    class ZeRO1(kd.ModelParallel):
        def get_update_layout(self, variable):
            return kd.TensorLayout(["data"] if variable.shape else [], self.device_mesh)

    distribution = ZeRO1(layout_map=kd.LayoutMap(kd.create_device_mesh("data:8")))
    rows = {v.path: v for v in kd.explain(blocks, distribution).variables}
    assert rows["block0_dense/kernel"].shard_shape == (16, 16)
    slot = rows["adam/block0_dense_kernel_momentum"]
    assert (slot.shard_shape, slot.why) == ((2, 16), "same as 'block0_dense/kernel', further sharded by ZeRO1")


@pytest.mark.parametrize("compiled", [True, False])
def test_optimizer_state_is_counted_before_the_first_step_or_a_note_says_that_it_is_not(compiled):
    def build():
        model = blocks(1, 512, optimizer=None)
        if compiled:
            model.compile("adam", "mse")
        return model

    distribution = kd.FullyShardedDataParallel()
    coverage = kd.explain(build, distribution)
    state = [v for v in coverage.variables if v.part == "optimizer" and v.shape == (512, 512)]
    if compiled:  # momentum and velocity
        assert [v.shard_shape for v in state] == [(64, 512)] * 2
        assert not coverage.notes
        with distribution.scope():
            model = build()
        coverage = kd.explain(model, distribution)  # of which nothing is changed
        assert not model.optimizer.built
    assert "adam/block0_dense_kernel_momentum" not in [v.path for v in coverage.variables]
    assert len(coverage.notes) == 1
    assert "'blocks'" in coverage.notes[0]
    assert coverage.notes[0] in " ".join(str(coverage).split())


def test_the_reasons_why_fsdp_replicates_a_weight():
    def build():
        return blocks(1, 129, optimizer=None)

    small = kd.explain(build, kd.FullyShardedDataParallel(min_shard_bytes=2**17)).variables[0]
    assert small.why == "replicated: at most 128 KiB (min_shard_bytes)"
    indivisible = kd.explain(build, kd.FullyShardedDataParallel(min_shard_bytes=0)).variables[0]
    assert indivisible.why == "replicated: no dim is divisible by 8"


def test_the_reasons_why_zero_1_replicates_optimizer_state():
    rows = {
        v.path: v for v in kd.explain(lambda: blocks(1, 512), kd.DataParallel(shard_optimizer_state=True)).variables
    }
    assert rows["adam/block0_dense_kernel_momentum"].shard_shape == (64, 512)
    assert rows["adam/block0_dense_bias_momentum"].why == "replicated: at most 64 KiB (ZeRO-1 threshold)"
    assert rows["block0_dense/kernel"].why == "replicated by DataParallel"


def test_reasons_where_nothing_is_left_to_shard():
    def why(distribution):
        with distribution.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4096, name="up")])
            [row] = [each for each in kd.explain(model, distribution).variables if each.path.endswith("up/kernel")]
            return row.why

    one = kd.DeviceMesh((1,), ["fsdp"], ["cpu:0"])
    assert why(kd.FullyShardedDataParallel(one)) == "replicated: there is one device along 'fsdp'"

"""Mistakes that people make with rules: each is found, and the message holds a rule that, pasted, mends it."""

import json
import re
from functools import cache

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import keras_dist as kd
from keras_dist.diagnostics.findings import Finding
from keras_dist.layout.rule_matching import strip_model_names
from keras_dist.layout.tensor_layout import layout_error


def found(build, rules, mesh="data:2,model:4") -> tuple[Finding, ...]:
    return explained(build, rules, mesh).findings


def explained(build, rules, mesh="data:2,model:4") -> kd.Coverage:
    layout_map = kd.LayoutMap(kd.create_device_mesh(mesh))
    for pattern, axes in rules.items():
        layout_map[pattern] = axes
    return kd.explain(build, kd.ModelParallel(layout_map=layout_map, batch_dim_name="data"))


def only(findings, kind) -> Finding:
    [finding] = [finding for finding in findings if finding.kind == kind]
    return finding


def pasted(finding, rules, in_place=True) -> dict:
    """The rules with those of a message, in place of the one that it is about."""
    added = {key: eval(axes) for key, axes in re.findall(r"layout_map\['([^']*)'\] = (\([^)]*\))", finding.message)}
    return {key: axes for key, axes in rules.items() if not in_place or key != finding.rule} | added


def decoder(width=32, heads=8, key_value_heads=8, blocks=2, feedforward="mlp"):
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(64, width, name="embedding")(tokens)
    for number in range(blocks):
        attention = layers.GroupQueryAttention(
            4, heads, key_value_heads, use_bias=False, name=f"block_{number}_attention"
        )
        x = attention(x, x)
        x = layers.Dense(4 * width, use_bias=False, name=f"block_{number}_{feedforward}_up")(x)
        x = layers.Dense(width, use_bias=False, name=f"block_{number}_{feedforward}_down")(x)
    return keras.Model(tokens, layers.Dense(64, use_bias=False, name="head")(x), name="decoder")


def dense_layers(*units, inputs=16, use_bias=False, name="perceptron"):
    x = y = keras.Input((inputs,))
    for number, size in enumerate(units):
        y = layers.Dense(size, use_bias=use_bias, name=f"dense_{number}")(y)
    return keras.Model(x, y, name=name)


# --------------------------------------------------------------------------------------- ten mistakes that people make


def test_1_a_typo_in_a_regex():
    rules = {".*atention/(query|key|value)/kernel": (None, "model", None)}
    finding = only(found(decoder, rules), "no match")
    assert finding.rule == ".*atention/(query|key|value)/kernel"
    assert "which matches nothing in 'decoder'" in finding.message
    assert "layout_map['.*attention/(query|key|value)/kernel'] = (None, 'model', None)" in finding.message
    assert set(finding.paths) == {
        f"block_{n}_attention/{name}/kernel" for n in (0, 1) for name in ("query", "key", "value")
    }
    assert not explained(decoder, pasted(finding, rules)).unused


def test_1_a_typo_in_a_short_word():
    rules = {".*pu/kernel": (None, "model")}
    finding = only(found(decoder, rules), "no match")
    assert "Did you mean layout_map['.*up/kernel'] = (None, 'model')?" in finding.message
    assert not explained(decoder, pasted(finding, rules)).unused


def test_2_a_rule_without_the_name_of_a_sequential():
    def build():
        return keras.Sequential([keras.Input((16,)), layers.Dense(8, name="dense")], name="tower")

    rules = {"dense/kernel": (None, "model")}
    finding = only(found(build, rules), "no match")
    assert "Did you mean layout_map['tower/dense/kernel'] = (None, 'model')?" in finding.message
    assert explained(build, pasted(finding, rules)).variables[0].axes == (None, "model")


def test_2_a_rule_without_the_names_of_blocks():
    def build():
        x = y = keras.Input((16,))
        for number in range(3):
            y = keras.Sequential([layers.Dense(16, name="up"), layers.Dense(16, name="down")], name=f"block_{number}")(
                y
            )
        return keras.Model(x, y)

    finding = only(found(build, {"(up|down)/kernel": (None, "model")}), "no match")
    assert "layout_map['block_[0-9]+/(?:(up|down)/kernel)'] = (None, 'model')" in finding.message
    assert len(finding.paths) == 6


def test_an_automatic_name_need_not_be_spelled_and_is_not_suggested():
    def build():
        return keras.Sequential([keras.Input((16,)), layers.Dense(8, name="dense")])

    rules = {"dens/kernel": (None, "model")}
    assert not found(build, {"dense/kernel": (None, "model")})
    assert "layout_map['dense/kernel'] = (None, 'model')" in only(found(build, rules), "no match").message


def test_3_swapped_axes():
    rules = {"dense_0/kernel": ("model", None)}
    finding = only(found(lambda: dense_layers(16, inputs=6), rules), "does not fit")
    assert "'dense_0/kernel' (shape (6, 16)): dim 0 has size 6, which axis 'model' (size 4)" in finding.message
    assert "Swapping the axes fits: layout_map['dense_0/kernel'] = (None, 'model')" in finding.message
    assert finding.bytes == 4 * 6 * 16
    assert not found(lambda: dense_layers(16, inputs=6), pasted(finding, rules))


def test_4_a_rule_with_more_entries_than_dims():
    rules = {".*dense_.*": (None, "model")}

    def build():
        return dense_layers(16, 8, use_bias=True)

    [first, second] = [finding for finding in found(build, rules) if finding.kind == "does not fit"]
    assert first.paths == ("dense_0/bias",)
    assert "'dense_0/bias' (shape (16,)): the rule has 2 entries, but the tensor has 1 dim." in first.message
    assert "layout_map['dense_0/bias'] = ('model',), since a key that is the path itself wins" in first.message
    rules = pasted(second, pasted(first, rules, in_place=False), in_place=False)
    assert [v.axes for v in explained(build, rules).variables] == [(None, "model"), ("model",)] * 2


def test_5_grouped_query_attention_with_fewer_heads_than_the_axis_has_devices():
    rules = {".*attention/(query|key|value)/kernel": (None, "model", None)}

    def build():
        return decoder(key_value_heads=2)

    finding = only(found(build, rules, "data:1,model:8"), "does not fit")
    assert "'block_{0,1}_attention/{key,value}/kernel' (shape (32, 2, 4))" in finding.message
    assert "dim 1 has size 2, which axis 'model' (size 8) does not divide" in finding.message
    assert "or use a 'model' axis of size 1 or 2" in finding.message
    assert "layout_map['block_[0-9]+_attention/(key|value)/kernel'] = ('model', None, None)" in finding.message
    assert "layout_map['block_[0-9]+_attention/query/kernel'] = (None, 'model', None) in its place" in finding.message
    mended = explained(build, pasted(finding, rules), "data:1,model:8")
    assert all(v.fits for v in mended.variables)
    assert sum(v.rule is not None for v in mended.variables) == 6


class Experts(layers.Layer):
    """Bare variables of all experts, none of which is called a kernel."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(4, shape[-1], 64), name="expert_gate")
        self.down = self.add_weight(shape=(4, 64, shape[-1]), name="expert_down")

    def call(self, x):
        return keras.ops.einsum("bi,eio,eoj->bj", x, self.gate, self.down)


def test_6_experts_that_the_rules_miss():
    def build():
        x = y = keras.Input((32,))
        for number in range(3):
            y = layers.Dense(32, name=f"block{number}_dense")(Experts(name=f"block{number}_experts")(y))
        return keras.Model(x, y)

    rules = {".*kernel": (None, "model")}
    finding = only(found(build, rules), "replicated")
    assert re.search(r"Received: 93\.\d% of their bytes \(192 KiB\) replicated over it", finding.message)
    assert "'block{0..2}_experts/expert_gate': 3 x (4, 32, 64), 96 KiB" in finding.message
    assert "layout_map['block[0-9]+_experts/expert_gate'] = (None, None, 'model')" in finding.message
    assert "layout_map['block[0-9]+_experts/expert_down'] = (None, 'model', None)" in finding.message
    assert finding.bytes == 192 * 1024
    assert "bias" not in finding.message
    assert not found(build, pasted(finding, rules))


def test_7_a_renamed_layer():
    rules = {"block_[0-9]+_ffn_up/kernel": (None, "model"), "block_1_ffn_down/kernel": ("model", None)}
    findings = [finding for finding in found(decoder, rules) if finding.kind == "no match"]
    assert [finding.rule for finding in findings] == list(rules)
    assert "layout_map['block_[0-9]+_mlp_up/kernel'] = (None, 'model')" in findings[0].message
    assert "layout_map['block_[0-9]+_mlp_down/kernel'] = ('model', None)" in findings[1].message
    assert findings[0].paths == ("block_0_mlp_up/kernel", "block_1_mlp_up/kernel")


def test_8_lora_added_later():
    model = dense_layers(16, 16)
    for number in (0, 1):
        model.get_layer(f"dense_{number}").enable_lora(2)
    rules = {".*dense_.*": (None, "model")}  # factors follow their weight
    assert not found(model, rules)
    axes = {v.path: v.axes for v in explained(model, rules).variables}
    assert axes["dense_0/kernel"] == axes["dense_1/lora_kernel_b"] == (None, "model")
    assert axes["dense_0/lora_kernel_a"] == (None, None)


def test_8_a_rule_for_lora_factors_that_does_not_fit_them():
    model = dense_layers(16, 16)
    for number in (0, 1):
        model.get_layer(f"dense_{number}").enable_lora(2)
    rules = {".*kernel": (None, "model"), ".*lora_kernel_.": (None, "model")}
    [finding] = [finding for finding in found(model, rules) if finding.kind == "does not fit"]
    assert "'dense_{0,1}/lora_kernel_a' (shape (16, 2), a LoRA factor of its layer)" in finding.message
    assert "layout_map['dense_[0-9]+/lora_kernel_a'] = (None, None)" in finding.message
    mended = explained(model, pasted(finding, rules))
    axes = {v.path: v.axes for v in mended.variables}
    assert axes["dense_0/kernel"] == axes["dense_1/lora_kernel_b"] == (None, "model")
    assert axes["dense_0/lora_kernel_a"] == (None, None)


def test_9_a_rule_that_earlier_ones_leave_nothing():
    rules = [(".*kernel", (None, "model")), (".*_up/kernel", ("model", None))]
    layout_map = kd.LayoutMap.from_rules(rules, kd.create_device_mesh("data:2,model:4"))
    finding = only(kd.explain(decoder, kd.ModelParallel(layout_map=layout_map)).findings, "shadowed")
    assert finding.rule == ".*_up/kernel"
    assert "all of whose paths are taken: 2 by '.*kernel'. Put it before '.*kernel', or delete it." in finding.message


def test_9_a_regex_all_of_whose_paths_are_keys():
    rules = {"dense_[01]/kernel": (None, "model"), "dense_0/kernel": ("model", None), "dense_1/kernel": ("model", None)}
    finding = only(found(lambda: dense_layers(16, 16), rules), "shadowed")
    assert finding.rule == "dense_[01]/kernel"
    assert "1 by 'dense_0/kernel', 1 by 'dense_1/kernel'" in finding.message
    assert "delete these keys, or this rule" in finding.message


@pytest.mark.parametrize("head", ["head/kernel", ".*lm_head/.*", "token_embedding/reverse_embeddings"])
def test_10_a_rule_for_the_head_of_a_model_that_uses_its_embedding_as_one(head):
    def build():
        tokens = keras.Input((16,), dtype="int32")
        embedding = layers.ReversibleEmbedding(64, 16, name="token_embedding")
        x = layers.Dense(16, name="dense")(embedding(tokens))
        return keras.Model(tokens, embedding(x, reverse=True), name="decoder")

    rules = {head: (None, "model"), "dense/kernel": (None, "model")}
    finding = only(found(build, rules), "no match")
    assert "it seems to use its embedding, 'token_embedding/embeddings', as its head too (tied)" in finding.message
    assert "layout_map['token_embedding/embeddings'] = ('model', None)" in finding.message
    sharded = rules | {".*/embeddings": ("model", None)}
    assert (
        "sharded already, by rule '.*/embeddings'; delete this rule" in only(found(build, sharded), "no match").message
    )


# ----------------------------------------------------------------------------------------------------------- others


def test_the_state_of_a_random_generator_stays_whole():
    def build():
        return keras.Sequential([keras.Input((16,)), layers.Dense(8, use_bias=False), layers.Dropout(0.1)])

    for rule, mesh in ((".*state", "data:4,model:2"), (".*state", "data:1,model:8")):
        findings = found(build, {rule: ("model",), ".*kernel": (None, "model")}, mesh)
        finding = only(findings, "random state")
        assert "rule '.*state', which matches 'seed_generator/seed_generator_state'" in finding.message
        assert "layout_map['.*state'] = (None,)" in finding.message
        assert len(findings) == 1


def test_a_rule_that_is_right_for_some_keeps_them():
    rules = {".*": (None, "model")}
    [finding] = [f for f in found(lambda: dense_layers(16, 6, inputs=16), rules) if f.kind == "does not fit"]
    assert "layout_map['dense_1/kernel'] = ('model', None), since a key that is the path itself wins" in finding.message
    assert "layout_map['dense_0/kernel']" not in finding.message


def test_in_an_ordered_map_the_rule_that_fits_stands_before_the_other():
    mesh = kd.create_device_mesh("data:2,model:4")
    layout_map = kd.LayoutMap.from_rules([(".*kernel", (None, "model"))], mesh)
    build = lambda: dense_layers(16, 6, 16, 6, 16)  # noqa: E731
    [finding] = kd.explain(build, kd.ModelParallel(layout_map=layout_map)).findings
    assert "layout_map['dense_(1|3)/kernel'] = ('model', None) before it" in finding.message


def test_paths_that_several_rules_match():
    rules = {".*kernel": (None, "model"), "dense_.*": ("model", None)}
    build = lambda: dense_layers(16, 16)  # noqa: E731
    finding = only(found(build, rules), "several rules")
    assert "['.*kernel', 'dense_.*']" in finding.message
    assert "layout_map['dense_0/kernel'] = (None, 'model'); layout_map['dense_1/kernel']" in finding.message
    assert not [each for each in found(build, pasted(finding, rules)) if each.kind == "several rules"]


def test_a_rule_for_an_output_matches_a_layer():
    rules = {".*/kernel": (None, "model"), "dense_0/output": ("data", "model"), "dense_9/output": ("data", None)}
    coverage = explained(lambda: dense_layers(16, 16), rules)
    assert list(coverage.unused) == ["dense_9/output"]
    [finding] = coverage.findings
    assert "Did you mean layout_map['dense_[0-9]+/output'] = ('data', None)?" in finding.message


def test_a_rule_that_is_like_no_path():
    finding = only(found(decoder, {"xyz": ("model",)}), "no match")
    assert "No path is like it" in finding.message
    assert finding.paths == ()


@pytest.mark.parametrize("rule", ["(?i)KERNEL|x", "^kernel", "(?P<kernal>x)", "", "|", "(?!.)", r"\d+/kernel"])
def test_any_regex_can_be_without_a_match(rule):
    assert [finding.rule for finding in found(decoder, {rule: (None,)})] == [rule]


def test_what_a_rule_replicates_is_meant_to_be_whole():
    rules = {"dense_0/kernel": (None, "model")}
    build = lambda: dense_layers(16, 16)  # noqa: E731
    finding = only(found(build, rules), "replicated")
    assert "50% of their bytes (1 KiB)" in finding.message
    assert not found(build, rules | {"dense_1/kernel": (None, None)})


def test_what_no_axis_divides_is_said_to_be_so():
    rules = {"dense_0/kernel": ("model", None)}
    finding = only(found(lambda: dense_layers(7, 7), rules), "replicated")
    assert "'dense_1/kernel': (7, 7), 196 B, none of whose dims it divides" in finding.message


def test_an_axis_that_no_rule_uses_is_not_for_sharding():
    assert not found(decoder, {})
    assert not kd.explain(decoder, kd.DataParallel()).findings


def test_a_replica_over_one_of_two_axes_is_sharded_over_the_other_besides():
    rules = {"dense_0/kernel": ("data", "model"), "dense_1/kernel": (None, "model")}
    finding = only(found(lambda: dense_layers(16, 16), rules), "replicated")
    assert "axis 'data' (size 2)" in finding.message
    assert "layout_map['dense_1/kernel'] = ('data', 'model') in place of 'dense_1/kernel'" in finding.message
    assert not found(lambda: dense_layers(16, 16), pasted(finding, rules))


def test_a_replica_over_two_axes_is_sharded_over_both_by_one_rule():
    rules = {"dense_0/kernel": ("data", "model")}
    finding = only(found(lambda: dense_layers(16, 16), rules), "replicated")
    assert "axes 'data' (size 2) and 'model' (size 4), since others are" in finding.message
    assert "layout_map['dense_1/kernel'] = ('model', 'data')." in finding.message
    assert not found(lambda: dense_layers(16, 16), pasted(finding, rules))


def test_the_nearest_path_has_the_rarest_word_of_the_rule():
    def build():
        x = y = keras.Input((32,))
        for number in range(2):
            y = layers.Dense(32, name=f"block{number}_dense")(Experts(name=f"block{number}_experts")(y))
        return keras.Model(x, layers.Dense(32, name="norm")(layers.Dense(32, name="head")(y)))

    finding = only(found(build, {".*experts.*kernel": (None, None, "model")}), "no match")
    assert "layout_map['block[0-9]+_experts/expert_" in finding.message


# ------------------------------------------------------------------------------------------------ whatever the rules

WORDS = [
    "dense",
    "kernel",
    "bias",
    ".*",
    "[0-9]+",
    r"\d+",
    "(a|b)",
    "(?:x|kernel)",
    "(?P<name>k.*)",
    "block",
    "attention",
]
WORDS += ["head", "/", "_", "query", "output", "(?i)KERNEL", "[a-z]*", "seed_generator_state", "embeddings", "^"]
WORDS += ["$", "lora_kernel_a", "kernal", "|", "sequential", "(?!x)"]
ENTRIES = [None, "data", "model", ("data", "model")]


@cache
def models():
    with_lora = dense_layers(16, 16, use_bias=True)
    with_lora.get_layer("dense_0").enable_lora(2)
    inner = keras.Sequential([layers.Dense(8), layers.Dropout(0.1)])
    nested = keras.Sequential([keras.Input((8,)), inner, layers.Dense(4)])
    nested.compile("adam", "mse")
    nested.optimizer.build(nested.trainable_variables)
    return [decoder(), with_lora, nested]


@settings(max_examples=100, deadline=None)
@given(
    number=st.integers(0, 2),
    patterns=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map("".join), max_size=8),
    axes=st.lists(st.lists(st.sampled_from(ENTRIES), max_size=4), min_size=8, max_size=8),
)
def test_each_rule_in_a_message_matches_something_and_fits_it(number, patterns, axes):
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:2,model:4"))
    for pattern, each in zip(patterns, axes, strict=False):
        try:
            layout_map[pattern] = each
        except ValueError:
            continue
    coverage = kd.explain(models()[number], kd.ModelParallel(layout_map=layout_map))
    assert str(coverage)
    assert len(json.loads(coverage.to_json())["findings"]) == len(coverage.findings)
    shapes = {path: v.shape for v in coverage.variables for path in (v.path, strip_model_names(v.path))}
    shapes |= {f"{strip_model_names(path)}/output": () for path in coverage.layers}
    for finding in coverage.findings:
        for key, spelled in re.findall(
            r"layout_map\[('(?:[^'\\]|\\.)*')\] = (\((?:[^()]|\([^()]*\))*\))", finding.message
        ):
            matched = [path for path in shapes if re.fullmatch(eval(key), path)]
            assert matched, finding
            if finding.kind != "no match":
                sizes = coverage.mesh.axis_sizes
                assert not any(layout_error(eval(spelled), shapes[path], sizes) for path in matched), finding
            if finding.kind == "replicated":
                assert set(matched) <= {*finding.paths, *map(strip_model_names, finding.paths)}

"""Likely mistakes in layout maps are found, and the rules that the message suggests fix them."""

import json
import re
from functools import cache

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import keras_dist as kd
from keras_dist._report.units import bytes_text
from keras_dist.diagnostics.coverage import Finding
from keras_dist.layout.rule_matching import strip_model_names
from keras_dist.layout.tensor_layout import layout_error


def explained(build, rules, mesh="data:2,model:4") -> kd.Coverage:
    layout_map = kd.LayoutMap(kd.create_device_mesh(mesh))
    layout_map.update(rules)
    return kd.explain(build, kd.ModelParallel(layout_map=layout_map, batch_dim_name="data"))


def findings_of(build, rules, mesh="data:2,model:4") -> tuple[Finding, ...]:
    return explained(build, rules, mesh).findings


def finding_of(kind, build, rules, mesh="data:2,model:4") -> Finding:
    [finding] = [finding for finding in findings_of(build, rules, mesh) if finding.kind == kind]
    return finding


def suggested(finding) -> dict:
    """Returns the rules in a message."""
    rule = r"layout_map\[('(?:[^'\\]|\\.)*')\] = (\((?:[^()]|\([^()]*\))*\))"
    return {eval(key): eval(axes) for key, axes in re.findall(rule, finding.message)}


def fixed(finding, rules, replace=True) -> dict:
    """Returns rules with those of a message, replacing the rule that it is about."""
    return {key: axes for key, axes in rules.items() if not replace or key != finding.rule} | suggested(finding)


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


def dense_layers(*units, inputs=16, use_bias=False, name="perceptron", lora_rank=0):
    x = y = keras.Input((inputs,))
    for number, size in enumerate(units):
        y = layers.Dense(size, use_bias=use_bias, name=f"dense_{number}")(y)
    model = keras.Model(x, y, name=name)
    for number in range(len(units) if lora_rank else 0):
        model.get_layer(f"dense_{number}").enable_lora(lora_rank)
    return model


class Experts(layers.Layer):
    """The weights of all experts as two variables, neither of which is called a kernel."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(4, shape[-1], 64), name="expert_gate")
        self.down = self.add_weight(shape=(4, 64, shape[-1]), name="expert_down")

    def call(self, x):
        return keras.ops.einsum("bi,eio,eoj->bj", x, self.gate, self.down)


def blocks_of_experts(blocks):
    x = y = keras.Input((32,))
    for number in range(blocks):
        y = layers.Dense(32, name=f"block{number}_dense")(Experts(name=f"block{number}_experts")(y))
    return x, y


# ---------------------------------------------------------------------------------------------- rules without a match


def test_a_typo_in_a_regex():
    rules = {".*atention/(query|key|value)/kernel": (None, "model", None)}
    finding = finding_of("no match", decoder, rules)
    assert finding.rule == ".*atention/(query|key|value)/kernel"
    assert "'decoder'" in finding.message
    assert suggested(finding) == {".*attention/(query|key|value)/kernel": (None, "model", None)}
    assert set(finding.paths) == {
        f"block_{n}_attention/{name}/kernel" for n in (0, 1) for name in ("query", "key", "value")
    }
    assert not explained(decoder, fixed(finding, rules)).unused


def test_swapped_letters_in_a_short_word():
    rules = {".*pu/kernel": (None, "model")}
    finding = finding_of("no match", decoder, rules)
    assert suggested(finding) == {".*up/kernel": (None, "model")}
    assert not explained(decoder, fixed(finding, rules)).unused


def test_a_glob_in_place_of_a_regex():
    finding = finding_of("no match", decoder, {"block_*_up/kernel": (None, "model")})
    assert suggested(finding) == {"block_.*_up/kernel": (None, "model")}


@pytest.mark.parametrize(("glob", "regex"), [("*up/kernel", ".*up/kernel"), ("**/kernel", ".*/kernel")])
def test_a_glob_that_is_no_valid_regex(glob, regex):
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:2,model:4"))
    with pytest.raises(ValueError, match=re.escape(f"{glob!r} is not a valid regex")) as error:
        layout_map[glob] = (None, "model")
    assert repr(regex) in str(error.value)


def test_a_rule_without_the_name_of_a_sequential():
    def build():
        return keras.Sequential([keras.Input((16,)), layers.Dense(8, name="dense")], name="tower")

    rules = {"dense/kernel": (None, "model")}
    finding = finding_of("no match", build, rules)
    assert suggested(finding) == {"tower/dense/kernel": (None, "model")}
    assert explained(build, fixed(finding, rules)).variables[0].axes == (None, "model")


def test_a_rule_without_the_names_of_blocks():
    def build():
        x = y = keras.Input((16,))
        for number in range(3):
            dense = [layers.Dense(16, name="up"), layers.Dense(16, name="down")]
            y = keras.Sequential(dense, name=f"block_{number}")(y)
        return keras.Model(x, y)

    finding = finding_of("no match", build, {"(up|down)/kernel": (None, "model")})
    assert suggested(finding) == {"block_[0-9]+/(?:(up|down)/kernel)": (None, "model")}
    assert len(finding.paths) == 6


def test_an_automatic_model_name_is_not_suggested():
    def build():
        return keras.Sequential([keras.Input((16,)), layers.Dense(8, name="dense")])

    assert not findings_of(build, {"dense/kernel": (None, "model")})
    finding = finding_of("no match", build, {"dens/kernel": (None, "model")})
    assert suggested(finding) == {"dense/kernel": (None, "model")}


def test_a_renamed_layer():
    rules = {"block_[0-9]+_ffn_up/kernel": (None, "model"), "block_1_ffn_down/kernel": ("model", None)}
    findings = [finding for finding in findings_of(decoder, rules) if finding.kind == "no match"]
    assert [finding.rule for finding in findings] == list(rules)
    assert suggested(findings[0]) == {"block_[0-9]+_mlp_up/kernel": (None, "model")}
    assert suggested(findings[1]) == {"block_[0-9]+_mlp_down/kernel": ("model", None)}
    assert findings[0].paths == ("block_0_mlp_up/kernel", "block_1_mlp_up/kernel")


@pytest.mark.parametrize("head", ["head/kernel", ".*lm_head/.*", "token_embedding/reverse_embeddings"])
def test_a_rule_for_the_head_of_a_model_with_tied_weights(head):
    def build():
        tokens = keras.Input((16,), dtype="int32")
        embedding = layers.ReversibleEmbedding(64, 16, name="token_embedding")
        x = layers.Dense(16, name="dense")(embedding(tokens))
        return keras.Model(tokens, embedding(x, reverse=True), name="decoder")

    rules = {head: (None, "model"), "dense/kernel": (None, "model")}
    finding = finding_of("no match", build, rules)
    assert finding.paths == ("token_embedding/embeddings",)
    assert suggested(finding) == {"token_embedding/embeddings": ("model", None)}
    sharded = rules | {".*/embeddings": ("model", None)}
    finding = finding_of("no match", build, sharded)
    assert "'.*/embeddings'" in finding.message
    assert not suggested(finding)


def test_a_rule_for_an_output_matches_a_layer():
    rules = {".*/kernel": (None, "model"), "dense_0/output": ("data", "model"), "dense_9/output": ("data", None)}
    coverage = explained(lambda: dense_layers(16, 16), rules)
    assert list(coverage.unused) == ["dense_9/output"]
    [finding] = coverage.findings
    assert suggested(finding) == {"dense_[0-9]+/output": ("data", None)}


def test_a_rule_that_resembles_no_path():
    finding = finding_of("no match", decoder, {"xyz": ("model",)})
    assert not suggested(finding)
    assert finding.paths == ()


@pytest.mark.parametrize("rule", ["(?i)KERNEL|x", "^kernel", "(?P<kernal>x)", "", "|", "(?!.)", r"\d+/kernel"])
def test_any_regex_can_be_without_a_match(rule):
    assert finding_of("no match", decoder, {rule: (None,)}).rule == rule


def test_the_nearest_path_has_the_rarest_word_of_the_rule():
    def build():
        x, y = blocks_of_experts(2)
        return keras.Model(x, layers.Dense(32, name="norm")(layers.Dense(32, name="head")(y)))

    finding = finding_of("no match", build, {".*experts.*kernel": (None, None, "model")})
    assert next(iter(suggested(finding))).startswith("block[0-9]+_experts/expert_")


# ---------------------------------------------------------------------------------------------- rules that do not fit


def test_swapped_axes():
    rules = {"dense_0/kernel": ("model", None)}
    finding = finding_of("does not fit", lambda: dense_layers(16, inputs=6), rules)
    for value in ("'dense_0/kernel'", "(6, 16)", "dim 0 has size 6", "axis 'model' (size 4)"):
        assert value in finding.message
    assert suggested(finding) == {"dense_0/kernel": (None, "model")}
    assert finding.bytes == 4 * 6 * 16
    assert not findings_of(lambda: dense_layers(16, inputs=6), fixed(finding, rules))


def test_a_rule_with_more_entries_than_dims():
    rules = {".*dense_.*": (None, "model")}

    def build():
        return dense_layers(16, 8, use_bias=True)

    [first, second] = [finding for finding in findings_of(build, rules) if finding.kind == "does not fit"]
    assert first.paths == ("dense_0/bias",)
    assert "2 entries" in first.message
    assert suggested(first) == {"dense_0/bias": ("model",)}
    rules = fixed(second, fixed(first, rules, replace=False), replace=False)
    assert [v.axes for v in explained(build, rules).variables] == [(None, "model"), ("model",)] * 2


def test_a_matrix_rule_for_a_convolution_suggests_the_dim_that_fits():
    def build():
        return keras.Sequential([keras.Input((8, 8, 6)), layers.Conv2D(16, 3, use_bias=False, name="conv")])

    rules = {"conv/kernel": (None, "model")}
    finding = finding_of("does not fit", build, rules)
    assert suggested(finding) == {"conv/kernel": (None, None, None, "model")}
    assert not findings_of(build, fixed(finding, rules))


def test_grouped_query_attention_with_fewer_heads_than_the_axis_has_devices():
    rules = {".*attention/(query|key|value)/kernel": (None, "model", None)}

    def build():
        return decoder(key_value_heads=2)

    finding = finding_of("does not fit", build, rules, "data:1,model:8")
    for value in ("'block_{0,1}_attention/{key,value}/kernel'", "(32, 2, 4)", "dim 1 has size 2", "size 1 or 2"):
        assert value in finding.message
    assert suggested(finding) == {
        "block_[0-9]+_attention/(key|value)/kernel": ("model", None, None),
        "block_[0-9]+_attention/query/kernel": (None, "model", None),
    }
    coverage = explained(build, fixed(finding, rules), "data:1,model:8")
    assert all(v.fits for v in coverage.variables)
    assert sum(v.rule is not None for v in coverage.variables) == 6


def test_lora_factors_have_the_layout_of_their_weight():
    model, rules = dense_layers(16, 16, lora_rank=2), {".*dense_.*": (None, "model")}
    assert not findings_of(model, rules)
    axes = {v.path: v.axes for v in explained(model, rules).variables}
    assert axes["dense_0/kernel"] == axes["dense_1/lora_kernel_b"] == (None, "model")
    assert axes["dense_0/lora_kernel_a"] == (None, None)


def test_a_rule_for_lora_factors_that_does_not_fit_them():
    model = dense_layers(16, 16, lora_rank=2)
    rules = {".*kernel": (None, "model"), ".*lora_kernel_.": (None, "model")}
    finding = finding_of("does not fit", model, rules)
    assert finding.paths == ("dense_0/lora_kernel_a", "dense_1/lora_kernel_a")
    assert suggested(finding)["dense_[0-9]+/lora_kernel_a"] == (None, None)
    axes = {v.path: v.axes for v in explained(model, fixed(finding, rules)).variables}
    assert axes["dense_0/kernel"] == axes["dense_1/lora_kernel_b"] == (None, "model")
    assert axes["dense_0/lora_kernel_a"] == (None, None)


def test_a_rule_that_does_not_fit_is_not_suggested_for_lora_factors():
    # They fit only because they have the layout of their weight.
    model, rules = dense_layers(16, 16, use_bias=True, lora_rank=2), {".*": (None, None, None)}
    findings = [finding for finding in findings_of(model, rules) if finding.kind == "does not fit"]
    assert findings
    for finding in findings:
        assert (None, None, None) not in suggested(finding).values()


def test_a_rule_that_fits_some_variables_keeps_them():
    finding = finding_of("does not fit", lambda: dense_layers(16, 6, inputs=16), {".*": (None, "model")})
    assert suggested(finding) == {"dense_1/kernel": ("model", None)}


def test_in_an_ordered_map_the_rule_that_fits_is_added_before_the_other():
    mesh = kd.create_device_mesh("data:2,model:4")
    layout_map = kd.LayoutMap.from_rules([(".*kernel", (None, "model"))], mesh)
    [finding] = kd.explain(lambda: dense_layers(16, 6, 16, 6, 16), kd.ModelParallel(layout_map=layout_map)).findings
    assert suggested(finding) == {"dense_(1|3)/kernel": ("model", None)}
    assert "before" in finding.message


# ----------------------------------------------------------------------------------------- rules that collide, shadows


def test_a_rule_that_earlier_ones_shadow():
    rules = [(".*kernel", (None, "model")), (".*_up/kernel", ("model", None))]
    layout_map = kd.LayoutMap.from_rules(rules, kd.create_device_mesh("data:2,model:4"))
    [finding] = [
        each
        for each in kd.explain(decoder, kd.ModelParallel(layout_map=layout_map)).findings
        if each.kind == "shadowed"
    ]
    assert finding.rule == ".*_up/kernel"
    assert "2 by '.*kernel'" in finding.message


def test_a_regex_all_of_whose_paths_are_keys():
    rules = {"dense_[01]/kernel": (None, "model"), "dense_0/kernel": ("model", None), "dense_1/kernel": ("model", None)}
    finding = finding_of("shadowed", lambda: dense_layers(16, 16), rules)
    assert finding.rule == "dense_[01]/kernel"
    assert "1 by 'dense_0/kernel', 1 by 'dense_1/kernel'" in finding.message


def sequential():
    return keras.Sequential([keras.Input((16,)), layers.Dense(64, name="up"), layers.Dense(64, name="down")])


@pytest.mark.parametrize("loser", ["up/kernel.*", "up/kernel"])
def test_a_rule_all_of_whose_paths_regexes_match_with_the_name_of_the_model(loser):
    finding = finding_of("shadowed", sequential, {".*kernel": (None, "model"), loser: ("model", None)})
    assert finding.rule == loser
    assert "1 by '.*kernel'" in finding.message
    assert "narrow '.*kernel'" in finding.message  # it is no key


def test_a_rule_some_of_whose_paths_regexes_match_with_the_name_of_the_model():
    rules = {".*kernel": (None, "model"), "up/.*": ("model",)}
    coverage = explained(sequential, rules)
    [finding] = [each for each in coverage.findings if each.kind == "shadowed"]
    assert finding.rule == "up/.*"
    assert [path.partition("/")[2] for path in finding.paths] == ["up/kernel"]
    used = {v.path.partition("/")[2]: v.rule for v in coverage.variables if v.part == "weights"}
    assert used == {"up/kernel": ".*kernel", "up/bias": "up/.*", "down/kernel": ".*kernel", "down/bias": None}


@pytest.mark.parametrize(
    "rules",
    [
        {"sequential.*/up/kernel": (None, "model"), "up/.*": ("model",)},  # the name is spelled on purpose
        {".*kernel": ("model",), "up/.*": ("model",)},  # both are the same
    ],
)
def test_a_rule_that_takes_precedence_on_purpose(rules):
    assert "shadowed" not in [each.kind for each in findings_of(sequential, rules)]


@pytest.mark.parametrize("later", ["kernel_scale", "zero_point", "lora_kernel_b"])
def test_a_rule_for_what_quantization_or_lora_will_add(later):
    rules = {"dense_0/kernel": (None, "model"), "dense_1/kernel": ("model", None), f"dense_0/{later}": (None,)}
    assert not findings_of(lambda: dense_layers(16, 16), rules)


def test_a_rule_without_a_match_for_a_packed_kernel_keeps_its_axes():
    def build():
        model = dense_layers(12, 16)
        model.get_layer("dense_0").quantize("int4")
        return model

    finding = finding_of("no match", build, {"dense_0/kernl": (None, "model")})
    assert suggested(finding) == {"dense_0/kernel": (None, "model")}  # though 6 bytes are not divisible by 4


def test_paths_that_several_rules_match():
    rules = {".*kernel": (None, "model"), "dense_.*": ("model", None)}
    build = lambda: dense_layers(16, 16)  # noqa: E731
    finding = finding_of("several rules", build, rules)
    assert "['.*kernel', 'dense_.*']" in finding.message
    assert suggested(finding) == {"dense_0/kernel": (None, "model"), "dense_1/kernel": (None, "model")}
    assert "several rules" not in [each.kind for each in findings_of(build, fixed(finding, rules))]


def test_the_state_of_a_random_generator_must_be_replicated():
    def build():
        return keras.Sequential([keras.Input((16,)), layers.Dense(8, use_bias=False), layers.Dropout(0.1)])

    for mesh in ("data:4,model:2", "data:1,model:8"):
        rules = {".*state": ("model",), ".*kernel": (None, "model")}
        [finding] = findings_of(build, rules, mesh)
        assert (finding.kind, finding.rule) == ("random state", ".*state")
        assert finding.paths == ("seed_generator/seed_generator_state",)
        assert suggested(finding) == {".*state": (None,)}


# -------------------------------------------------------------------------------------------- replicas and idle axes


def test_experts_that_no_rule_matches():
    build, rules = lambda: keras.Model(*blocks_of_experts(3)), {".*kernel": (None, "model")}
    finding = finding_of("replicated", build, rules)
    assert re.match(r"93\.\d% of weight bytes \(192 KiB\)", finding.message)
    assert "3 x (4, 32, 64), 96 KiB" in finding.message
    assert suggested(finding) == {
        "block[0-9]+_experts/expert_gate": (None, None, "model"),
        "block[0-9]+_experts/expert_down": (None, "model", None),
    }
    assert "keras_dist.tensor_parallel_layout_map" in finding.message
    assert finding.bytes == 192 * 1024
    assert not findings_of(build, fixed(finding, rules))


def routed_experts(experts, width, fused=2, tokens=64):
    """Blocks of a dense layer, a router, and experts with gate and up as one fused weight (`fused=2`) or two (1)."""

    class RoutedExperts(layers.Layer):
        def build(self, shape):
            self.router = layers.Dense(experts, use_bias=False, name="router_dense")
            self.router.build(shape)
            for name in ("gate_up",) if fused == 2 else ("gate", "up"):
                self.add_weight(shape=(experts, shape[-1], fused * width), name=name)
            self.add_weight(shape=(experts, width, shape[-1]), name="down")

        def call(self, x):
            return self.router(x) @ keras.ops.ones((experts, tokens))

    x = y = keras.Input((tokens,))
    for number in range(2):
        y = layers.Dense(tokens, use_bias=False, name=f"block{number}_shared_dense")(y)
        y = RoutedExperts(name=f"block{number}_mixture")(y)
    return keras.Model(x, y)


@pytest.mark.parametrize(
    ("width", "fused", "tokens", "shards_width"),
    [
        (512, 1, 64, True),
        (512, 1, 512, True),  # all weights have one shape
        (508, 1, 64, False),  # shards of 127
        (512, 2, 64, False),  # the halves of a fused weight are used together
        (512, 2, 1024, False),
    ],
)
def test_experts_that_no_rule_matches_beside_a_sharded_router(width, fused, tokens, shards_width):
    build, rules = lambda: routed_experts(8, width, fused, tokens), {".*dense/kernel": (None, "model")}
    finding = finding_of("replicated", build, rules)
    size = 2 * 3 * 8 * tokens * width * 4
    for value in ("'block{0,1}_mixture/router_dense/kernel'", "'model'", bytes_text(size), bytes_text(size // 4)):
        assert value in finding.message
    of_gate, of_down = ((None, None, "model"), (None, "model", None)) if shards_width else (("model", None, None),) * 2
    expected = {f"block[0-9]+_mixture/{name}": of_gate for name in (("gate", "up"), ("gate_up",))[fused - 1]}
    expected |= {"block[0-9]+_mixture/down": of_down, "block[0-9]+_mixture/router_dense/kernel": (None, None)}
    assert suggested(finding) == expected | {"block[0-9]+_shared_dense/kernel": (None, "model")}
    assert not findings_of(build, suggested(finding))


def test_experts_that_the_axis_does_not_divide_are_sharded_along_their_width():
    build, rules = lambda: routed_experts(6, 32), {".*shared_dense/kernel": (None, "model")}
    finding = finding_of("replicated", build, rules)
    assert suggested(finding) == {
        "block[0-9]+_mixture/gate_up": (None, None, "model"),
        "block[0-9]+_mixture/down": (None, "model", None),
    }


@pytest.mark.parametrize(
    ("axes", "expected"), [((None, "model"), (None, "model", None)), (("model", None, None), ("model", None, None))]
)
def test_a_typo_in_a_rule_for_experts(axes, expected):
    rules = {".*dense/kernel": (None, "model"), ".*mixture/dwn": axes}
    finding = finding_of("no match", lambda: routed_experts(8, 512, 1), rules)
    assert suggested(finding) == {".*mixture/down": expected}  # axes for three dims are kept


def test_a_rule_without_a_match_whose_nearest_path_has_a_rule():
    rules = {".*(shared|router)_dense/kernel": (None, "model"), ".*shraed.*kernel": (None, "model")}
    finding = finding_of("no match", lambda: routed_experts(8, 32), rules)
    assert "'.*(shared|router)_dense/kernel' already" in finding.message
    assert not suggested(finding)  # two rules for one path are an error


def test_weights_with_an_all_none_rule_are_replicated_intentionally():
    rules = {"dense_0/kernel": (None, "model")}
    build = lambda: dense_layers(16, 16)  # noqa: E731
    assert "50% of weight bytes (1 KiB)" in finding_of("replicated", build, rules).message
    assert not findings_of(build, rules | {"dense_1/kernel": (None, None)})


def test_a_replica_that_no_axis_divides():
    finding = finding_of("replicated", lambda: dense_layers(7, 7), {"dense_0/kernel": ("model", None)})
    assert "'dense_1/kernel': (7, 7), 196 B" in finding.message
    assert not suggested(finding)


def test_a_replica_over_one_of_two_axes_is_sharded_over_the_other_one_too():
    rules = {"dense_0/kernel": ("data", "model"), "dense_1/kernel": (None, "model")}
    finding = finding_of("replicated", lambda: dense_layers(16, 16), rules)
    assert "axis 'data' (size 2)" in finding.message
    assert "replaces 'dense_1/kernel'" in finding.message
    assert suggested(finding) == {"dense_1/kernel": ("data", "model")}
    assert not findings_of(lambda: dense_layers(16, 16), fixed(finding, rules))


def test_a_replica_over_two_axes_is_sharded_over_both_by_one_rule():
    rules = {"dense_0/kernel": ("data", "model")}
    finding = finding_of("replicated", lambda: dense_layers(16, 16), rules)
    assert "'data' (size 2) or 'model' (size 4)" in finding.message
    assert suggested(finding) == {"dense_1/kernel": ("data", "model")}  # columns over the axis that is not the batch's
    assert not findings_of(lambda: dense_layers(16, 16), fixed(finding, rules))


@pytest.mark.parametrize("rules", [{}, {"embedding/embeddings": ("data", None)}, {"head/output": ("data", None, None)}])
def test_a_mesh_axis_that_shards_nothing(rules):
    coverage = explained(decoder, rules)
    finding = finding_of("idle axis", decoder, rules)
    assert coverage.idle_axes == ("model",)
    assert "'model' (size 4)" in finding.message
    assert ("empty" in str(coverage)) == (not rules)


def test_axes_that_are_used_are_not_idle():
    mesh = kd.create_device_mesh("data:2,model:4")
    assert not explained(decoder, {"head/output": ("data", None, "model")}).idle_axes
    assert not explained(decoder, {}, "data:8,model:1").findings
    assert not kd.explain(decoder, kd.DataParallel()).findings
    assert not kd.explain(decoder, kd.FullyShardedDataParallel(mesh)).findings

    class OwnActivations(kd.ModelParallel):
        def get_tensor_layout(self, path):
            return kd.TensorLayout(("data", "model"), self.device_mesh)

    assert not kd.explain(decoder, OwnActivations(layout_map=kd.LayoutMap(mesh))).findings


def test_data_parallelism_leaves_other_axes_idle():
    with pytest.warns(UserWarning, match="model:4"):
        distribution = kd.DataParallel(kd.create_device_mesh("data:2,model:4"))
    [finding] = kd.explain(decoder, distribution).findings
    assert finding.kind == "idle axis"


# ------------------------------------------------------------------------------------------------ whatever the rules

WORDS = [
    *(
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
    ),
    *("head", "/", "_", "query", "output", "(?i)KERNEL", "[a-z]*", "seed_generator_state", "embeddings", "^", "*"),
    *("$", "lora_kernel_a", "kernal", "|", "sequential", "(?!x)"),
]
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


@pytest.mark.slow
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
    shapes |= {strip_model_names(f"{path}/output"): () for path in coverage.layers}
    for finding in coverage.findings:
        for key, suggested_axes in suggested(finding).items():
            matched = [path for path in shapes if re.fullmatch(key, path)]
            assert matched, finding
            if finding.kind != "no match":
                sizes = coverage.mesh.axis_sizes
                assert not any(layout_error(suggested_axes, shapes[path], sizes) for path in matched), finding
            if finding.kind == "replicated":
                assert set(matched) <= {*finding.paths, *map(strip_model_names, finding.paths)}

"""Adapters of LoRA in PEFT's format: exact in both directions, and for every form of a kernel."""

import json
import os
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
from support.hub_checkpoints import write_family, write_safetensors

import keras_dist as kd
from keras_dist.variables.safetensors_files import SafetensorsFile, read_header

pytest.importorskip("safetensors", reason="needs safetensors: pip install '.[hub]'")

# Layers whose kernels have 2 dims, heads among the inputs or the outputs, or are parts of a fused tensor of Conv1D.
LAYERS = {
    "llama": ["query", "value", "attention_output", "feedforward_gate_dense", "token_embedding"],
    "gpt2": ["query", "value", "attention_output"],
    "gemma": ["query", "attention_output"],
    "bert": ["value", "feedforward_intermediate_dense"],
    "qwen3_moe": ["query", "key"],
}


@pytest.fixture(autouse=True)
def sharded():
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        yield


def adapted(folder, family, rank=2):
    model = keras_hub.models.Backbone.from_preset(str(folder))
    model.enable_lora(rank, LAYERS[family])
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        if "lora_" in variable.name:
            variable.assign(rng.normal(size=variable.shape))
    return model


def merged_kernels(model):
    """Pairs of a layer's name and its kernel or table. Paths of a second model may be numbered on."""
    return [
        (layer.name, np.asarray(getattr(layer, name)))
        for layer in model._flatten_layers()
        for name in ("kernel", "embeddings")
        if getattr(layer, name, None) is not None
    ]


def factors_in(folder) -> dict[str, np.ndarray]:
    path = folder / "adapter_model.safetensors"
    file = SafetensorsFile(path, None)
    return {name: np.array(file.get_tensor(name)) for name in read_header(path)[0]}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "bert", "qwen3_moe"])
def test_what_is_written_adds_the_same_where_it_is_merged(family, tmp_path):
    like = write_family(tmp_path / "like", family)
    model, other = adapted(like, family), keras_hub.models.Backbone.from_preset(str(like))
    before = merged_kernels(other)
    kd.export_adapter(model, tmp_path / "adapter", like)
    kd.merge_adapter(other, tmp_path / "adapter", like)
    expected, found = merged_kernels(model), merged_kernels(other)
    pairs = list(zip(before, found, strict=True))
    assert {name for (name, one), (_, other) in pairs if not np.array_equal(one, other)} == set(LAYERS[family])
    for (_, kernel), (_, wanted) in zip(found, expected, strict=True):
        np.testing.assert_allclose(kernel, wanted, atol=2e-5)
    for one, another in zip(model.weights, adapted(like, family).weights, strict=True):
        np.testing.assert_array_equal(one, another)  # the model that was written did not change


def test_names_and_shapes_are_those_of_peft(tmp_path):
    like = write_family(tmp_path / "like", "llama")  # 4 heads, 2 of keys and values, of 8; 32 wide
    model = keras_hub.models.Backbone.from_preset(str(like))
    model.enable_lora(2, LAYERS["llama"])
    kd.export_adapter(model, tmp_path / "adapter", like)
    block = "base_model.model.model.layers.1"
    shapes = {name: factor.shape for name, factor in factors_in(tmp_path / "adapter").items()}
    assert shapes[f"{block}.self_attn.q_proj.lora_A.weight"] == (2 * 4, 32)
    assert shapes[f"{block}.self_attn.q_proj.lora_B.weight"] == (4 * 8, 2 * 4)
    assert shapes[f"{block}.self_attn.v_proj.lora_B.weight"] == (2 * 8, 2 * 2)
    assert shapes[f"{block}.self_attn.o_proj.lora_A.weight"] == (2, 32)
    assert shapes[f"{block}.mlp.gate_proj.lora_B.weight"] == (48, 2)
    assert shapes["base_model.model.model.embed_tokens.lora_embedding_A"] == (2, 64)
    assert shapes["base_model.model.model.embed_tokens.lora_embedding_B"] == (32, 2)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["embed_tokens", "gate_proj", "o_proj", "q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (8, 8, False)
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert config["rank_pattern"]["model.layers.0.self_attn.o_proj"] == 2
    assert "model.layers.0.self_attn.q_proj" not in config["rank_pattern"]


def write_adapter(folder, factors, **config):
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "fan_in_fan_out": False} | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(folder / "adapter_model.safetensors", factors)
    return folder


def test_scales_of_peft(tmp_path):
    """alpha over the rank, or over its root, for all modules or those whose names end with a pattern."""
    like, rng = write_family(tmp_path / "like", "llama"), np.random.default_rng(0)
    name = "layers.0.self_attn.o_proj"
    a, b = rng.normal(size=(2, 32)).astype("float32"), rng.normal(size=(32, 2)).astype("float32")
    factors = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    for config, scale in (
        ({}, 3),
        ({"use_rslora": True}, 6 / np.sqrt(2)),
        ({"alpha_pattern": {"o_proj": 1}}, 1 / 2),
        ({"alpha_pattern": {"1.self_attn.o_proj": 1}}, 3),
    ):
        model = keras_hub.models.Backbone.from_preset(str(like))
        kernel = model.get_layer("transformer_layer_0")._self_attention_layer._output_dense.kernel
        before = kernel.numpy()
        kd.merge_adapter(model, write_adapter(tmp_path / "adapter", factors, **config), like)
        np.testing.assert_allclose(kernel.numpy() - before, scale * (b @ a).T.reshape(4, 8, 32), atol=1e-5)


def test_adapters_that_have_no_form(tmp_path):
    like = write_family(tmp_path / "like", "qwen2")
    model = keras_hub.models.Backbone.from_preset(str(like))
    with pytest.raises(ValueError, match=r"has no adapters\. Call model\.enable_lora\(rank\)"):
        kd.export_adapter(model, tmp_path / "out", like)
    model.enable_lora(2)  # which trains biases of the same layers
    kd.export_adapter(model, tmp_path / "same", like)
    bias = next(variable for variable in model.trainable_variables if variable.name == "bias")
    bias.assign(bias + 1)
    with pytest.raises(ValueError, match=r"bias' is trainable and differs from .*like', but an adapter has no place"):
        kd.export_adapter(model, tmp_path / "out", like)
    with pytest.raises(ValueError, match="bias' is trainable, but an adapter has no place"):
        kd.export_adapter(model, tmp_path / "out")
    tied: Any = keras_hub.models.Backbone.from_preset(str(write_family(tmp_path / "tied", "gemma")))
    tied.enable_lora(2, ["token_embedding"])
    with pytest.raises(ValueError, match=r"embeddings of 'token_embedding.*' also compute logits.*export_safetensors"):
        kd.export_adapter(tied, tmp_path / "out", tmp_path / "tied")
    bert = write_family(tmp_path / "bert", "bert")
    classifier: Any = keras_hub.models.TextClassifier.from_preset(str(bert), num_classes=2, preprocessor=None)
    classifier.backbone.enable_lora(2)
    with pytest.raises(ValueError, match=r"not 'logits/kernel' \(2 weights\).*Export the backbone"):
        kd.export_adapter(classifier, tmp_path / "out", bert)
    with pytest.raises(TypeError, match="export_adapter takes a task or a backbone of KerasHub"):
        kd.export_adapter(keras.Sequential(), tmp_path / "out", like)
    assert sorted(os.listdir(tmp_path)) == ["bert", "like", "same", "tied"]


def test_adapters_that_cannot_be_merged(tmp_path):
    like = write_family(tmp_path / "like", "llama")
    model = keras_hub.models.Backbone.from_preset(str(like))
    before = [variable.numpy() for variable in model.weights]
    a, b = np.ones((2, 32), "float32"), np.ones((32, 2), "float32")

    def factors(name, a: Any = a, b: Any = b):
        return {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}

    good = factors("model.layers.0.self_attn.o_proj")
    for other, config, text in (
        (good, {"peft_type": "LOHA"}, r"an adapter with peft_type='LOHA', and only plain LoRA"),
        (good, {"use_dora": True}, "an adapter with use_dora"),
        (good, {"alora_invocation_tokens": [1]}, "an adapter with alora_invocation_tokens"),
        (good, {"init_lora_weights": "pissa_niter_4"}, r"with init_lora_weights='pissa_niter_4'.*Merge it in PEFT"),
        (good, {"lora_alpha": None}, "lora_alpha is None, which is no number"),
        ({}, {}, "has no tensors"),
        (
            good | factors("model.layers.1.self_attn.o_proj", b=np.ones((32, 3), "float32")),
            {},
            r"layers\.1\.self_attn\.o_proj' have the shapes \(2, 32\) and \(32, 3\), and not \(rank, inputs\)",
        ),
        (factors("model.layers.0.self_attn.o_proj", a[:0], b[:, :0]), {}, r"have the shapes \(0, 32\) and \(32, 0\)"),
        (dict([*good.items()][:1]), {}, r"have the shapes \(2, 32\) and None"),
        (good | {"base_model.model.lm_head.weight": a}, {}, r"has 'base_model\.model\.lm_head\.weight', which is no"),
        (
            good | factors("model.layers.7.mlp.up_proj"),
            {},
            r"no 'model\.layers\.7\.mlp\.up_proj\.weight' among",
        ),
        (
            factors("model.layers.0.mlp.gate_proj"),
            {},
            r"of shape \(32, 32\), but it has the shape \(48, 32\)",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            kd.merge_adapter(model, write_adapter(tmp_path / "adapter", other, **config), like)
    for config in ("{", "[]"):
        (tmp_path / "adapter" / "adapter_config.json").write_text(config)
        with pytest.raises(ValueError, match=r"adapter_config\.json is no config of PEFT"):
            kd.merge_adapter(model, tmp_path / "adapter", like)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"is no adapter of PEFT: it has no adapter_model\.safetensors"):
        kd.merge_adapter(model, tmp_path / "adapter", like)
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_an_adapter_of_tied_embeddings_cannot_be_merged(tmp_path):
    like = write_family(tmp_path / "like", "gemma")
    module = "base_model.model.model.embed_tokens.lora_embedding_"
    factors = {f"{module}A": np.ones((2, 64), "float32"), f"{module}B": np.ones((32, 2), "float32")}
    model = keras_hub.models.Backbone.from_preset(str(like))
    with pytest.raises(ValueError, match=r"embeddings of 'token_embedding.*' also compute logits.*merge_and_unload"):
        kd.merge_adapter(model, write_adapter(tmp_path / "adapter", factors), like)

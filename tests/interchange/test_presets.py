"""Models of presets are built from config.json alone, and `from_preset` loads them under the layout that suits them."""

import json
import math
import pathlib
import re

import keras
import keras_hub
import numpy as np
import pytest
from support.hub_checkpoints import SAVED_BY_TRANSFORMERS, write_checkpoint
from support.slow_cases import slow_unless

import keras_dist as kd
from keras_dist.interchange.presets import preset_builder
from keras_dist.planning.reports.state_estimate import estimate_state
from keras_dist_cli import main

# Backbones have no heads, and the parameters of some are not those of the file: reserved rows, derived tables.
OTHERS = {"albert", "bart", "deit", "dinov2", "distilbert", "esm", "roberta", "smollm3", "vit", "xlm-roberta"}


@pytest.fixture
def llama(tmp_path):
    pytest.importorskip("safetensors", reason="needs safetensors: pip install '.[hub]'")
    write_checkpoint(tmp_path, "llama", layers=1)
    return str(tmp_path)


FAMILIES = sorted(SAVED_BY_TRANSFORMERS.keys() - {"gpt_oss"})  # whose experts have 4 bits in files


@pytest.mark.parametrize("family", [slow_unless(each in ("llama", "gemma4_text", "vit"), each) for each in FAMILIES])
def test_parameters_are_those_of_the_checkpoint(family, tmp_path):
    saved = SAVED_BY_TRANSFORMERS[family]
    (tmp_path / "config.json").write_text(json.dumps(saved["config"]))
    state = estimate_state(preset_builder(str(tmp_path)), "train")
    parameters = sum(map(math.prod, saved["tensors"].values()))
    assert (state.parameters == parameters) == (family not in OTHERS)
    assert abs(state.parameters - parameters) < 0.08 * parameters
    assert state.weights == 4 * state.parameters
    assert 0.99 * state.weights < state.gradients <= state.weights
    assert state.optimizer_state == 2 * state.gradients + 8  # Adam's moments, the number of steps and the learning rate


def test_task_that_was_saved_is_built_without_its_files_of_weights(tmp_path):
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "max_sequence_length": 8}
    with kd.deferred():
        backbone = keras_hub.models.BertBackbone(vocabulary_size=32, **sizes)
        saved = keras_hub.models.BertTextClassifier(backbone, num_classes=3)
        for name, part in (("config", backbone), ("task", saved)):  # as save_to_preset, but for weights
            (tmp_path / f"{name}.json").write_text(json.dumps(keras.saving.serialize_keras_object(part)))
        model = preset_builder(str(tmp_path))()
    assert type(model) is keras_hub.models.BertTextClassifier
    assert model.output_shape == (None, 3)
    assert model.compiled


@pytest.mark.slow
def test_preset_is_loaded_under_the_distribution_that_auto_chose(llama):
    expected = keras_hub.models.CausalLM.from_preset(llama, preprocessor=None)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 16))
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}

    def build():
        return keras_hub.models.CausalLM.from_preset(llama, load_weights=False, preprocessor=None)

    choice = kd.auto(build, (x, tokens), strategies="tp", keep="model:2", trials=1, search_step_options=False)
    kd.set_distribution(choice.distribution)
    model = keras_hub.models.CausalLM.from_preset(llama, preprocessor=None)
    assert any(not each.value.sharding.is_fully_replicated for each in model.weights)
    for variable, other in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy(), variable.path)
    planned = sum(each.bytes for each in choice.plan.variables if each.part == "weights")
    assert sum(each.value.addressable_shards[0].data.nbytes for each in model.weights) == planned
    predictions = model.predict(x, batch_size=8, verbose=0)
    kd.set_distribution(None)
    np.testing.assert_allclose(predictions, expected.predict(x, batch_size=8, verbose=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "faults"),
    [
        (None, ["no config.json"]),
        ({"model_type": "unknown_family"}, ["KerasHub cannot read", "unknown_family"]),
        ({"nothing": "known"}, ["KerasHub cannot read", "nothing"]),
        ([1], ["KerasHub cannot read"]),
    ],
)
def test_folders_that_are_no_presets(config, faults, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as raised:
        preset_builder(str(tmp_path))
    assert [fault for fault in faults if fault not in str(raised.value)] == []


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads"])
def test_config_that_lacks_a_key(key, llama, capsys):
    path = pathlib.Path(llama) / "config.json"
    config = json.loads(path.read_text())
    del config[key]
    path.write_text(json.dumps(config))
    assert main(["estimate", llama]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith(f"keras-dist: error: KerasHub cannot build a model from the config.json of {llama!r}")
    assert f"it has no {key!r}" in shown[-1]
    assert not any("Traceback" in line for line in shown)


def test_misspelled_preset_names_the_closest_one():
    with pytest.raises(ValueError, match=r"'bert_tiny_en_uncasd'.*Did you mean 'bert_tiny_en_uncased'"):
        preset_builder("bert_tiny_en_uncasd")


def test_default_policy_is_that_of_the_builder(llama):
    keras.config.set_dtype_policy("bfloat16")
    try:
        state = estimate_state(preset_builder(llama), "predict")
    finally:
        keras.config.set_dtype_policy("float32")
    assert (state.weights, state.gradients, state.optimizer) == (2 * state.parameters, 0, None)

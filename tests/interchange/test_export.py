"""Models of KerasHub are written as Hugging Face's libraries read them: bit by bit what was read or trained."""

import errno
import json
import os
import re
import warnings
from typing import Any

import jax
import keras
import keras_hub
import ml_dtypes  # noqa: F401  (names the types that NumPy lacks)
import numpy as np
import pytest
from support.hub_checkpoints import SAVED_BY_TRANSFORMERS, write_checkpoint, write_family
from support.slow_cases import slow, slow_unless

import keras_dist as kd
from keras_dist.interchange import export, output_files
from keras_dist.interchange.converter import TensorType
from keras_dist.interchange.output_files import planned_files
from keras_dist.variables.safetensors_files import SafetensorsFile, read_header

pytest.importorskip("safetensors", reason="needs safetensors: pip install '.[hub]'")

FAST = ["gpt2", "mixtral"]
CHANGED = ["mistral"]  # whose weights KerasHub rounds to float16
# Where KerasHub adds up tables, interpolates one, or reads 4 bits, and which variable has the result.
COMPUTED = {
    **{"xlm-roberta": "position_embedding", "dinov2": "interpolated_position_embeddings", "gpt_oss": "gate_up_proj"},
}
BIT_EQUAL = sorted(SAVED_BY_TRANSFORMERS.keys() - {*CHANGED, *COMPUTED})


@pytest.fixture(autouse=True)
def sharded():
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        yield


def imported(folder, kind=keras_hub.models.Backbone, **options):
    return kind.from_preset(str(folder), **options)


def tensors_in(folder) -> dict[str, np.ndarray]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = SafetensorsFile(path, None)
        found |= {name: np.array(file.get_tensor(name)) for name in read_header(path)[0]}
    return found


def assert_same_tensors(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert got[name].tobytes() == tensor.tobytes(), name


def assert_same_weights(model, other):
    for variable, another in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), another.numpy(), variable.path)


# --------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("family", [slow_unless(family in FAST, family) for family in BIT_EQUAL])
def test_what_was_read_is_written_bit_by_bit(family, tmp_path):
    like, out = write_family(tmp_path / "like", family), tmp_path / "out"
    (like / "tokenizer.json").write_text("{}")
    kd.export_safetensors(imported(like), out, like, max_shard_bytes=40_000)
    assert_same_tensors(tensors_in(out), tensors_in(like))
    assert json.loads((out / "config.json").read_text()) == SAVED_BY_TRANSFORMERS[family]["config"]
    assert (out / "tokenizer.json").read_text() == "{}"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        name: path.name for path in out.glob("*.safetensors") for name in read_header(path)[0]
    }
    for path in out.glob("*.safetensors"):
        header, start = read_header(path)
        assert os.path.getsize(path) - start <= 40_000 or len(header) == 1


@pytest.mark.parametrize("family", CHANGED)
def test_what_kerashub_rounds_is_written_as_the_variables_are(family, tmp_path):
    like = write_family(tmp_path / "like", family)
    model = imported(like)
    kd.export_safetensors(model, tmp_path / "out", like)
    assert_same_weights(imported(tmp_path / "out"), model)


@pytest.mark.parametrize("family", [slow_unless(family == "dinov2", family) for family in COMPUTED])
def test_values_that_kerashub_computes_cannot_be_trained(family, tmp_path):
    like = write_family(tmp_path / "like", family)
    model = imported(like)
    kd.export_safetensors(model, tmp_path / "same", like)
    assert_same_tensors(tensors_in(tmp_path / "same"), tensors_in(like))
    trained = next(each for each in model.trainable_variables if COMPUTED[family] in each.path)
    trained.assign(trained + 1)
    with pytest.raises(ValueError, match=rf"convert_\w+ computes the values of '.*{COMPUTED[family]}.* it was trained"):
        kd.export_safetensors(model, tmp_path / "out", like)
    assert sorted(os.listdir(tmp_path)) == ["like", "same"]


@pytest.mark.parametrize("devices", [1, 8])
def test_every_layout_writes_the_same_files(devices, tmp_path):
    like = write_family(tmp_path / "like", "gpt2")
    with kd.DataParallel(devices=jax.devices()[:devices]).scope():
        model = imported(like)
    kd.export_safetensors(model, tmp_path / "out", like)
    assert os.listdir(tmp_path) in (["like", "out"], ["out", "like"])  # and no other folder
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert_same_tensors(tensors_in(tmp_path / "out"), tensors_in(like))


@pytest.mark.slow
def test_what_was_trained_is_written(tmp_path):
    like = write_family(tmp_path / "like", "qwen2", scale=0.1)
    model = imported(like, keras_hub.models.CausalLM, preprocessor=None)
    model.compile("sgd")  # with the loss of the task
    tokens = {"token_ids": np.ones((8, 6), "int32"), "padding_mask": np.ones((8, 6), "int32")}
    model.fit(tokens, np.ones((8, 6), "int32"), verbose=0)
    kd.export_safetensors(model, tmp_path / "out", like)
    before, after = tensors_in(like), tensors_in(tmp_path / "out")
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    assert_same_weights(imported(tmp_path / "out"), model.backbone)


@pytest.mark.parametrize("family", [slow("bert"), "gpt2", slow("mixtral")])
def test_adapters_of_lora_are_merged(family, tmp_path):
    like = write_family(tmp_path / "like", family, scale=0.1)
    model = imported(like)
    model.enable_lora(2)
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    kd.export_safetensors(model, tmp_path / "out", like)
    changed = {k for k, v in tensors_in(tmp_path / "out").items() if not np.array_equal(v, tensors_in(like)[k])}
    assert changed
    inputs = {name: np.ones((8, 6), "int32") for name in model.input}
    expected, got = (
        keras.tree.flatten(each.predict(inputs, verbose=0)) for each in (model, imported(tmp_path / "out"))
    )
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_weights_that_an_adapter_does_not_change_keep_their_bits(tmp_path):
    like = write_family(tmp_path / "like", "llama")
    model = imported(like, dtype="mixed_bfloat16")
    model.enable_lora(2)  # whose factors B are zeros
    kd.export_safetensors(model, tmp_path / "out", like)
    assert_same_tensors(tensors_in(tmp_path / "out"), tensors_in(like))


def test_heads_that_kerashub_reads_are_written(tmp_path):
    like = write_family(tmp_path / "like", "vit")
    model = imported(like, keras_hub.models.ImageClassifier, preprocessor=None)
    model.output_dense.set_weights([model.output_dense.kernel, np.asarray([2.0, 3.0])])
    kd.export_safetensors(model, tmp_path / "out", like)
    expected = tensors_in(like) | {"classifier.bias": np.asarray([2.0, 3.0], "float32")}
    assert_same_tensors(tensors_in(tmp_path / "out"), expected)


def test_tensors_are_rounded_to_a_dtype(tmp_path):
    like = write_family(tmp_path / "like", "llama")
    kd.export_safetensors(imported(like), tmp_path / "out", like, dtype="bfloat16")
    rounded = {name: tensor.astype("bfloat16") for name, tensor in tensors_in(like).items()}
    assert_same_tensors(tensors_in(tmp_path / "out"), rounded)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_files_keep_the_dtype_of_the_folder(tmp_path):
    like = write_family(tmp_path / "like", "gpt2", dtype="bfloat16")
    kd.export_safetensors(imported(like, dtype="float32"), tmp_path / "out", like)
    assert_same_tensors(tensors_in(tmp_path / "out"), tensors_in(like))


# ------------------------------------------------------------------------------------------------------- without `like`

LLAMA: dict = {"vocabulary_size": 64, "num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32}
LLAMA |= {"intermediate_dim": 48}
GEMMA: dict = LLAMA | {"num_key_value_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras_hub.models.Llama3Backbone(**LLAMA),
        lambda: keras_hub.models.GPT2Backbone(64, 2, 4, 32, 128, max_sequence_length=32),
        slow(lambda: keras_hub.models.GemmaBackbone(**GEMMA)),
    ],
    ids=["llama", "gpt2", "gemma"],
)
def test_kerashub_names_tensors_and_config(make, tmp_path):
    model = make()
    kd.export_safetensors(model, tmp_path / "out")
    assert_same_weights(imported(tmp_path / "out"), model)
    assert "lm_head.weight" not in tensors_in(tmp_path / "out") or not json.loads(
        (tmp_path / "out" / "config.json").read_text()
    ).get("tie_word_embeddings", True)


def test_tokenizer_and_tokens_are_written(tmp_path):
    vocabulary = {"a": 0, "i": 1, "r": 2, "ai": 3, "<|endoftext|>": 4}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=["a i"])
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
    backbone = keras_hub.models.GPT2Backbone(5, 1, 2, 8, 16, max_sequence_length=8)
    kd.export_safetensors(keras_hub.models.GPT2CausalLM(backbone, preprocessor), tmp_path / "out")
    names = {"config.json", "merges.txt", "model.safetensors", "tokenizer_config.json", "vocab.json"}
    assert names <= set(os.listdir(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 4


@pytest.mark.parametrize("is_tied", [True, False])
def test_config_and_tensors_say_whether_embeddings_are_tied(is_tied, tmp_path):
    """KerasHub's config of Llama does not."""
    model = keras_hub.models.Llama3Backbone(**LLAMA, tie_word_embeddings=is_tied)
    kd.export_safetensors(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is is_tied
    assert ("lm_head.weight" in tensors_in(tmp_path / "out")) is not is_tied
    assert_same_weights(imported(tmp_path / "out"), model)
    other = keras_hub.models.Llama3Backbone(**LLAMA, tie_word_embeddings=not is_tied)
    with pytest.raises(ValueError, match=r"token_embedding' has the variables .*like it, also in tie_word_embeddings"):
        kd.export_safetensors(other, tmp_path / "other", tmp_path / "out")


def test_a_model_that_kerashub_writes_incompletely_needs_a_folder(tmp_path):
    model = keras_hub.models.GemmaBackbone(**GEMMA | {"num_key_value_heads": 2})  # of which it writes the first
    with pytest.raises(ValueError, match=r"exporter of GemmaBackbone writes tensors that .*convert_gemma cannot read"):
        kd.export_safetensors(model, tmp_path / "out")


def test_config_has_the_epsilon_that_the_model_computes_with(tmp_path):
    """KerasHub's converter of Llama does not read it."""
    write_checkpoint(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    with pytest.warns(UserWarning, match=r"have an epsilon of 1e-06, but .* says rms_norm_eps=1e-05, which KerasHub"):
        kd.export_safetensors(imported(tmp_path), tmp_path / "out", tmp_path)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kd.export_safetensors(imported(tmp_path, layer_norm_epsilon=1e-5), tmp_path / "same", tmp_path)
    assert json.loads((tmp_path / "same" / "config.json").read_text())["rms_norm_eps"] == 1e-5


def test_a_family_without_exporter_needs_a_folder(tmp_path):
    model = imported(write_family(tmp_path / "like", "bert"))
    with pytest.raises(ValueError, match=r"GPT2Backbone, .* but not for BertBackbone\. Pass like=folder"):
        kd.export_safetensors(model, tmp_path / "out")


def test_a_model_that_kerashub_does_not_read_is_named(tmp_path):
    model = keras_hub.models.Gemma3Backbone(**LLAMA, head_dim=8, image_size=None, vision_encoder=None)
    with pytest.raises(ValueError, match=r"convert_gemma3 reads no Gemma3Backbone like .*post_attention_norm"):
        kd.export_safetensors(model, tmp_path / "out")


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder, and the model that was read from it."""
    folder = write_family(tmp_path_factory.mktemp("llama") / "like", "llama")
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        return folder, imported(folder)


def test_folders_that_cannot_be_written(llama, tmp_path):
    like, model = llama
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").write_text("of another model")
    with pytest.raises(FileExistsError, match=r"full' is not empty\. Delete it"):
        kd.export_safetensors(model, tmp_path / "full", like)
    with pytest.raises(ValueError, match=r"'gs://bucket/out' is not on a file system of this machine"):
        kd.export_safetensors(model, "gs://bucket/out", like)
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        kd.export_safetensors(model, tmp_path / "full" / "model.safetensors" / "out", like)
    assert (tmp_path / "full" / "model.safetensors").read_text() == "of another model"


def test_an_empty_folder_is_filled(llama, tmp_path, monkeypatch):
    """It may be a mounted file system, or the working directory."""
    like, model = llama
    (tmp_path / "out").mkdir(mode=0o750)
    before = os.stat(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    kd.export_safetensors(model, ".", like)
    after = os.stat(tmp_path / "out")
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(os.listdir(".")) == ["config.json", "model.safetensors"]
    assert_same_tensors(tensors_in(tmp_path / "out"), tensors_in(like))


def test_a_full_disk_leaves_nothing(llama, tmp_path, monkeypatch):
    like, model = llama

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output_files.os, "posix_fallocate", refuse)
    with pytest.raises(
        OSError, match=r"has .*iB of free space, but a file of the export takes .*KiB\. Free some space"
    ):
        kd.export_safetensors(model, tmp_path / "out", like)
    assert os.listdir(tmp_path) == []


def test_values_that_a_dtype_cannot_hold(tmp_path):
    like = write_family(tmp_path / "like", "llama", scale=1e5)
    with pytest.raises(ValueError, match=r"'.*weight' has values that are too large for float16.*dtype='bfloat16'"):
        kd.export_safetensors(imported(like), tmp_path / "out", like, dtype="float16")
    assert os.listdir(tmp_path) == ["like"]


def test_an_error_while_values_are_written_leaves_nothing(llama, tmp_path, monkeypatch):
    like, model = llama
    monkeypatch.setattr(export, "gather", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kd.export_safetensors(model, tmp_path / "out", like)
    assert os.listdir(tmp_path) == []


def test_folders_that_describe_another_model(llama, tmp_path):
    _, model = llama
    other = write_family(tmp_path / "mixtral", "mixtral")
    with pytest.raises(
        ValueError, match=r"is a 'mixtral', which KerasHub reads as MixtralBackbone, but .* Llama3?Backbone"
    ):
        kd.export_safetensors(model, tmp_path / "out", other)
    changed = write_family(tmp_path / "changed", "llama")
    config = SAVED_BY_TRANSFORMERS["llama"]["config"]
    (changed / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    with pytest.raises(ValueError, match=r"its vocabulary_size is 65, and that of the model is 64\. Pass the folder"):
        kd.export_safetensors(model, tmp_path / "out", changed)
    (changed / "config.json").write_text(json.dumps(config | {"vocab_size": 65, "intermediate_size": 47}))
    with pytest.raises(ValueError, match=r"its intermediate_dim is 47, .* \(1 more: vocabulary_size\)"):
        kd.export_safetensors(model, tmp_path / "out", changed)
    (changed / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(
        ValueError, match=r"cannot convert the model type 'mamba' .*It converts albert, .*xlm_roberta\."
    ):
        kd.export_safetensors(model, tmp_path / "out", changed)
    (changed / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json\. Pass a folder in the format of Hugging Face"):
        kd.export_safetensors(model, tmp_path / "out", changed)


def test_folders_without_tensors(llama, tmp_path):
    _, model = llama
    like = write_family(tmp_path / "like", "llama")
    types = {name: list(shape) for name, shape in SAVED_BY_TRANSFORMERS["llama"]["tensors"].items()}
    (like / "model.safetensors").rename(like / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor all files of .*index\.json"):
        kd.export_safetensors(model, tmp_path / "out", like)
    index = {"weight_map": dict.fromkeys(types, "model-00001-of-00001.safetensors")}
    (like / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model-00001-of-00001\.safetensors' is missing"):
        kd.export_safetensors(model, tmp_path / "out", like)


def test_a_checkpoint_that_lacks_a_tensor(llama, tmp_path):
    from support.hub_checkpoints import write_safetensors

    like, model = write_family(tmp_path / "like", "llama"), llama[1]
    tensors = tensors_in(like)
    del tensors["model.norm.weight"]
    write_safetensors(like / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=r"like' lacks 'model\.norm\.weight', which KerasHub reads for Llama"):
        kd.export_safetensors(model, tmp_path / "out", like)
    tensors["model.norm.weight"] = np.zeros(31, "float32")
    write_safetensors(like / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=r"has the shape \(32,\), but what KerasHub reads .* has the shape \(31,\)"):
        kd.export_safetensors(model, tmp_path / "out", like)


def test_models_that_cannot_be_written(llama, tmp_path):
    like, model = llama
    with pytest.raises(TypeError, match=r"takes a task or a backbone of KerasHub, got Sequential"):
        kd.export_safetensors(keras.Sequential([keras.layers.Dense(1)]), tmp_path / "out", like)
    bert = write_family(tmp_path / "bert", "bert")
    classifier = imported(bert, keras_hub.models.TextClassifier, num_classes=2, preprocessor=None)
    for count, change in (
        (2, lambda: None),
        (2, lambda: setattr(classifier, "trainable", False)),
        (4, lambda: classifier.get_layer("logits").enable_lora(2)),
    ):
        change()
        with pytest.raises(ValueError, match=rf"not 'logits/kernel' \({count} weights\).*: model\.backbone"):
            kd.export_safetensors(classifier, tmp_path / "out", bert)
    wrong: Any
    for wrong in ("int8", ["bfloat16"]):
        with pytest.raises(ValueError, match=re.escape(f"dtype={wrong!r} is no floating")):
            kd.export_safetensors(model, tmp_path / "out", like, dtype=wrong)
    for wrong in (0, "5GB", None):
        with pytest.raises(ValueError, match=f"max_shard_bytes={wrong!r} is no positive integer"):
            kd.export_safetensors(model, tmp_path / "out", like, max_shard_bytes=wrong)
    quantized = imported(like)
    quantized.quantize("int8")
    with pytest.raises(ValueError, match=r"is quantized \(int8\).*before you quantize it"):
        kd.export_safetensors(quantized, tmp_path / "out", like)
    with kd.deferred():
        empty = imported(like, load_weights=False)
    with pytest.raises(ValueError, match=r"has no value: .*materialize"):
        kd.export_safetensors(empty, tmp_path / "out", like)
    assert os.listdir(tmp_path) == ["bert"]


# ---------------------------------------------------------------------------------------------------------------- files


def test_files_are_divided_by_bytes_among_processes():
    types = {str(number): TensorType("F32", (size,)) for number, size in enumerate([10, 10, 30, 5, 5, 5, 40])}
    one = planned_files(types, 10**9, processes=1)
    assert [(file.name, file.process, list(file.types)) for file in one] == [("model.safetensors", 0, list(types))]
    several = planned_files(types, 120, processes=3)
    empty = planned_files({"empty": TensorType("F32", (0, 4)), "other": TensorType("F32", (4, 4))}, 10**9, 1)
    assert [[*file.types] for file in empty] == [["empty", "other"]]
    assert [list(file.types) for file in several] == [["0", "1"], ["2"], ["3", "4", "5"], ["6"]]
    assert several[0].name == "model-00001-of-00004.safetensors"
    assert [file.process for file in several] == [0, 1, 2, 2]
    assert {file.process for file in planned_files(types, 10**9, processes=3)} == {0, 1, 2}


def test_other_readers_accept_the_files(llama, tmp_path):
    from safetensors.numpy import load_file

    like, model = llama
    kd.export_safetensors(model, tmp_path / "out", like)
    assert_same_tensors(load_file(tmp_path / "out" / "model.safetensors"), tensors_in(like))
    assert not re.search("float|bfloat", (tmp_path / "out" / "model.safetensors").read_bytes()[:200].decode("latin1"))

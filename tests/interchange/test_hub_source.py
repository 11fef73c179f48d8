"""A folder `like` that is damaged is named with its fault, and its other files are copied into an export."""

import json
import pathlib

import keras_hub
import pytest
from support.hub_checkpoints import write_checkpoint

import keras_dist as kd
from keras_dist.interchange.output_files import INDEX

pytest.importorskip("safetensors", reason="needs safetensors: pip install '.[hub]'")


@pytest.fixture
def like(tmp_path) -> pathlib.Path:
    folder = tmp_path / "like"
    folder.mkdir()
    write_checkpoint(folder, "llama", hidden=16, intermediate=32, vocabulary=32, layers=1)
    return folder


@pytest.fixture
def model(like):
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        yield keras_hub.models.Backbone.from_preset(str(like))


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("config.json", "{", r"config\.json is not JSON: Expecting property name.*line 1"),
        ("config.json", b"\xff\xfe\x00", r"config\.json is not JSON: .*0xff"),
        ("config.json", "[1]", r"config\.json is no JSON object, but \[1\]"),
        (INDEX, "{}", r"has no 'weight_map' .* but None"),
        (INDEX, '{"weight_map": ["a"]}', r"has no 'weight_map' .* but \['a'\]"),
        (INDEX, '{"weight_map": {"a": 1}}', r"has no 'weight_map' .* but \{'a': 1\}"),
        ("modules.json", "{}", r"modules\.json is no JSON array, but \{\}"),
    ],
)
def test_files_that_are_damaged(name, content, fault, like, model, tmp_path):
    (like / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"like='.*like': .*{fault}.*again"):
        kd.export_safetensors(model, tmp_path / "out", like)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["num_attention_heads", "hidden_size", "rope_theta"])
def test_a_config_that_lacks_a_key_of_kerashub(key, like, model, tmp_path):
    config = json.loads((like / "config.json").read_text())
    del config[key]
    (like / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"config\.json of '.*like': it has no '{key}'"):
        kd.export_safetensors(model, tmp_path / "out", like)


def test_a_file_in_place_of_the_folder(like, model, tmp_path):
    with pytest.raises(ValueError, match=r"like='.*config\.json' is a file\. Pass the folder"):
        kd.export_safetensors(model, tmp_path / "out", like / "config.json")


@pytest.mark.parametrize("size", [0, 300, -10])
def test_weights_that_were_not_copied_to_their_end(size, like, model, tmp_path):
    path = like / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"model\.safetensors'.* {path.stat().st_size} bytes.*again"):
        kd.export_safetensors(model, tmp_path / "out", like)


def test_subfolders_are_copied_without_other_weights(like, model, tmp_path):
    copied = {"tokenizer.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    copied |= {"assets/images/logo.png", "modules.json"}
    others = {"onnx/model.onnx", "onnx/model.onnx_data", "original/consolidated.00.pth", "original/params.json"}
    others |= {".cache/a.json", "assets/.hidden/a.json", "checkpoint-5/model.safetensors", "checkpoint-5/config.json"}
    for name in copied | others:
        (like / name).parent.mkdir(parents=True, exist_ok=True)
        (like / name).write_text(name)
    modules = [{"idx": i, "path": path} for i, path in enumerate(["", "1_Pooling", "2_Dense"])]
    (like / "modules.json").write_text(json.dumps(modules))
    out = tmp_path / "out"
    kd.export_safetensors(model, out, like)
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert found == copied | {"config.json", "model.safetensors"}
    assert not (out / "onnx").exists()
    for name in copied - {"modules.json"}:
        assert (out / name).read_text() == name
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"

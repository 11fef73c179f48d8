"""A folder `like` that is damaged is named with its fault."""

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

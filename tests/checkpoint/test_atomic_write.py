"""Files are written completely or not at all, with one process too."""

import json
import os

import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist._keras.internals import saving_lib
from keras_dist.checkpoint.atomic_write import write_atomically


def new_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])


@pytest.mark.parametrize("name", ["m.keras", "w.weights.h5", "m.h5"])
def test_a_failure_leaves_the_previous_file(name, tmp_path, monkeypatch):
    with kd.DataParallel().scope():
        model = new_model()
        save = model.save_weights if ".weights" in name else model.save
        save(tmp_path / name)
        before = (tmp_path / name).read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(saving_lib.H5IOStore, "close", lambda self: 1 / 0)
            patch.setattr(saving_lib.h5py.File, "flush", lambda self: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                save(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
        assert os.listdir(tmp_path) == [name]
        save(tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def test_the_path_of_a_folder_may_end_in_a_slash(tmp_path):
    def write(path):
        os.mkdir(path)
        with open(os.path.join(path, "file"), "w") as file:
            file.write("content")

    write_atomically(f"{tmp_path}/folder/", write)
    assert (tmp_path / "folder" / "file").read_text() == "content"
    assert os.listdir(tmp_path) == ["folder"]


def test_a_folder_and_sharded_files_are_moved_into_place(tmp_path):
    with kd.DataParallel().scope():
        model = new_model()
        for _ in range(2):
            keras.saving.save_model(model, tmp_path / "folder", zipped=False)
            model.save_weights(tmp_path / "w.weights.json", max_shard_size=1)
        (tmp_path / "folder" / "notes").write_text("stay")
        keras.saving.save_model(model, tmp_path / "folder", zipped=False)
        other = keras.models.load_model(tmp_path / "folder")
    np.testing.assert_array_equal(other.get_weights()[0], model.get_weights()[0])
    assert sorted(os.listdir(tmp_path)) == ["folder", "w.weights.json", "w_00000.weights.h5"]
    assert (tmp_path / "folder" / "notes").read_text() == "stay"


def test_links_stay_and_errors_are_keras_own(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.keras").symlink_to(tmp_path / "real" / "m.keras")
    with kd.DataParallel().scope():
        new_model().save(tmp_path / "link.keras")
        assert (tmp_path / "link.keras").is_symlink()
        assert (tmp_path / "real" / "m.keras").is_file()
        with pytest.raises(ValueError, match=r"\.weights\.h5"):
            new_model().save_weights(tmp_path / "w.h5")
        with pytest.raises(FileNotFoundError):
            new_model().save(tmp_path / "none" / "m.keras")
        (tmp_path / "taken.keras").mkdir()
        with pytest.raises(IsADirectoryError):
            new_model().save(tmp_path / "taken.keras")


def test_json_files_are_moved_last(tmp_path, monkeypatch):
    placed = []
    monkeypatch.setattr(os, "replace", lambda here, there: placed.append(os.path.basename(there)))

    def write(path):
        for name in ("a.json", "b.h5", "z.h5"):
            with open(os.path.join(os.path.dirname(path), name), "w"):
                placed.append("written")

    write_atomically(tmp_path / "a.json", write)
    assert placed == ["written"] * 3 + ["b.h5", "z.h5", "a.json"]


@pytest.mark.parametrize("doubled", [False, True])
def test_a_backup_is_moved_into_place_completely(doubled, tmp_path, monkeypatch):
    folder = tmp_path / "backup"
    backup = keras.callbacks.BackupAndRestore(str(folder), save_freq=1, double_checkpoint=doubled)

    def files():
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    with kd.DataParallel().scope():
        model = new_model()
        model.compile("sgd", "mse")
        seen = []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(files()))
        model.fit(np.ones((24, 4)), np.ones((24, 2)), batch_size=8, verbose=0, callbacks=[backup, note])
        assert not folder.exists()  # as it should be at the end
        assert seen[1].keys() == {"latest.weights.h5", "training_metadata.json"} | (
            {"latest.weights.h5.bkp", "training_metadata.json.bkp"} if doubled else set()
        )
        if doubled:
            assert seen[2]["latest.weights.h5.bkp"] == seen[1]["latest.weights.h5"] != seen[2]["latest.weights.h5"]
        backup._save_model()
        before = files()
        monkeypatch.setattr(json, "dumps", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backup._save_model()
    assert files() == before
    assert os.listdir(tmp_path) == ["backup"]

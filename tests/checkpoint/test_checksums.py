"""A damaged checkpoint is found by its checksums, named, and replaced by the newest undamaged one."""

import errno
import logging
import shutil
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from support.slow_cases import slow

import keras_dist as kd
from keras_dist.checkpoint import checksums, restore

X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
EPOCHS = 3
WAYS = ("half", "empty", "flipped", "gone", "folder")


def build(seed=1):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, name="up"), keras.layers.Dense(8, name="down")])
    model.compile("adam", "mse")
    return model


def train(directory, epochs, max_to_keep=2):
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        callbacks = [kd.TrainingCheckpoint(str(directory), max_to_keep=max_to_keep)]
        return build().fit(X, X, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with checkpoints after 4 and 8 batches, and the losses of 3 epochs without an interruption."""
    directory = tmp_path_factory.mktemp("saved")
    losses = train(directory, EPOCHS, max_to_keep=None).history["loss"]
    shutil.rmtree(directory / "12")
    return directory, losses


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def quiet_orbax():
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(
    "error",
    [
        slow(OSError(errno.EMFILE, "Too many open files")),
        ValueError("[os_error_code='24' path='8']"),
        ValueError("UNAVAILABLE: Error reading gs://bucket/8: Couldn't connect"),
    ],
)
def test_an_error_of_this_machine_is_no_damage(error, copy, monkeypatch):
    def fail(*_):
        raise type(error)(*error.args)  # a parameter would keep its traceback, and the model, for the whole run

    with monkeypatch.context() as patch:
        patch.setattr(restore, "_load", fail)
        with pytest.raises(type(error), match=str(error.args[-1])[:15].replace("[", r"\[")):
            train(copy, EPOCHS)
    assert {path.name for path in copy.iterdir()} >= {"4", "8"}
    assert len(train(copy, EPOCHS).epoch) == EPOCHS - 2


def test_metadata_that_orbax_refuses_is_named(copy):
    metadata = copy / "8" / "_CHECKPOINT_METADATA"
    metadata.write_text("[]")
    with pytest.raises(ValueError, match=rf"the checkpoints in {copy}: .* got list.*with {{}}"):
        train(copy, EPOCHS)
    metadata.write_text("{}")
    assert len(train(copy, EPOCHS).epoch) == EPOCHS - 2


def test_what_a_killed_job_has_left_is_removed(copy):
    for name in ("6.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-1234", "9.damaged", "notes"):
        (copy / name / "pytree").mkdir(parents=True)
    train(copy, EPOCHS)
    assert {"8", "9.damaged", "notes"} <= {path.name for path in copy.iterdir()}
    assert not list(copy.glob("*orbax-checkpoint-tmp*"))


def files_of(checkpoint):
    return sorted(file.relative_to(checkpoint).as_posix() for file in checkpoint.rglob("*") if file.is_file())


def damage(file, way):
    """Damages a file; returns what was in it."""
    content = file.read_bytes()
    middle = len(content) // 2
    if way in ("gone", "folder"):
        file.unlink()
        if way == "folder":
            file.mkdir()
    elif way == "flipped":
        file.write_bytes(
            content[:middle] + bytes(byte ^ 8 for byte in content[middle : middle + 1]) + content[middle + 1 :]
        )
    else:
        file.write_bytes(content[:middle] if way == "half" else b"")
    return content


def loaded(path):
    """Returns the values of another model after its weights were loaded."""
    with kd.DataParallel(devices=kd.list_devices()[:1]).scope():
        model = build(seed=2)
        model.load_weights(str(path))
        return [np.asarray(each) for each in (*model.get_weights(), *model.optimizer.variables)]


def data_file(checkpoint):
    """Returns the file with the data of arrays, of which TensorStore has no checksum."""
    files = (checkpoint / "pytree" / "ocdbt.process_0" / "d").iterdir()
    return max(files, key=lambda file: file.stat().st_size)


def test_no_damage_of_a_file_gives_wrong_values(copy, quiet_orbax):
    newest, expected, found_in_no_checksum = copy / "8", loaded(copy / "8"), set()
    for name in files_of(newest):
        for way in WAYS:
            content = damage(newest / name, way)
            problem = checksums.damage(restore.etils_path(str(newest)))
            if problem is None:  # Orbax needs no value from this file, or only checksums are missing
                found_in_no_checksum.add(Path(name).name if way != "gone" else "")
                try:
                    values = loaded(newest)
                except ValueError as error:
                    problem = str(error)
                else:
                    for value, other in zip(values, expected, strict=True):
                        np.testing.assert_array_equal(value, other)
            assert problem is None or name in problem
            if way == "folder":
                (newest / name).rmdir()
            (newest / name).write_bytes(content)
    assert found_in_no_checksum <= {"", "_CHECKPOINT_METADATA", "commit_success.txt", "orbax.checkpoint"}
    assert checksums.damage(restore.etils_path(str(newest))) is None


def test_training_continues_from_the_newest_undamaged_checkpoint(saved, copy):
    name = data_file(copy / "8").relative_to(copy).as_posix()
    damage(copy / name, "flipped")
    with pytest.warns(UserWarning, match=f"{name.removeprefix('8/')} has changed .*continues from {copy}/4. "):
        continued = train(copy, EPOCHS)
    assert continued.epoch == [1, 2]
    np.testing.assert_allclose(continued.history["loss"], saved[1][1:], rtol=1e-6)
    assert {path.name for path in copy.iterdir() if path.is_dir()} == {"8", "8.damaged", "12"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "fit of .* trains nothing")
        assert train(copy, EPOCHS).epoch == []


def test_weights_are_loaded_from_the_newest_undamaged_checkpoint(copy):
    expected = loaded(copy / "4")
    damage(copy / "8" / "pytree" / "manifest.ocdbt", "half")
    with pytest.warns(UserWarning, match=f"{copy}/8 is damaged: file pytree/manifest.ocdbt .*{copy}/4 is loaded"):
        values = loaded(copy)
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, other)
    with pytest.raises(ValueError, match=f"{copy}/8 is damaged: file pytree/manifest.ocdbt has"):
        loaded(copy / "8")
    assert (copy / "8").exists()


def test_no_undamaged_checkpoint_is_an_error_that_names_all_files(copy):
    names = [data_file(copy / step).relative_to(copy / step).as_posix() for step in ("8", "4")]
    for step, name in zip(("8", "4"), names, strict=True):
        damage(copy / step / name, "gone")
    message = (
        f"{copy}/8 is damaged: file {names[0]} is missing; Checkpoint {copy}/4 is damaged: file {names[1]} is missing"
    )
    with pytest.raises(ValueError, match=message):
        loaded(copy)
    with pytest.raises(ValueError, match=message):
        train(copy, EPOCHS)
    assert (copy / "8").exists()


def test_checkpoints_without_checksums_are_loaded(copy, quiet_orbax):
    expected = [loaded(copy / step) for step in ("8", "4")]
    for file in copy.rglob("checksums.*"):
        file.unlink()
    for value, other in zip(loaded(copy), expected[0], strict=True):
        np.testing.assert_array_equal(value, other)
    for name in (
        "pytree/_METADATA",
        "pytree/array_metadatas/process_0",
        "pytree/manifest.ocdbt",
    ):  # nothing else is read
        content = damage(copy / "8" / name, "half")
        with pytest.warns(UserWarning, match=f"{copy}/8 is damaged: .*{copy}/4 is loaded"):
            values = loaded(copy)
        for value, other in zip(values, expected[1], strict=True):
            np.testing.assert_array_equal(value, other)
        (copy / "8" / name).write_bytes(content)


def remove(*names):
    return lambda directory: [shutil.rmtree(directory / name) for name in names]


def add(*names):
    def write(directory):
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text("something else")

    return write


@pytest.mark.parametrize(
    ("change", "epochs", "folders"),
    [
        (add("notes.txt", "logs/events", "8/notes.txt", "8/pytree/notes.txt", "99"), [2], {"4", "8", "logs"}),
        (remove("8"), [1, 2], {"4"}),
        (remove("4", "8"), [0, 1, 2], set()),
        slow(remove("8/pytree/d", "8/progress"), [1, 2], {"4", "8.damaged"}),
        (remove("8/pytree"), [1, 2], {"4", "8.damaged"}),
        slow(remove("8/progress"), [1, 2], {"4", "8.damaged"}),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is damaged:UserWarning")
def test_a_directory_that_users_have_changed(change, epochs, folders, copy, quiet_orbax):
    change(copy)
    assert train(copy, EPOCHS, max_to_keep=None).epoch == epochs
    new = {"4", "8", "12"} if epochs == [0, 1, 2] else {"8", "12"} if epochs == [1, 2] else {"12"}
    assert {path.name for path in copy.iterdir() if path.is_dir()} == folders | new


def test_a_checkpoint_of_keras_is_not_resumed_and_stays(tmp_path):
    with kd.DataParallel().scope():
        build().fit(X, X, verbose=0, callbacks=[keras.callbacks.OrbaxCheckpoint(str(tmp_path))])
    with pytest.raises(ValueError, match=r"progress/process_0-of-.*is missing, which TrainingCheckpoint saves"):
        train(tmp_path, 2)
    assert (tmp_path / "0").exists()

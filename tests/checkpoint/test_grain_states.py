"""States of Grain iterators that another number of processes saved."""

import json
import warnings

import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist.checkpoint import checksums, restore

grain = pytest.importorskip("grain")

ROWS, BATCH = 48, 8
X = np.sin(np.arange(ROWS * 4, dtype="float32").reshape(ROWS, 4))


class Losses(keras.callbacks.Callback):
    def __init__(self, stop_after=None):
        super().__init__()
        self.stop_after, self.losses = stop_after, []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.model.stop_training |= len(self.losses) == self.stop_after


def fit(directory, batch=BATCH, own_rows=False, stop_after=None):
    """Trains an epoch, or the rest of it; returns the losses, and the warnings of processes."""
    with kd.DataParallel(auto_shard_dataset=not own_rows).scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        data = grain.MapDataset.range(ROWS).shuffle(seed=3).map(lambda row: (X[row], X[row, :1])).batch(batch)
        losses = Losses(stop_after)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(data, callbacks=[losses, kd.TrainingCheckpoint(str(directory))], verbose=0)
    return losses.losses, [str(each.message) for each in caught if "processes" in str(each.message)]


def as_saved_by_two(directory, changes=({}, {})):
    """Makes a checkpoint of one process that of two, whose states may have been others."""
    folder = restore.etils_path(str(directory)) / "3" / "progress"
    one = folder / "process_0-of-1.json"
    progress = json.loads(one.read_text())
    files = [folder / f"process_{number}-of-2.json" for number in range(2)]
    for file, changed in zip(files, changes, strict=True):
        file.write_text(json.dumps(progress | {"data": progress["data"] | changed}))
    one.unlink()
    checksums.write(folder, [*files, folder / "model.json"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("uninterrupted"))[0]


@pytest.mark.parametrize("own_rows", [False, True])
def test_equal_states_are_restored_by_another_number_of_processes(own_rows, uninterrupted, tmp_path):
    fit(tmp_path, stop_after=3)
    as_saved_by_two(tmp_path)
    losses, texts = fit(tmp_path, own_rows=own_rows)
    np.testing.assert_allclose(losses, uninterrupted[3:], rtol=1e-6)
    assert texts == []


AFTER_FOUR = {"source": '{"state": {"next_index": 4}}'}


def test_what_is_restored_is_the_state(tmp_path):
    fit(tmp_path, stop_after=3)
    as_saved_by_two(tmp_path, (AFTER_FOUR, AFTER_FOUR))
    assert len(fit(tmp_path)[0]) == 2


@pytest.mark.parametrize("state", [AFTER_FOUR, {"rows": 16}])
def test_different_states_are_not_restored_with_a_warning(state, uninterrupted, tmp_path):
    fit(tmp_path, stop_after=3)
    as_saved_by_two(tmp_path, ({}, state))
    losses, texts = fit(tmp_path)
    assert "saved by 2 processes, not 1" in texts[0]
    np.testing.assert_allclose(losses, uninterrupted[3:], rtol=1e-6)


@pytest.mark.parametrize("batch", [4, 32])
def test_other_rows_of_a_global_batch_are_refused_before_the_first_step(batch, tmp_path):
    fit(tmp_path, stop_after=3)
    as_saved_by_two(tmp_path)
    with pytest.raises(ValueError, match="batches of 8 rows"):
        fit(tmp_path, batch=batch)

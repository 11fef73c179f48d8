"""Data that cannot be used, or is used badly, is reported before the first step."""

import warnings

import keras
import numpy as np
import pytest
from support.keras_scenarios import OLDER_KERAS

import keras_dist as kd
from keras_dist.data.batches import BatchProducer, InputPipeline

# Since 3.16, Keras's `fit` and `evaluate` read the first batch themselves, to build a model, and raise errors of Keras.
EMPTY = "" if OLDER_KERAS else "|train or validation dataset is empty"
STRINGS = "" if OLDER_KERAS else "|Invalid dtype: str"

X, Y = np.ones((24, 4), "float32"), np.ones((24, 1), "float32")


def new_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


METHODS = {
    "fit": lambda x, y=None: new_model().fit(x, y, batch_size=8, verbose=0),
    "evaluate": lambda x, y=None: new_model().evaluate(x, y, batch_size=8, verbose=0),
    "predict": lambda x, y=None: new_model().predict(x, batch_size=8, verbose=0),
}
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


class EmptyDataset(keras.utils.PyDataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError


@methods
def test_arrays_without_rows_raise(method):
    with kd.DataParallel().scope(), pytest.raises(ValueError, match=f"ArrayData{EMPTY}"):
        method(X[:0], Y[:0])


@methods
def test_a_dataset_without_batches_raises(method):
    with kd.DataParallel().scope(), pytest.raises(ValueError, match=f"PyDataset{EMPTY}"):
        method(EmptyDataset())


@methods
def test_a_grain_dataset_without_batches_raises(method):
    grain = pytest.importorskip("grain")
    with kd.DataParallel().scope(), pytest.raises(ValueError, match="GrainDatasetAdapter"):
        method(grain.MapDataset.source([]).batch(8))


def test_a_source_without_further_batches_may_end_later_epochs():
    batches = ((X[:8], Y[:8]) for _ in range(3))
    with kd.DataParallel().scope(), pytest.warns(UserWarning, match="ran out of data"):
        assert new_model().fit(batches, epochs=2, steps_per_epoch=2, verbose=0, shuffle=False).epoch == [0, 1]


@methods
@pytest.mark.parametrize("dtype", ["U3", "S3", object])
def test_arrays_of_strings_raise(method, dtype):
    with kd.DataParallel().scope(), pytest.raises(TypeError, match=r"\(24, 4\)"):
        method(np.full((24, 4), "one", dtype), Y)


@methods
def test_batches_of_strings_raise(method):
    batches = ((np.full((8, 4), "one"), Y[:8]) for _ in range(2))
    error = TypeError if OLDER_KERAS else (TypeError, ValueError)
    with kd.DataParallel().scope(), pytest.raises(error, match=r"\(8, 4\).*<U3" + STRINGS):
        method(batches)


def test_training_on_batches_smaller_than_the_devices_warns_once():
    mesh = kd.DeviceMesh((2, 4), ["data", "fsdp"])
    distribution = kd.FullyShardedDataParallel(mesh, shard_axis="fsdp", replica_axis="data")
    with distribution.scope():
        with pytest.warns(UserWarning, match=r"6 rows.* 8 shards.*data:2,fsdp:4.* 2 devices .* 8\.$") as found:
            new_model().fit(X, Y, batch_size=6, epochs=2, verbose=0)
        assert len([warning for warning in found if "rows" in str(warning.message)]) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            new_model().fit(X, Y, batch_size=6, verbose=0)


def test_a_small_last_batch_does_not_warn():
    with kd.DataParallel().scope(), warnings.catch_warnings():
        warnings.simplefilter("error")
        new_model().fit(X[:20], Y[:20], batch_size=8, verbose=0)
        new_model().predict(X[:1], verbose=0)


def test_a_batch_that_is_awaited_before_it_is_taken_warns_once():
    placer = kd.DataParallel()._placer
    producer = BatchProducer(lambda: [X[:8]], placer, True, "train", warning_for=lambda rows: f"{rows} rows")
    pipeline = InputPipeline(producer)
    with pytest.warns(UserWarning, match="8 rows"):
        assert not pipeline.is_exhausted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(pipeline)

"""Data that cannot be used, or is used badly, is reported before the first step."""

import itertools
import warnings

import jax
import keras
import numpy as np
import pytest
from support.keras_scenarios import OLDER_KERAS

import keras_dist as kd
from keras_dist._keras.data_adapters import data_adapters, makes_arrays
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


def one_cpu():
    return kd.DataParallel(devices=kd.list_devices()[:1])._placer


def new_pipeline(batches, **settings):
    return InputPipeline(BatchProducer(lambda: iter(batches), one_cpu(), True, "train", is_compiled=True, **settings))


def test_one_cpu_is_passed_the_arrays_of_a_source_that_makes_them():
    batches = [(X[:8] + number, {"y": Y[:8]}) for number in range(3)]
    for batch, passed in zip(batches, new_pipeline(batches, makes_arrays=True), strict=True):
        assert passed[0] is batch[0]
        assert passed[1]["y"] is batch[1]["y"]


def test_one_cpu_is_passed_copies_of_arrays_that_a_source_may_fill_again():
    for passed in new_pipeline([X[:8], X[8:16]]):
        assert isinstance(passed, np.ndarray)
        assert not np.shares_memory(passed, X)


@pytest.mark.parametrize("makes_arrays", [True, False])
def test_one_cpu_is_passed_arrays_on_other_devices_on_its_own(makes_arrays):
    elsewhere = [(jax.device_put(X[:8] + number, jax.devices()[1]), Y[:8]) for number in range(2)]
    for batch, (x, _) in zip(elsewhere, new_pipeline(elsewhere, makes_arrays=makes_arrays), strict=True):
        assert x.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(x, batch[0])


@pytest.mark.parametrize("makes_arrays", [True, False])
def test_text_in_the_first_batch_raises_on_one_cpu(makes_arrays):
    with pytest.raises(TypeError, match=r"\(8, 4\).*<U3"):
        next(new_pipeline([np.full((8, 4), "one")], makes_arrays=makes_arrays))


@pytest.mark.parametrize(("steps", "delivered"), [(1, [1, 2, 3, 4, 5]), (3, [3, 5, 5])])
def test_position_on_one_cpu_is_that_after_the_batches_of_an_execution(steps, delivered):
    class Counted:
        count = 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.count == 5:
                raise StopIteration
            self.count += 1
            # The batches of the second execution have no equal shapes.
            return X[: 8 if self.count < 5 else 4] + self.count

    pipeline = InputPipeline(
        BatchProducer(
            Counted,
            one_cpu(),
            True,
            "train",
            position_of=lambda source: source.count,
            steps_per_execution=steps,
            is_compiled=True,
        )
    )
    assert not pipeline.is_exhausted()
    assert (pipeline.delivered, pipeline.position) == (0, None)
    assert [(pipeline.delivered, pipeline.position) for _ in pipeline] == [(each, each) for each in delivered]
    assert pipeline.is_exhausted()


def test_no_batch_follows_when_the_pipeline_of_one_cpu_is_closed():
    pipeline = new_pipeline([X[:8]] * 3)
    next(pipeline)
    pipeline.close()
    assert list(pipeline) == []


class OfUser(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[index * 8 : index * 8 + 8]


ADAPTERS = {
    "shuffled arrays": lambda: data_adapters.ArrayDataAdapter(X, batch_size=8, shuffle=True),
    "arrays shuffled by batch": lambda: data_adapters.ArrayDataAdapter(X, batch_size=8, shuffle="batch"),
    "arrays": lambda: data_adapters.ArrayDataAdapter(X, batch_size=8),
    "tf.data": lambda: data_adapters.TFDatasetAdapter(
        pytest.importorskip("tensorflow").data.Dataset.from_tensor_slices(X).batch(8)
    ),
    "PyDataset": lambda: data_adapters.PyDatasetAdapter(OfUser(), shuffle=False),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_that_make_arrays_share_no_memory(name):
    adapter = ADAPTERS[name]()
    batches = [X, *jax.tree.leaves(list(adapter.get_jax_iterator()))]
    shares = any(np.shares_memory(*pair) for pair in itertools.combinations(batches, 2))
    assert makes_arrays(adapter) is not shares


def refilled(number):
    """Yields batches in the same arrays."""
    x, y = np.empty((8, 4), "float32"), np.ones((8, 1), "float32")
    for index in range(number):
        x[:] = index
        yield x, y


def test_a_generator_may_fill_the_same_arrays_for_each_batch():
    with kd.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x[:, :1])])
        found = model.predict(refilled(4), verbose=0)
    np.testing.assert_array_equal(found[::8, 0], range(4))


def test_arrays_are_sent_to_accelerators_before_a_source_fills_them_again(monkeypatch):
    events, distribution = [], kd.DataParallel()
    monkeypatch.setattr(distribution._placer, "is_on_cpu", False)
    monkeypatch.setattr(jax, "block_until_ready", lambda batches: events.append("sent"))

    def source():
        for index in range(3):
            events.append(index)
            yield (np.full((8, 4), index, "float32"),)

    producer = BatchProducer(source, distribution._placer, True, is_compiled=True)
    assert len(list(producer)) == 3
    assert events == [0, "sent", 1, "sent", 2, "sent"]


def test_a_generator_may_use_a_distributed_model():
    """Also for the batches that Keras reads before the first step."""
    with kd.DataParallel().scope():
        teacher, student = new_model(), new_model()

        def batches():
            while True:
                yield X, teacher.predict(X, verbose=0)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            student.fit(batches(), steps_per_epoch=3, shuffle=False, verbose=0)

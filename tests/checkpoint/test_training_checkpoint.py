"""Training that is interrupted and restarted resumes as if it had not been: the same losses, batch by batch."""

import contextlib
import json
import random
import re

import jax
import keras
import numpy as np
import pytest
from support.slow_cases import slow, slow_unless

import keras_dist as kd
from keras_dist.data.position import DataPosition, RandomState

ROWS, BATCH, EPOCHS = 96, 16, 3  # six batches an epoch
ORIGIN = np.arange(ROWS * 4, dtype="float32").reshape(ROWS, 4)
X = np.sin(ORIGIN)
Y = X.sum(1, keepdims=True)


# Keras says so where it finds the end of a source without a length.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


class Interrupted(Exception):
    pass


class Losses(keras.callbacks.Callback):
    """Records the loss after each batch, and interrupts training after some."""

    def __init__(self, after=None):
        super().__init__()
        self.after, self.losses, self.epochs, self.epoch = after, {}, {}, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if logs:
            self.losses[self.epoch, batch] = float(logs["loss"]), float(logs["mae"])
        if self.after is not None and len(self.losses) == self.after:
            raise Interrupted

    def on_epoch_end(self, epoch, logs=None):
        self.epochs[epoch] = {name: float(value) for name, value in logs.items()}


class Dataset(keras.utils.PyDataset):
    def __init__(self, read=None, length=6, **kwargs):
        super().__init__(**kwargs)
        self.read, self.length = [] if read is None else read, length

    @property
    def num_batches(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        rows = [(index * BATCH + row) % ROWS for row in range(BATCH)]
        return X[rows] + np.float32(index // 100), Y[rows]


def grain_dataset(shuffle=True):
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source([(X[row], Y[row]) for row in range(ROWS)])
    return (source.shuffle(seed=3) if shuffle else source).batch(BATCH)


def grain_loader():
    grain = pytest.importorskip("grain")
    sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=3, num_epochs=1)
    rows = [(X[row], Y[row]) for row in range(ROWS)]
    return grain.DataLoader(data_source=rows, sampler=sampler, operations=[grain.transforms.Batch(BATCH)])


def tensorflow_dataset():
    """Has another order in each epoch."""
    tensorflow = pytest.importorskip("tensorflow", reason="needs TensorFlow, the package 'tensorflow'")
    return tensorflow.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=3).batch(BATCH)


def torch_loader(has_generator):
    torch = pytest.importorskip("torch", reason="needs PyTorch, the package 'torch'")
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(3) if has_generator else None
    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(rows, BATCH, shuffle=True, generator=generator)


def generator(batches=6):
    for index in range(batches):
        rows = [(index * BATCH + row) % ROWS for row in range(BATCH)]
        yield X[rows], Y[rows]


SOURCES = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "arrays in order": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False},
    "arrays within batches": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": "batch"},
    "arrays over epochs": lambda: {"x": X, "y": Y, "batch_size": BATCH, "steps_per_epoch": 3},
    "PyDataset": lambda: {"x": Dataset()},
    "PyDataset with workers": lambda: {"x": Dataset(workers=2)},
    "PyDataset without end": lambda: {"x": Dataset(length=None), "steps_per_epoch": 5, "shuffle": False},
    "grain": lambda: {"x": grain_dataset(), "shuffle": False},
    "grain IterDataset": lambda: {"x": grain_dataset().to_iter_dataset(), "shuffle": False},
    "grain DataLoader": lambda: {"x": grain_loader(), "shuffle": False},
    "tf.data": lambda: {"x": tensorflow_dataset(), "shuffle": False},
    "tf.data over epochs": lambda: {"x": tensorflow_dataset(), "steps_per_epoch": 3, "shuffle": False},
    "torch": lambda: {"x": torch_loader(False), "shuffle": False},
    "torch with a generator": lambda: {"x": torch_loader(True), "shuffle": False},
    "generator": lambda: {"x": generator(5 * EPOCHS), "steps_per_epoch": 5, "shuffle": False},
}


def build(dropout=0.2, **compile_arguments):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **compile_arguments)
    return model


def train(directory, source, after=None, save_freq=1, callbacks=(), distribution=None, **arguments):
    """Trains a new model and returns its `Losses` and weights."""
    compile_arguments = {key: arguments.pop(key) for key in ("steps_per_execution", "run_eagerly") if key in arguments}
    losses = Losses(after)
    with (distribution or kd.DataParallel(devices=kd.list_devices()[:2])).scope():
        model = build(**compile_arguments)
        checkpoint = [] if directory is None else [kd.TrainingCheckpoint(str(directory), save_freq)]
        arguments = {"epochs": EPOCHS, "verbose": 0, **SOURCES[source](), **arguments}
        try:
            model.fit(callbacks=[*checkpoint, losses, *callbacks], **arguments)
        except Interrupted:
            checkpoint[0]._close()  # waits for the checkpoint that is being written
        return losses, [np.asarray(weight) for weight in model.get_weights()]


def assert_resumes(found, uninterrupted, at):
    """Asserts that training resumed at a batch, and from there on equals the uninterrupted run."""
    (losses, weights), (expected_losses, expected_weights) = found, uninterrupted
    assert next(iter(losses.losses)) == at
    assert losses.losses.items() <= expected_losses.losses.items()
    assert list(losses.losses)[-1] == list(expected_losses.losses)[-1]
    for epoch, logs in losses.epochs.items():
        assert logs == expected_losses.epochs[epoch]
    for weight, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize(
    "source",
    [slow_unless(name in ("generator", "tf.data"), name) for name in SOURCES],
)
def test_training_resumes_in_the_middle_of_an_epoch(source, tmp_path):
    uninterrupted = train(None, source)
    batches = list(uninterrupted[0].losses)
    after = len(batches) // 2 + 1
    train(tmp_path, source, after)
    assert_resumes(train(tmp_path, source), uninterrupted, batches[after])


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    SOURCES,
)
def test_training_resumes_after_the_last_batch_of_an_epoch(source, tmp_path):
    # The checkpoint is from the last batch, before the epoch's validation and its end; grain has no length.
    arguments = {"validation_data": (X[:16], Y[:16])}
    uninterrupted = train(None, source, **arguments)
    batches = sum(epoch == 0 for epoch, _ in uninterrupted[0].losses)
    train(tmp_path, source, after=batches, **arguments)
    found = train(tmp_path, source, **arguments)
    assert found[0].epochs == uninterrupted[0].epochs
    assert_resumes(found, uninterrupted, (0, batches - 1))  # callbacks see the end of the last batch once more


class OwnLogs(keras.Sequential):
    """Has a train step that returns what no metric contains."""

    def train_step(self, state, data):
        weights, *others = state

        def loss(weights):
            outputs, _ = self.stateless_call(weights, others[0], data[0])
            return keras.ops.mean((outputs - data[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        weights, others[1] = self.optimizer.stateless_apply(others[1], gradients, weights)
        return {"loss": value, "mae": keras.ops.sqrt(value)}, (weights, *others)


def test_an_epoch_that_resumes_after_its_last_batch_has_the_logs_of_that_batch(tmp_path):
    """Metrics do not contain those of a train step of the user."""

    def train_own(directory, after=None):
        losses = Losses(after)
        with kd.DataParallel(devices=kd.list_devices()[:2]).scope():
            keras.utils.set_random_seed(7)
            model = OwnLogs([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd")
            callbacks = [kd.TrainingCheckpoint(directory, save_freq=1), losses]
            with contextlib.suppress(Interrupted):
                model.fit(X, Y, BATCH, epochs=2, verbose=0, callbacks=callbacks)
        return losses.epochs

    uninterrupted = train_own(tmp_path / "uninterrupted")
    train_own(tmp_path / "resumed", after=6)
    assert train_own(tmp_path / "resumed") == uninterrupted
    assert list(uninterrupted[0]) == ["loss", "mae"]


@pytest.mark.parametrize("source", ["arrays", "tf.data", "torch"])
def test_training_resumes_at_the_start_of_an_epoch(source, tmp_path):
    uninterrupted = train(None, source)
    train(tmp_path, source, after=9, save_freq="epoch")
    assert_resumes(train(tmp_path, source, save_freq="epoch"), uninterrupted, (1, 0))
    nothing_to_do = train(tmp_path, source, save_freq="epoch")
    assert not nothing_to_do[0].losses
    np.testing.assert_array_equal(nothing_to_do[1][0], uninterrupted[1][0])


@pytest.mark.slow
def test_training_resumes_after_repeated_interruptions(tmp_path):
    uninterrupted, seen = train(None, "arrays"), {}
    for _ in range(4):
        losses, weights = train(tmp_path, "arrays", after=4, save_freq=3)
        seen |= losses.losses
    losses, weights = train(tmp_path, "arrays", save_freq=3)
    assert seen | losses.losses == uninterrupted[0].losses
    np.testing.assert_array_equal(weights[0], uninterrupted[1][0])


@pytest.mark.slow
def test_training_resumes_with_several_steps_per_execution(tmp_path):
    arguments: dict = {"save_freq": 2, "steps_per_execution": 2}
    uninterrupted = train(None, "arrays", **arguments)
    train(tmp_path, "arrays", after=4, **arguments)
    assert_resumes(train(tmp_path, "arrays", **arguments), uninterrupted, (1, 3))


@pytest.mark.parametrize(("save_freq", "fixes"), [slow(1, (4, 1)), (6, (8, 2)), slow(9, (12, 1))])
def test_a_checkpoint_within_an_execution_is_an_error_that_names_what_is_possible(save_freq, fixes, tmp_path):
    with pytest.raises(ValueError, match="save_freq") as error:
        train(tmp_path, "arrays", save_freq=save_freq, steps_per_execution=4)
    assert {save_freq, 4, *fixes} == set(map(int, re.findall(r"=(\d+)", str(error.value))))
    train(tmp_path / "a", "arrays", save_freq=fixes[0], steps_per_execution=4)
    train(tmp_path / "b", "arrays", save_freq=save_freq, steps_per_execution=fixes[1])


@pytest.mark.slow
@pytest.mark.parametrize("save_freq", [100, "epoch"])
@pytest.mark.parametrize("is_first", [True, False])
def test_training_resumes_after_a_callback_stopped_it_in_the_middle_of_an_epoch(is_first, save_freq, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 3

    uninterrupted = train(None, "arrays", validation_data=(X, Y))
    with kd.DataParallel(devices=kd.list_devices()[:2]).scope():
        callbacks = [Stop(), kd.TrainingCheckpoint(str(tmp_path), save_freq)][:: 1 if is_first else -1]
        data = {"x": X, "y": Y, "validation_data": (X, Y), "batch_size": BATCH, "epochs": EPOCHS}
        build().fit(**data, verbose=0, callbacks=callbacks)
    assert_resumes(train(tmp_path, "arrays", save_freq=save_freq, validation_data=(X, Y)), uninterrupted, (0, 4))


def test_a_fit_that_failed_does_not_change_the_start_of_the_next_one(tmp_path):
    train(tmp_path, "arrays", after=7, save_freq="epoch")
    with kd.DataParallel(devices=kd.list_devices()[:2]).scope():
        model, checkpoint = build(), kd.TrainingCheckpoint(str(tmp_path))
        arguments = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
        with pytest.raises(Interrupted):
            model.fit(X, Y, **arguments, callbacks=[checkpoint, Losses(after=1)])
        assert model.fit(X, Y, **arguments).epoch == [0, 1, 2]
        assert model.fit(X, Y, **arguments, callbacks=[checkpoint]).epoch == [1, 2]


def test_batches_of_a_dataset_that_are_done_are_not_read_again(tmp_path):
    dataset = Dataset()
    train(tmp_path, "PyDataset", after=9, x=dataset, shuffle=False)
    dataset.read.clear()
    train(tmp_path, "PyDataset", x=dataset, shuffle=False)
    assert [index for index in dataset.read if index < 3] == [0, 0, 1, 2]  # one is read to build; the third epoch


def test_training_resumes_under_another_strategy(tmp_path):
    strategies = [
        kd.FullyShardedDataParallel(min_shard_bytes=0),
        kd.DataParallel(shard_optimizer_state=True),
    ]
    uninterrupted = train(None, "arrays")
    seen = {}
    for strategy in strategies:
        seen |= train(tmp_path, "arrays", after=3, distribution=strategy)[0].losses
    seen |= train(tmp_path, "arrays")[0].losses
    assert list(seen) == list(uninterrupted[0].losses)
    for batch, losses in seen.items():
        np.testing.assert_allclose(losses, uninterrupted[0].losses[batch], rtol=1e-5)


def test_the_first_epoch_of_a_dataset_with_workers_has_all_batches_in_order():
    # Keras's own first epoch starts with batches that workers read to build the model, and leaves out the last ones.
    dataset, rows = Dataset(workers=2), []
    with kd.DataParallel().scope():
        model = build()
        model.train_step = lambda state, data: rows.append(np.asarray(data[0])) or ({}, state)
        model.run_eagerly = True
        model.fit(dataset, shuffle=False, verbose=0)
    np.testing.assert_allclose(np.concatenate(rows), X)


def test_positions_survive_json():
    random.seed(3)
    np.random.seed(3)
    state = DataPosition(5, RandomState.capture(), RandomState.capture(), "x", epochs_began=2, epochs_now=3, rows=8)
    again = DataPosition.from_json(json.loads(json.dumps(state.as_json())))
    assert again._replace(began=None, now=None) == (5, None, None, "x", 2, 3, 8)
    again.began.restore()
    drawn = random.random(), np.random.rand()
    state.began.restore()
    assert drawn == (random.random(), np.random.rand())


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({"save_freq": 0}, "save_freq=0"),
        ({"save_freq": "batch"}, "save_freq='batch'"),
        ({"max_to_keep": 0}, "max_to_keep=0"),
        ({"max_to_keep": "2"}, "max_to_keep='2'"),
    ],
)
def test_invalid_arguments(arguments, value, tmp_path):
    with pytest.raises(ValueError, match=value):
        kd.TrainingCheckpoint(str(tmp_path), **arguments)


@pytest.mark.parametrize("name", ["1", "001"])
def test_a_folder_with_the_name_of_a_checkpoint_is_an_error_and_stays(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("mine")
    with kd.DataParallel().scope():
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))):
            build().fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[kd.TrainingCheckpoint(tmp_path)])
        assert (tmp_path / name / "notes.txt").read_text() == "mine"
        (tmp_path / name).rename(tmp_path / "notes")
        build().fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[kd.TrainingCheckpoint(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} >= {"notes", "6"}


def test_what_is_left_of_a_deleted_checkpoint_is_no_error(tmp_path):
    (tmp_path / "3").mkdir()
    (tmp_path / "2" / "progress").mkdir(parents=True)
    with kd.DataParallel().scope():
        directory = tmp_path / "other"
        build().fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[kd.TrainingCheckpoint(directory)])
        (directory / "6").rename(tmp_path / "6")
        build().fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[kd.TrainingCheckpoint(tmp_path)])
    assert (tmp_path / "12").exists()


def test_a_run_that_a_callback_stopped_at_the_end_of_an_epoch_is_saved(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    with kd.DataParallel().scope():
        callbacks = [Stop(), kd.TrainingCheckpoint(tmp_path, save_freq=np.int64(7))]
        build().fit(X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    assert (tmp_path / "12").exists()


def test_another_model_may_be_trained_at_the_start_of_an_epoch(tmp_path):
    """It reads its own data from the beginning, and the checkpoint follows the model that it is for."""

    class Probe(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            probe.fit(X, Y, batch_size=BATCH, epochs=1, verbose=0)

    with kd.DataParallel().scope():
        probe, losses = build(), Losses()
        callbacks = [kd.TrainingCheckpoint(tmp_path, save_freq=4, max_to_keep=None), Probe(), losses]
        build().fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
    assert {int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()} == {4, 8, 12}


@pytest.mark.slow
def test_variables_that_share_a_path_resume(tmp_path):
    def part(name):
        layers = [keras.layers.Dense(8, name="up"), keras.layers.Dropout(0.2), keras.layers.Dense(1, name="down")]
        return keras.Sequential([keras.Input((4,)), *layers], name=name)

    def fit(directory, after=None):
        keras.utils.set_random_seed(7)
        with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
            model = keras.saving.load_model(tmp_path / "model.keras")  # whose paths lack the names of the inner models
            model.compile("adam", "mse", metrics=["mse", "mse"])
            paths = [variable.path for variable in model.variables]
            if paths.count("up/kernel") != 2:
                pytest.skip("a loaded model has the paths of the one that was saved since Keras 3.16")
            with contextlib.suppress(Interrupted):
                checkpoint, losses = kd.TrainingCheckpoint(str(directory), 1), Two(after)
                arguments = {"batch_size": BATCH, "epochs": 2, "verbose": 0}
                model.fit(X, [Y, 2 * Y], **arguments, callbacks=[checkpoint, losses])
            checkpoint._close()
        return losses, [np.asarray(value) for value in model.get_weights()]

    class Two(Losses):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, {**logs, "mae": logs["second_mse"]})

    inputs = keras.Input((4,))
    keras.Model(inputs, [part("first")(inputs), part("second")(inputs)]).save(tmp_path / "model.keras")
    uninterrupted = fit(tmp_path / "uninterrupted")
    fit(tmp_path / "cut", after=8)
    assert_resumes(fit(tmp_path / "cut"), uninterrupted, (1, 2))


def test_fit_without_a_distribution_raises(tmp_path):
    with pytest.raises(ValueError, match="set_distribution"):
        build().fit(X, Y, verbose=0, callbacks=[kd.TrainingCheckpoint(str(tmp_path))])


def test_a_checkpoint_of_another_model_raises(tmp_path):
    train(tmp_path, "arrays", after=1)
    with kd.DataParallel().scope():
        keras.utils.clear_session(free_memory=False)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        with pytest.raises(ValueError, match=f"{tmp_path}.*model lacks 'sequential/batch_norm"):
            model.fit(X, Y, verbose=0, callbacks=[kd.TrainingCheckpoint(str(tmp_path))])


class TaskWithPreprocessor(keras.Model):
    """A functional model that has a layer which is no part of its graph, as tasks of KerasHub have a preprocessor."""

    def __init__(self):
        inputs = keras.Input((4,))
        super().__init__(inputs, keras.layers.Dense(1, name="dense")(inputs))
        self.preprocessor = keras.layers.Dense(1, name="preprocessor")  # never called, so never built


def test_a_functional_model_with_a_preprocessor_that_is_not_built_resumes(tmp_path):
    losses = []
    with kd.DataParallel().scope():
        for epochs in (1, 2):
            keras.utils.set_random_seed(0)
            model = TaskWithPreprocessor()
            model.compile("sgd", "mse")
            callbacks = [kd.TrainingCheckpoint(tmp_path)]
            losses += model.fit(X, Y, BATCH, epochs=epochs, callbacks=callbacks, verbose=0).history["loss"]
    assert not model.preprocessor.built
    assert len(losses) == 2
    assert losses[1] < losses[0]

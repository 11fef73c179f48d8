"""Checkpoints of Keras's own Orbax callback: saved under one distribution and restored under another one."""

import pathlib

import keras
import numpy as np
import pytest
from support.new_process import run
from support.slow_cases import slow, slow_unless
from support.strategy_models import scope

import keras_dist as kd
from keras_dist.checkpoint import path_matching
from keras_dist.variables import variable_layouts

X = np.sin(np.arange(64 * 4, dtype="float32").reshape(64, 4))
Y = X.sum(1, keepdims=True)


def sequential():
    layers = [keras.Input((4,)), keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization()]
    return keras.Sequential([*layers, keras.layers.Dropout(0.1), keras.layers.Dense(8), keras.layers.Dense(1)])


def functional():
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(8)(keras.layers.Dropout(0.1)(keras.layers.Dense(16)(inputs)))
    return keras.Model(inputs, keras.layers.Dense(1)(outputs))


def nested():
    encoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="out")], name="encoder")
    decoder = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, name="out")], name="decoder")
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(1)(decoder(encoder(inputs))))


@keras.saving.register_keras_serializable("test_orbax")
class Subclass(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = keras.layers.Dense(8)
        self.rest = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.1), keras.layers.Dense(1)])

    def call(self, inputs):
        return self.rest(self.first(inputs))


def subclass():
    model = Subclass()
    model(X)
    return model


MODELS = {make.__name__: make for make in (sequential, functional, nested, subclass)}


def tensor_parallel():
    layout_map = kd.LayoutMap(kd.DeviceMesh("data:2,model:4"))
    layout_map[".*dense.*/kernel|.*out/kernel"] = ("model", None)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


STRATEGIES = {
    "data parallel": kd.DataParallel,
    "ZeRO-1": lambda: kd.DataParallel(shard_optimizer_state=True),
    "fully sharded": lambda: kd.FullyShardedDataParallel(min_shard_bytes=0),
    "tensor parallel": tensor_parallel,
    "two devices": lambda: kd.DataParallel(devices=kd.list_devices()[:2]),
}


def compiled(make, optimizer="adam"):
    model = make()
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def saved(directory, make, **arguments):
    """Trains a model under data parallelism, saves it, and returns it."""
    with kd.DataParallel().scope():
        model = compiled(make)
        callback = keras.callbacks.OrbaxCheckpoint(str(directory), **arguments)
        model.fit(X, Y, batch_size=32, epochs=2, verbose=0, callbacks=[callback])
    return model


def values(model):
    return [np.asarray(variable.value) for variable in (*model.variables, *model.optimizer.variables)]


def assert_same(model, expected):
    for value, other in zip(values(model), values(expected), strict=True):
        np.testing.assert_array_equal(value, other)


def assert_placed(model, distribution):
    variable_layouts.check_placement(model, variable_layouts.all_variables(model), distribution)
    for variable in variable_layouts.all_variables(model):
        assert len(variable.value.sharding.device_set) == distribution.device_mesh.devices.size


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_is_loaded_under_any_distribution(strategy, tmp_path):
    expected, distribution = saved(tmp_path, sequential), STRATEGIES[strategy]()
    with distribution.scope():
        loaded = keras.saving.load_model(str(tmp_path))
        assert_same(loaded, expected)
        assert_placed(loaded, distribution)
        again = compiled(sequential)
        again.load_weights(str(tmp_path))
        assert_same(again, expected)
        assert_placed(again, distribution)
        loaded.fit(X, Y, batch_size=32, verbose=0)


@pytest.mark.parametrize("make", [slow_unless(make == "subclass", make) for make in MODELS])
def test_every_kind_of_model_is_restored(make, tmp_path):
    make_model = MODELS[make]
    expected = saved(tmp_path, make_model)
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        second = compiled(make_model)  # Keras numbers its layers differently
        second.load_weights(str(tmp_path))
        assert_same(second, expected)
        loaded = keras.saving.load_model(str(tmp_path), custom_objects={"Subclass": Subclass})
        assert_same(loaded, expected)


def test_a_checkpoint_of_one_of_several_steps_is_restored(tmp_path):
    saved(tmp_path, sequential, max_to_keep=None)
    with kd.DataParallel().scope():
        model = compiled(sequential)
        model.load_weights(str(tmp_path / "0"))
        assert int(model.optimizer.iterations) == 2
        keras.saving.load_weights(model, str(tmp_path))
        assert int(model.optimizer.iterations) == 4
        with pytest.raises(ValueError, match="contains 1, 0"):
            model.load_weights(str(tmp_path / "21"))


def test_a_checkpoint_of_weights_only_is_restored(tmp_path):
    expected = saved(tmp_path, sequential, save_weights_only=True)
    with kd.DataParallel().scope():
        model = compiled(sequential, "sgd")
        model.load_weights(str(tmp_path))
        np.testing.assert_array_equal(model.predict(X, verbose=0), expected.predict(X, verbose=0))
        with pytest.raises(ValueError, match="no config"):
            keras.saving.load_model(str(tmp_path))


def deeper():
    return keras.Sequential(
        [keras.Input((4,)), *sequential().layers[:-1], keras.layers.Dense(8), keras.layers.Dense(1)]
    )


def wider():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(8)(keras.layers.Dense(17)(inputs))))


@pytest.mark.parametrize(
    ("before", "after", "optimizer", "difference"),
    [
        (sequential, deeper, "adam", "checkpoint lacks '[^']*dense[^']*/kernel"),
        slow(deeper, sequential, "adam", "model lacks '[^']*/"),
        slow(functional, wider, "adam", "model lacks 'seed_generator"),
        (sequential, sequential, "sgd", "model lacks 'adam/"),
    ],
)
def test_a_mismatch_raises_and_changes_nothing(before, after, optimizer, difference, tmp_path):
    saved(tmp_path, before)
    with kd.DataParallel().scope():
        model = compiled(after, optimizer)
        kept = [np.asarray(weight.value) for weight in model.weights]
        with pytest.raises(ValueError, match=difference):
            model.load_weights(str(tmp_path))
        for weight, value in zip(model.weights, kept, strict=True):
            np.testing.assert_array_equal(weight.value, value)


def test_skip_mismatch_restores_what_is_common(tmp_path):
    expected = saved(tmp_path, sequential)
    with kd.DataParallel().scope():
        model = compiled(sequential, "sgd")
        with pytest.warns(UserWarning, match="model lacks 'adam/"):
            model.load_weights(str(tmp_path), skip_mismatch=True)
        np.testing.assert_array_equal(model.predict(X, verbose=0), expected.predict(X, verbose=0))


@pytest.mark.slow
def test_without_a_distribution_keras_restores_nothing_into_a_renumbered_model(tmp_path):
    saved(tmp_path, sequential)
    model = compiled(sequential)
    before = np.asarray(model.weights[0].value)
    model.load_weights(str(tmp_path))  # Keras numbers its layers differently
    np.testing.assert_array_equal(model.weights[0].value, before)


def test_without_a_distribution_a_checkpoint_of_training_is_loaded(tmp_path):
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        expected = compiled(sequential)
        expected.fit(X, Y, batch_size=32, verbose=0, callbacks=[kd.TrainingCheckpoint(str(tmp_path))])
    for path in (tmp_path, tmp_path / "2"):
        model = compiled(sequential)
        model.load_weights(str(path))
        assert_same(model, expected)
        assert all(len(value.sharding.device_set) == 1 for value in (variable.value for variable in model.variables))
        again = compiled(sequential)
        keras.saving.load_weights(again, str(path))
        assert_same(again, expected)
        assert_same(keras.saving.load_model(str(path)), expected)


@keras.saving.register_keras_serializable("test_orbax")
class Vocabulary(keras.layers.Layer):
    """Has a file, as tokenizers have."""

    words = ""

    def call(self, inputs):
        return inputs

    def save_assets(self, dir_path):
        (pathlib.Path(dir_path) / "words.txt").write_text(self.words)

    def load_assets(self, dir_path):
        self.words = (pathlib.Path(dir_path) / "words.txt").read_text()


class WithoutConfig(keras.layers.Dense):
    def get_config(self):
        raise NotImplementedError


def trained(directory, layer):
    with kd.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
        model.compile("adam", "mse")
        checkpoint = kd.TrainingCheckpoint(str(directory), max_to_keep=None)
        model.fit(X, Y, batch_size=32, epochs=2, verbose=0, callbacks=[checkpoint])
    return model


def test_a_model_is_loaded_from_a_checkpoint_of_training_with_its_files(tmp_path):
    layer = Vocabulary()
    layer.words = "a b c"
    expected = trained(tmp_path, layer)
    for distribution in (None, kd.FullyShardedDataParallel(min_shard_bytes=0)):
        with scope(distribution):
            loaded = keras.saving.load_model(str(tmp_path), compile=False)
        assert loaded.layers[0].words == "a b c"
        for value, weight in zip(loaded.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_array_equal(value, weight)
    (tmp_path / "4" / "progress" / "model.json").write_text("{")
    with pytest.warns(UserWarning, match="model.json"):
        loaded = keras.saving.load_model(str(tmp_path))
    assert int(loaded.optimizer.iterations) == 2


def test_a_model_that_cannot_be_serialized_is_trained_and_not_loaded(tmp_path):
    expected = trained(tmp_path, WithoutConfig(4))
    with pytest.raises(ValueError, match="get_config"):
        keras.saving.load_model(str(tmp_path))
    model = keras.Sequential([keras.Input((4,)), WithoutConfig(4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.load_weights(str(tmp_path))
    assert_same(model, expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_new_process_loads_a_checkpoint_of_training_without_a_distribution(num_devices, tmp_path):
    model = trained(tmp_path, keras.layers.Dense(8, "gelu"))
    with kd.DataParallel().scope():
        expected = model.predict(X, verbose=0).sum()
    code = f"""
import keras, numpy
import keras_dist
x = numpy.sin(numpy.arange(64 * 4, dtype="float32").reshape(64, 4))
for path in ({str(tmp_path)!r}, {str(tmp_path / "4")!r}):
    for model in (keras.saving.load_model(path), keras.models.load_model(path)):
        print(model.predict(x, verbose=0).sum(), int(model.optimizer.iterations))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "gelu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.load_weights(path)
    print(model.predict(x, verbose=0).sum(), int(model.optimizer.iterations))
"""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    done = run(code, KERAS_BACKEND="jax", XLA_FLAGS=flags, NPROC="16")
    assert done.returncode == 0, done.stderr
    printed = [float(each) for each in done.stdout.split()]
    np.testing.assert_allclose(printed, 6 * [expected, 4], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 3])
def test_plain_keras_loads_a_checkpoint_of_training_on_other_devices(num_devices, tmp_path):
    code = """
import keras, numpy, sys
keras.utils.set_random_seed(7)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "gelu"), keras.layers.Dense(4)])
model.compile("adam", "mse")
x = numpy.arange(8 * 16).reshape(16, 8) / 100
"""
    saved = (
        "import keras_dist as kd\nkd.set_distribution(kd.FullyShardedDataParallel(min_shard_bytes=0))\n"
        + code
        + f"""
model.fit(x, x[:, :4], epochs=2, verbose=0, callbacks=[kd.TrainingCheckpoint({str(tmp_path)!r})])
print(model.predict(x, verbose=0).sum(), int(model.optimizer.iterations))
"""
    )
    loaded = (
        code
        + f"""
assert "keras_dist" not in sys.modules
model.load_weights({str(tmp_path)!r})
print(model.predict(x, verbose=0).sum(), int(model.optimizer.iterations))
"""
    )
    printed = []
    for program, devices in ((saved, 4), (loaded, num_devices)):
        flags = f"--xla_force_host_platform_device_count={devices}"
        done = run(program, KERAS_BACKEND="jax", XLA_FLAGS=flags, NPROC="16")
        assert done.returncode == 0, done.stderr
        printed.append([float(each) for each in done.stdout.split()[-2:]])
    np.testing.assert_allclose(*printed, rtol=1e-5)


def test_a_relative_path_is_that_of_the_working_directory(tmp_path, monkeypatch):
    expected = saved(tmp_path / "saved", sequential)
    monkeypatch.chdir(tmp_path)
    with kd.DataParallel().scope():
        for path in ("saved", "saved/1", "saved/1/"):
            model = compiled(sequential)
            model.load_weights(path)
            assert_same(model, expected)


@pytest.mark.slow
def test_saving_in_the_background_writes_the_state_of_its_step(tmp_path):
    copies = []

    class Copy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            copies.append([np.array(weight) for weight in self.model.get_weights()])

    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(2048), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        rows = np.ones((48, 512), "float32")
        checkpoint = keras.callbacks.OrbaxCheckpoint(str(tmp_path), save_freq=1, max_to_keep=None)
        model.fit(rows, rows[:, :1], batch_size=8, verbose=0, callbacks=[checkpoint, Copy()])
        for step, weights in enumerate(copies, start=1):
            model.load_weights(str(tmp_path / str(step)))
            for weight, expected in zip(model.get_weights(), weights, strict=True):
                np.testing.assert_array_equal(weight, expected)


# ---------------------------------------------------------------------------------------------------------- paths


def test_overlapping_numbers_are_matched_in_order():
    saved = ["dense/kernel", "dense_1/kernel", "dense_10/kernel", "dense_2/kernel"]
    paths = ["dense_2/kernel", "dense_3/kernel", "dense_4/kernel", "dense_12/kernel"]
    matching = path_matching.match_weights(saved, paths, [f"functional/{path}" for path in paths], {"dense"})
    assert matching.pairs == {0: "dense/kernel", 1: "dense_1/kernel", 2: "dense_2/kernel", 3: "dense_10/kernel"}


def test_numbers_in_names_that_users_gave_must_be_equal():
    saved, paths = ["block_1/kernel", "block_2/kernel"], ["block_2/kernel", "block_3/kernel"]
    matching = path_matching.match_weights(saved, paths, paths, {"dense"})
    assert matching.missing == [1]
    assert matching.unexpected == ["block_1/kernel"]


def test_optimizer_variables_are_matched_by_their_weights():
    weights = [("dense/kernel", "sequential/dense/kernel")]
    saved = ["adam/iteration", "adam/sequential_dense_kernel_momentum"]
    matching = path_matching.match_optimizer(saved, ["adam_1/iteration", "adam_1/dense_kernel_momentum"], weights)
    assert matching.pairs == dict(enumerate(saved))


def test_saved_paths_are_unique():
    paths = ["dense/kernel", "dense/kernel", "seed/seed_generator_state", "seed/seed_generator_state", "dense/bias"]
    owners = ["m/a/dense/kernel", "m/b/dense/kernel", "m/a/seed_generator_state", "m/b/seed_generator_state", "m/bias"]
    saved = path_matching.unique_weight_paths(paths, owners)
    assert saved == [*owners[:2], paths[2], f"{paths[2]}~1", "dense/bias"]
    weights = list(zip(paths, saved, strict=True))
    variables = [
        "adam/iteration",
        "adam/dense_kernel_momentum",
        "adam/dense_kernel_momentum",
        "adam/dense_bias_momentum",
    ]
    names = path_matching.optimizer_paths(variables, weights)
    assert names == ["adam/iteration", "adam/m_a_dense_kernel_momentum", "adam/m_b_dense_kernel_momentum", variables[3]]
    assert path_matching.match_optimizer(names, variables, weights).pairs == dict(enumerate(names))

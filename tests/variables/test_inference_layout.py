"""`kd.inference_layout`: what moves to the layout of a block, what comes back, and what is refused."""

import weakref

import jax
import keras
import numpy as np
import pytest
from support.compilations import counted_compilations
from support.keras_scenarios import (
    X,
    Y,
    assert_same_numbers,
    dense_model,
    fit,
    model_parallel,
    shard_shape,
    start_anew,
)
from support.slow_cases import slow
from support.strategy_models import has_layouts_of

import keras_dist as kd
from keras_dist._keras import training_state

RULES = {".*a/kernel": (None, "model"), ".*a/bias": ("model",)}


def trained_model(optimizer="adam"):
    start_anew()
    kd.set_distribution(kd.FullyShardedDataParallel(min_shard_bytes=0))
    model = dense_model(optimizer)
    fit(model)
    return model


def state(model):
    """Values and shardings of weights and optimizer state."""
    return [(v.path, np.asarray(v), v.value.sharding) for v in [*model.variables, *model.optimizer.variables]]


def assert_same_state(model, before):
    for (path, value, sharding), (_, old, old_sharding) in zip(state(model), before, strict=True):
        np.testing.assert_array_equal(value, old, err_msg=path)
        assert sharding.is_equivalent_to(old_sharding, value.ndim), path


@pytest.mark.parametrize("keep", [True, False])
def test_weights_move_and_come_back(keep):
    model, training, inference = trained_model(), kd.distribution(), model_parallel(kd, RULES)
    before, expected = state(model), model.predict(X, verbose=0)
    weights = [variable.value for variable in model.weights]
    slots = [variable.value for variable in model.optimizer.variables]
    with kd.inference_layout(model, inference, keep=keep) as same:
        assert same is model
        assert kd.distribution() is inference
        assert shard_shape(model.weights[0]) == (4, 2)
        assert has_layouts_of(inference, model.weights)
        assert all(v.value is value for v, value in zip(model.optimizer.variables, slots, strict=True))
        assert_same_numbers(model(X[:8]), expected[:8])
    assert kd.distribution() is training
    assert all((v.value is value) == keep for v, value in zip(model.weights, weights, strict=True))
    assert_same_state(model, before)
    assert_same_numbers(fit(model), fit(trained_model()))


def test_predict_and_evaluate_in_the_block():
    model, inference, compiled = trained_model(), model_parallel(kd, RULES), []
    before, expected = state(model), [model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)]
    for _ in range(3):
        with counted_compilations() as found, kd.inference_layout(model, inference):
            assert_same_numbers([model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)], expected)
        assert_same_state(model, before)
        compiled.append(len(found))
    assert compiled[1:] == [0, 0]
    placement = {variable.value.sharding.mesh for variable in model.metrics_variables}
    assert placement == {kd.distribution().device_mesh.backend_mesh}


def test_arrays_are_not_held_twice(monkeypatch):
    model = trained_model()
    before = [weakref.ref(variable.value) for variable in model.weights]
    copied = []
    original = training_state.own_copy
    monkeypatch.setattr(training_state, "own_copy", lambda array: copied.append(array) or original(array))
    with kd.inference_layout(model, model_parallel(kd, RULES), keep=False):
        assert [reference() for reference in before] == [None] * len(before)
        model.predict(X, verbose=0)
    assert not copied  # as steps do with arrays to which something refers


def test_what_the_block_assigns_is_kept():
    model = trained_model()
    before = state(model)
    with kd.inference_layout(model, model_parallel(kd, RULES)):
        model.layers[0].kernel.assign(np.ones((4, 8)))
    np.testing.assert_array_equal(np.asarray(model.layers[0].kernel), np.ones((4, 8)))
    assert shard_shape(model.layers[0].kernel) == (4, 1)
    assert_same_state(
        model, [(path, value if "a/kernel" not in path else np.ones((4, 8)), s) for path, value, s in before]
    )


def test_an_exception_in_the_block():
    model, training = trained_model(), kd.distribution()
    before = state(model)

    class Failing(keras.callbacks.Callback):
        def on_predict_batch_begin(self, batch, logs=None):
            if batch:
                raise KeyError("from the block")

    with pytest.raises(KeyError, match="from the block"), kd.inference_layout(model, model_parallel(kd, RULES)):
        model.predict(X, batch_size=8, verbose=0, callbacks=[Failing()])  # while the model runs
    assert kd.distribution() is training
    assert_same_state(model, before)
    assert np.isfinite(fit(model)).all()


def test_a_move_that_fails_moves_back(monkeypatch):
    model = trained_model()
    before = state(model)
    original, calls = jax.make_array_from_single_device_arrays, []

    def fail_later(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return original(*args, **kwargs)

    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", fail_later)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"), kd.inference_layout(model, model_parallel(kd, RULES)):
        pytest.fail("entered")
    assert_same_state(model, before)
    assert np.isfinite(fit(model)).all()


def test_training_in_the_block_is_refused():
    model = trained_model()
    before = state(model)
    with kd.inference_layout(model, model_parallel(kd, RULES)):
        for train in (fit, lambda model: model.train_on_batch(X, Y)):
            with pytest.raises(ValueError, match=r"Cannot train 'sequential'.*End the block"):
                train(model)
        with pytest.raises(ValueError, match="Cannot redistribute 'sequential'"):
            kd.redistribute(model)
        with pytest.raises(ValueError, match=r"'sequential' is in a block.*End that block"):
            kd.inference_layout(model, kd.DataParallel())
    assert_same_state(model, before)
    with kd.inference_layout(model, kd.DataParallel()):  # one after the other
        assert shard_shape(model.weights[0]) == (4, 8)
    assert np.isfinite(fit(model)).all()


def test_wrong_arguments():
    model = trained_model()
    with pytest.raises(TypeError, match="Keras model"):
        kd.inference_layout(keras.layers.Dense(2), kd.DataParallel())
    with pytest.raises(TypeError, match="the class DataParallel"):
        kd.inference_layout(model, kd.DataParallel)
    with pytest.raises(ValueError, match="No variable of 'unbuilt'"):
        kd.inference_layout(keras.Sequential([keras.layers.Dense(2)], name="unbuilt"), kd.DataParallel())
    before = state(model)
    with (
        pytest.raises(ValueError, match="b/kernel"),
        kd.inference_layout(model, model_parallel(kd, {".*b/kernel": (None, "model")})),
    ):
        pytest.fail("entered")
    assert_same_state(model, before)


def test_tied_variables_stay_tied():
    model = trained_model()
    first, second = keras.layers.Dense(8, name="c"), keras.layers.Dense(8, name="d")
    model = keras.Sequential([keras.Input((8,)), first, second])
    second.kernel._value = first.kernel._value
    array = first.kernel.value
    with kd.inference_layout(model, model_parallel(kd, {".*(c|d)/kernel": (None, "model")})):
        assert first.kernel.value is second.kernel.value
        assert shard_shape(first.kernel) == (8, 2)
    assert first.kernel.value is second.kernel.value is array


def test_variables_that_the_block_creates():
    model, training = trained_model(optimizer="sgd"), kd.distribution()
    with kd.inference_layout(model, model_parallel(kd, RULES)):
        model.layers[0].enable_lora(2)
        model.compile("adam", "mse", metrics=["mae"])
        model.evaluate(X, Y, verbose=0)
    assert has_layouts_of(training, model.weights)
    assert np.isfinite(fit(model)).all()


@pytest.mark.parametrize("max_bytes", ["1GB", slow(0), -1, True, slow(1e9), slow(None)])
def test_max_bytes_that_are_no_number_of_bytes(max_bytes):
    model = trained_model()
    with pytest.raises(ValueError, match=rf"max_bytes={max_bytes!r} must be a positive integer"):
        kd.inference_layout(model, model_parallel(kd, RULES), max_bytes=max_bytes)
    with kd.inference_layout(model, model_parallel(kd, RULES), max_bytes=1):  # less than any shard
        assert shard_shape(model.weights[0]) == (4, 2)


def test_a_block_for_a_part_of_the_model_that_trains():
    def part_and_model():
        part = trained_model()
        model = keras.Sequential([keras.Input((4,)), part, keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("adam", "mse")
        return part, model

    def generate(batch, logs=None):
        with kd.inference_layout(part, model_parallel(kd, RULES)):
            assert shard_shape(part.weights[0]) == (4, 2)
            predictions.append(part.predict(X, verbose=0))

    predictions, (_, plain) = [], part_and_model()
    expected = fit(plain, epochs=2)
    part, model = part_and_model()
    callback = keras.callbacks.Callback()
    callback.on_train_batch_end = generate
    assert_same_numbers(fit(model, epochs=2, callbacks=[callback]), expected)
    assert_same_numbers(predictions[-1], part.predict(X, verbose=0))
    assert len(predictions) > 2


@pytest.mark.parametrize("moment", ["on_epoch_end", "on_train_batch_end"])
def test_a_block_in_the_middle_of_fit(moment):
    inference, blocks = model_parallel(kd, RULES), []

    def use_block(*args, **kwargs):
        with counted_compilations() as found, kd.inference_layout(callback.model, inference):
            assert shard_shape(callback.model.weights[0]) == (4, 2)
            callback.model.predict(X, verbose=0)
        blocks.append(len(found))

    callback = keras.callbacks.Callback()
    setattr(callback, moment, use_block)
    expected = fit(trained_model(), epochs=3)
    model = trained_model()
    assert_same_numbers(fit(model, epochs=3, callbacks=[callback]), expected)
    assert len(blocks) >= 3
    assert set(blocks[1:]) == {0}

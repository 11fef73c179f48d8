"""A data source that fails in the middle of a run: `keras.distribution` loses the weights, keras_dist keeps them."""

import jax
import keras
import numpy as np
import pytest
from support.keras_scenarios import (
    KERAS,
    X,
    Y,
    assert_same_numbers,
    dense_model,
    model_parallel,
    run,
    shard_shape,
    start_anew,
)

import keras_dist as kd

BEGINNINGS = {"fit": "on_train_begin", "evaluate": "on_test_begin", "predict": "on_predict_begin"}
verbs = pytest.mark.parametrize("verb", BEGINNINGS)


class Fragile(keras.utils.PyDataset):
    """Two batches of 8 rows, until it breaks."""

    def __init__(self):
        super().__init__()
        self.breaks_at = None

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if self.breaks_at is not None and index >= self.breaks_at:
            raise OSError("no such file")
        rows = slice(8 * index, 8 * index + 8)
        return X[rows], Y[rows]


def fail(model, source, verb, breaks_at=0):
    """Runs fit, evaluate or predict on a source that breaks at a batch after the run has begun, then mends it."""

    def break_source(logs=None):
        source.breaks_at = breaks_at

    callback = keras.callbacks.Callback()
    setattr(callback, BEGINNINGS[verb], break_source)
    order = {"shuffle": False} if verb == "fit" else {}
    with pytest.raises(OSError, match="no such file"):
        getattr(model, verb)(source, verbose=0, callbacks=[callback], **order)
    source.breaks_at = None


def train(model, source):
    """The losses of one fit."""
    return model.fit(source, shuffle=False, verbose=0).history["loss"]


def values(model):
    """The values of everything that training changes."""
    return model.get_weights(), [np.asarray(variable) for variable in model.optimizer.variables]


@verbs
def test_a_failure_at_the_first_batch_loses_no_weights(verb):
    def before_and_after(api):
        source = Fragile()
        with api.DataParallel().scope():
            model = dense_model("adam")
            train(model, source)
            before = values(model)
            fail(model, source, verb)
            return before, values(model)

    with pytest.raises(TypeError, match="not callable"):  # a variable without a value asks for its initializer
        before_and_after(KERAS)
    before, after = before_and_after(kd)
    jax.tree.map(np.testing.assert_array_equal, after, before)


@verbs
@pytest.mark.parametrize("breaks_at", [0, 1])
def test_training_continues_after_a_failure(verb, breaks_at):
    def use(model, fails):
        source = Fragile()
        losses = train(model, source)
        if fails:
            fail(model, source, verb, breaks_at)
        elif verb == "fit" and breaks_at:
            model.fit(X[:8], Y[:8], verbose=0)  # the batch that came before the failure is learned
        return losses + train(model, source)

    assert_same_numbers(run(kd, lambda model: use(model, True)), run(None, lambda model: use(model, False)))


@verbs
@pytest.mark.parametrize("breaks_at", [0, 1])
def test_a_failure_keeps_the_layout_of_weights(verb, breaks_at):
    start_anew()
    with model_parallel(kd, {".*a/kernel": (None, "model")}).scope():
        model, source = dense_model("adam"), Fragile()
        train(model, source)
        fail(model, source, verb, breaks_at)
        assert shard_shape(model.weights[0]) == (4, 2)


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("breaks_at", [0, 1])
def test_weights_set_after_a_failure_are_used(verb, breaks_at):
    source = Fragile()
    with kd.DataParallel().scope():
        model = dense_model()
        train(model, source)
        fail(model, source, verb, breaks_at)
        model.set_weights([np.full(variable.shape, 0.5, "float32") for variable in model.weights])
        model.evaluate(source, verbose=0)
        assert {value for weight in model.get_weights() for value in np.ravel(weight)} == {0.5}


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("breaks_at", [0, 1])
def test_a_model_is_redistributed_after_a_failure(verb, breaks_at):
    source = Fragile()
    with kd.DataParallel().scope():
        model = dense_model()
        train(model, source)
        fail(model, source, verb, breaks_at)
        kd.redistribute(model, model_parallel(kd, {".*a/kernel": (None, "model")}))
    assert shard_shape(model.weights[0]) == (4, 2)


def test_a_batch_with_another_shape_loses_no_weights():
    def before_and_after(api):
        with api.DataParallel().scope():
            model = dense_model("adam")
            train(model, Fragile())
            before = values(model)
            with pytest.raises(ValueError, match="incompatible with the layer"):
                model.fit(X[:, :3], Y, verbose=0)
            return before, values(model)

    with pytest.raises(TypeError, match="not callable"):
        before_and_after(KERAS)
    before, after = before_and_after(kd)
    jax.tree.map(np.testing.assert_array_equal, after, before)

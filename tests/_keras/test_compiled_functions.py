"""A model that moves between distributions and back has the functions that it had there."""

import keras
import numpy as np
import pytest
from support.compilations import counted_compilations
from support.keras_scenarios import X, Y, assert_same_numbers, dense_model, fit, model_parallel, start_anew

import keras_dist as kd

RULES = {".*a/kernel": (None, "model")}


def rounds(distributions, count, between=lambda model: None):
    """Losses of a model that moves between distributions, and how many programs each round compiles."""
    model, losses, compiled = dense_model("adam"), [], []
    for _ in range(count):
        with counted_compilations() as found:
            for distribution in distributions:
                kd.set_distribution(distribution)
                kd.redistribute(model)
                losses += fit(model)
                losses.append(model.evaluate(X, Y, verbose=0))
        between(model)
        compiled.append(len(found))
    return losses, compiled


@pytest.mark.slow
def test_functions_are_compiled_once_for_each_distribution():
    start_anew()
    expected, _ = rounds([None], 6)
    start_anew()
    losses, compiled = rounds([kd.FullyShardedDataParallel(min_shard_bytes=0), model_parallel(kd, RULES)], 3)
    assert compiled[0] > compiled[1]  # the second one moves from the last to the first
    assert compiled[2] == 0
    assert_same_numbers(losses, expected)


def test_functions_are_kept_for_no_distribution():
    start_anew()
    _, compiled = rounds([None, kd.DataParallel()], 3)
    assert compiled[1:] == [0, 0]


def recompiled(model):
    model.compile("sgd", "mae")


def rules_changed(model):
    DISTRIBUTIONS[1]._layout_map[".*b/kernel"] = ("model", None)


DISTRIBUTIONS = []


@pytest.mark.parametrize("change", [recompiled, rules_changed])
def test_functions_are_compiled_anew_for_what_has_changed(change):
    start_anew()
    DISTRIBUTIONS[:] = kd.DataParallel(), model_parallel(kd, RULES)
    first, second = DISTRIBUTIONS
    model = dense_model()
    for distribution in (first, second, first):
        kd.set_distribution(distribution)
        fit(kd.redistribute(model))
    kd.set_distribution(second)
    change(model)
    with counted_compilations() as found:
        losses = fit(kd.redistribute(model))
    assert found
    assert np.isfinite(losses).all()


def test_functions_of_few_distributions_are_kept():
    model = dense_model()
    for _ in range(6):
        kd.set_distribution(kd.DataParallel())
        kd.redistribute(model)
        model.predict(X, verbose=0)
    assert len(vars(model)["_functions_by_distribution"]) == 4


def test_a_callback_moves_a_model_there_and_back():
    distributions = [kd.DataParallel(), model_parallel(kd, RULES)]

    class Alternating(keras.callbacks.Callback):
        compiled = ()

        def on_epoch_begin(self, epoch, logs=None):
            self.counting = counted_compilations()
            self.found = self.counting.__enter__()
            kd.set_distribution(distributions[epoch % 2])
            kd.redistribute(self.model)

        def on_epoch_end(self, epoch, logs=None):
            self.counting.__exit__(None, None, None)
            self.compiled = (*self.compiled, len(self.found))

    start_anew()
    expected = fit(dense_model("adam"), epochs=6)
    start_anew()
    kd.set_distribution(distributions[0])
    callback = Alternating()
    losses = fit(dense_model("adam"), epochs=6, callbacks=[callback])
    assert callback.compiled[2:] == (0, 0, 0, 0)
    assert_same_numbers(losses, expected)


def test_a_function_that_the_user_puts_around_a_step_is_kept():
    start_anew()
    kd.set_distribution(kd.DataParallel())
    model, calls = dense_model("sgd"), []
    step = model.make_train_function() or model.train_function

    def counted(state, iterator):
        calls.append(None)
        return step(state, iterator)

    model.train_function = counted
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert len(calls) == 2 * -(-len(X) // 8)
    model.make_train_function(force=True)
    assert model.train_function is not counted

"""Distributions that are set late, changed or removed, and `redistribute`, which moves a model between them."""

import threading
import warnings

import jax
import keras
import numpy as np
import pytest
from support.keras_scenarios import (
    DEVICES,
    KERAS,
    X,
    Y,
    assert_same_numbers,
    dense_model,
    devices_of,
    fit,
    model_parallel,
    shard_shape,
    start_anew,
)
from support.slow_cases import crossed, slow

import keras_dist as kd

CALLS = {
    "fit": fit,
    "evaluate": lambda model, **kwargs: model.evaluate(X, Y, verbose=0, **kwargs),
    "predict": lambda model, **kwargs: model.predict(X, verbose=0, **kwargs),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def on_one_device(*uses, build=dense_model):
    """What each of several uses of one model returns on one device."""
    start_anew()
    model = build()
    return [use(model) for use in uses]


def raises_misplaced():
    """Expects the error for variables that are not placed as the active distribution places them."""
    return pytest.raises(ValueError, match=r"'sequential' was not built.*redistribute\(model\)")


def redistributed_after_an_error(late, call, first):
    """A model that was built too early, on which Keras fails, and which keras_dist asks to redistribute."""
    with pytest.raises(ValueError, match="incompatible devices"):
        call(late(KERAS))
    model = late(kd)
    with raises_misplaced() as error:
        call(model)
    assert f"'{first}', is on cpu:0." in str(error.value)
    assert kd.redistribute(model) is model
    return model


def losses_on_one_device(fits, build=dense_model):
    """The losses of several fits of one model on one device."""
    return [loss for losses in on_one_device(*[fit] * fits, build=build) for loss in losses]


# ------------------------------------------------------------------------------- built before the distribution came


@pytest.mark.slow
@calls
def test_a_model_built_before_the_distribution(call):
    def late(api):
        start_anew()
        model = dense_model()
        api.set_distribution(api.DataParallel())
        return model

    model = redistributed_after_an_error(late, call, "sequential/a/kernel")
    assert_same_numbers([call(model), fit(model)], on_one_device(call, fit))
    assert all(len(devices_of(variable)) == DEVICES for variable in model.weights)


@pytest.mark.slow
@calls
def test_a_model_trained_before_the_distribution(call):
    start_anew()
    model = dense_model("adam")
    first = fit(model)
    kd.set_distribution(kd.DataParallel())
    with raises_misplaced():
        call(model)
    kd.redistribute(model)
    results = [first, call(model), fit(model)]
    assert_same_numbers(results, on_one_device(fit, call, fit, build=lambda: dense_model("adam")))


@pytest.mark.filterwarnings("ignore:Detected a mix of local")
def test_an_optimizer_made_before_the_distribution():
    def late(api):
        start_anew()
        optimizer = keras.optimizers.Adam()
        api.set_distribution(api.DataParallel())
        return dense_model(optimizer)

    model = redistributed_after_an_error(late, fit, "adam/iteration")
    assert_same_numbers([fit(model)], on_one_device(fit, build=lambda: dense_model("adam")))


# -------------------------------------------------------------------------------- another distribution between fits

BY_COLUMNS, BY_ROWS = {".*a/kernel": (None, "model")}, {".*a/kernel": ("model", None)}
CHANGES = {
    "other rules": (lambda api: model_parallel(api, BY_ROWS), (1, 8)),
    "other mesh": (lambda api: model_parallel(api, BY_COLUMNS, (4, 2)), (4, 4)),
    "no rules": (lambda api: model_parallel(api), (4, 8)),
}


@pytest.mark.parametrize(("change", "optimizer"), crossed(CHANGES, ["sgd", "adam"]))
def test_another_distribution_between_fits(change, optimizer):
    second, shape = CHANGES[change]

    def train_twice(api, between):
        start_anew()
        api.set_distribution(model_parallel(api, BY_COLUMNS))
        model = dense_model(optimizer)
        losses = fit(model)
        assert shard_shape(model.weights[0]) == (4, 2)
        api.set_distribution(second(api))
        between(model)
        return model, losses + fit(model)

    model, _ = train_twice(KERAS, lambda model: None)
    assert shard_shape(model.weights[0]) == (4, 2)  # as the first distribution said, in silence
    with raises_misplaced() as error:
        train_twice(kd, lambda model: None)
    assert "'sequential/a/kernel', has layout (None, 'model')" in str(error.value)
    model, losses = train_twice(kd, kd.redistribute)
    assert shard_shape(model.weights[0]) == shape
    assert_same_numbers(losses, losses_on_one_device(2, lambda: dense_model(optimizer)))


def test_a_rule_that_is_added_after_the_model_is_made():
    start_anew()
    distribution = model_parallel(kd, {})
    kd.set_distribution(distribution)
    model = dense_model("adam")
    distribution._layout_map["a/kernel"] = (None, "model")
    with raises_misplaced() as error:
        fit(model)
    assert "'sequential/a/kernel', has layout (None, None) from the rules before they changed" in str(error.value)
    row = next(v for v in kd.explain(model).variables if v.path.endswith("a/kernel"))
    assert (row.axes, row.rule) == ((None, None), "a/kernel")
    assert row.why == "layout from before the rules changed; call redistribute(model)"
    losses = fit(kd.redistribute(model))
    assert shard_shape(model.weights[0]) == (4, 2)
    assert_same_numbers(losses, losses_on_one_device(1, lambda: dense_model("adam")))


def test_fewer_devices_between_fits():
    def train_twice(api, between):
        start_anew()
        api.set_distribution(api.DataParallel())
        model = dense_model()
        losses = fit(model)
        api.set_distribution(api.DataParallel(devices=api.list_devices()[:4]))
        between(model)
        return model, losses + fit(model)

    with pytest.raises(ValueError, match="incompatible devices"):
        train_twice(KERAS, lambda model: None)
    with raises_misplaced() as error:
        train_twice(kd, lambda model: None)
    assert "is on cpu:0, cpu:1, cpu:2, cpu:3 and 4 more." in str(error.value)
    model, losses = train_twice(kd, kd.redistribute)
    assert {device.id for device in devices_of(model.weights[0])} == {0, 1, 2, 3}
    assert_same_numbers(losses, losses_on_one_device(2))


def test_an_equal_distribution_between_fits_is_no_other_one():
    start_anew()
    kd.set_distribution(model_parallel(kd, BY_COLUMNS))
    model = dense_model()
    losses = fit(model)
    kd.set_distribution(model_parallel(kd, BY_COLUMNS))
    assert_same_numbers(losses + fit(model), losses_on_one_device(2))
    assert shard_shape(model.weights[0]) == (4, 2)


# ------------------------------------------------------------------------------- clear_session() and other threads


def test_clear_session_keeps_the_distribution():
    def after_clear_session(api):
        installed = api.DataParallel()
        api.set_distribution(installed)
        keras.utils.clear_session()
        return api.distribution() is installed, len(devices_of(dense_model().weights[0]))

    assert after_clear_session(KERAS) == (False, 1)
    assert after_clear_session(kd) == (True, DEVICES)


def in_a_thread(function):
    """What a function returns in a thread of its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_other_threads_see_the_distribution():
    def seen_elsewhere(api):
        installed = api.DataParallel()
        api.set_distribution(installed)
        return in_a_thread(lambda: (api.distribution() is installed, len(devices_of(dense_model().weights[0]))))

    assert seen_elsewhere(KERAS) == (False, 1)
    assert seen_elsewhere(kd) == (True, DEVICES)


def test_a_model_trains_in_another_thread_as_on_one_device():
    def train_elsewhere(api):
        start_anew()
        api.set_distribution(api.DataParallel())
        model = dense_model()
        return in_a_thread(lambda: fit(model))

    assert_same_numbers(train_elsewhere(kd), losses_on_one_device(1))


# ------------------------------------------------------------------------------------- trained outside of the scope


@pytest.mark.parametrize(
    "call", [CALLS["fit"], slow(CALLS["evaluate"]), slow(CALLS["predict"])], ids=["fit", "evaluate", "predict"]
)
def test_training_outside_of_the_scope_warns(call):
    def outside(api):
        start_anew()
        with api.DataParallel().scope():
            model = dense_model()
        return call(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        outside(KERAS)  # in silence: every device computes all rows
    with pytest.warns(UserWarning, match=r"'sequential'.*<DataParallel"):
        result = outside(kd)
    assert_same_numbers([result], on_one_device(call))


def test_training_inside_of_the_scope_or_brought_back_warns_of_nothing():
    start_anew()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        distribution = kd.DataParallel()
        with distribution.scope():
            model = dense_model()
            losses = fit(model)
        with distribution.scope():
            losses += fit(model)
        losses += fit(kd.redistribute(model))
    assert devices_of(model.weights[0]) == {jax.devices()[0]}
    assert_same_numbers(losses, losses_on_one_device(3))


# --------------------------------------------------------------------------------------------- what redistribute moves


def rich_model():
    """A model with all that a step takes: weights, slots, metrics, moving averages, random state."""
    layers = [
        keras.layers.Dense(8, name="a"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1, name="b"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()])
    return model


def all_variables(model):
    """Everything that a train step takes, each once."""
    return [*model.variables, *model.metrics_variables, *model.optimizer.variables]


def values(model):
    return [np.asarray(variable) for variable in all_variables(model)]


RULES = {".*a/kernel": (None, "model"), ".*a/bias": ("model",), ".*norm/(gamma|moving_mean)": ("data",)}


def test_redistribute_moves_everything_and_changes_no_value():
    start_anew()
    model = rich_model()
    first = fit(model)
    before = values(model)
    kd.set_distribution(model_parallel(kd, RULES))
    kd.redistribute(model)
    for after, value in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(after, value)
    assert {len(devices_of(variable)) for variable in all_variables(model)} == {DEVICES}
    paths = {variable.path.split("/")[-1]: variable for variable in all_variables(model)}
    assert {"seed_generator_state", "moving_mean", "learning_rate", "total"} <= set(paths)
    second = fit(model)

    kd.set_distribution(None)
    before = values(model)
    kd.redistribute(model)
    for after, value in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(after, value)
    assert {device for variable in all_variables(model) for device in devices_of(variable)} == {jax.devices()[0]}
    assert_same_numbers([first, second, fit(model)], on_one_device(fit, fit, fit, build=rich_model))


OPTIMIZERS = {
    "sgd with momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(amsgrad=True),
    "adafactor": keras.optimizers.Adafactor,  # has slots of other shapes than their variable
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "accumulation": lambda: keras.optimizers.SGD(0.01, gradient_accumulation_steps=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_lie_as_if_the_model_had_been_made_there(name):
    def build():
        return dense_model(OPTIMIZERS[name]())

    rules = {".*a/kernel": (None, "model"), ".*a/bias": ("model",)}
    start_anew()
    moved = build()
    losses = fit(moved)
    kd.set_distribution(model_parallel(kd, rules))
    kd.redistribute(moved)
    keras.utils.clear_session(free_memory=False)
    made = build()
    fit(made)
    for there, here in zip(all_variables(moved), all_variables(made), strict=True):
        assert there.path == here.path
        assert there.value.sharding.is_equivalent_to(here.value.sharding, len(there.shape)), there.path
    assert_same_numbers([losses, fit(moved)], on_one_device(fit, fit, build=build))


def test_each_slot_lies_like_its_variable():
    kd.set_distribution(None)
    model = dense_model("adam")
    fit(model)
    kd.redistribute(model, model_parallel(kd, {".*a/kernel": (None, "model"), ".*a/bias": ("model",)}))
    slots = {name: [v for v in model.optimizer.variables if f"_{name}_" in v.path] for name in ("a_kernel", "a_bias")}
    assert [shard_shape(slot) for slot in slots["a_kernel"]] == [(4, 2)] * 2
    assert [shard_shape(slot) for slot in slots["a_bias"]] == [(2,)] * 2


def test_a_rule_that_does_not_fit_moves_nothing():
    model = dense_model()
    fit(model)
    kd.set_distribution(model_parallel(kd, {".*a/kernel": (None, "model"), ".*b/kernel": (None, "model")}))
    with pytest.raises(ValueError, match=r"'sequential/b/kernel' \(shape \(8, 1\)\) by the rule '.*b/kernel'"):
        kd.redistribute(model)
    assert {device for variable in model.variables for device in devices_of(variable)} == {jax.devices()[0]}
    kd.set_distribution(None)
    assert np.isfinite(fit(model)).all()


MOMENTS = [
    *("on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"),
    *("on_test_begin", "on_test_batch_begin", "on_test_batch_end", "on_predict_begin", "on_predict_batch_end"),
]
FAST_MOMENTS = [
    *(("on_train_batch_end", kd.DataParallel), ("on_epoch_begin", kd.DataParallel)),
    *(("on_test_batch_begin", None), ("on_predict_batch_end", kd.DataParallel)),
]


def moving(moment, to, model, calls=1):
    """A callback that moves a model at the first of some moments, or a later one."""
    callback, seen = keras.callbacks.Callback(), []

    def move(*args, **kwargs):
        seen.append(args)
        if len(seen) == calls:
            kd.set_distribution(to)
            kd.redistribute(model)

    setattr(callback, moment, move)
    return callback


@pytest.mark.parametrize(
    ("moment", "begin"),
    crossed(MOMENTS, [None, kd.DataParallel], fast=FAST_MOMENTS),
)
def test_a_model_that_runs_can_be_moved_and_goes_on(moment, begin):
    verb = {"test": "evaluate", "predict": "predict"}.get(moment.split("_")[1], "fit")
    more = {"epochs": 2} if verb == "fit" else {"batch_size": 8}
    expected = on_one_device(lambda model: CALLS[verb](model, **more), fit)

    start_anew()
    kd.set_distribution(begin and begin())
    model = dense_model()
    to = model_parallel(kd, BY_COLUMNS)
    result = CALLS[verb](model, callbacks=[moving(moment, to, model)], **more)
    assert shard_shape(model.weights[0]) == (4, 2)
    assert_same_numbers([result, fit(model)], expected)


def first_devices():
    return kd.DataParallel(devices=kd.list_devices()[:4])


def other_devices():
    return kd.FullyShardedDataParallel(
        kd.create_device_mesh("fsdp:4", devices=kd.list_devices()[4:]), min_shard_bytes=0
    )


@pytest.mark.parametrize(
    ("moment", "calls"),
    [("on_epoch_end", 1), slow("on_epoch_begin", 2), slow("on_train_begin", 1), slow("on_test_begin", 2)],
)
def test_a_model_can_be_moved_to_other_devices_between_epochs(moment, calls):
    validation = {"validation_data": (X[:11], Y[:11])}
    expected = on_one_device(lambda model: model.fit(X, Y, 8, epochs=3, verbose=0, **validation).history, fit)

    start_anew()
    kd.set_distribution(first_devices())
    model = dense_model()
    move = moving(moment, other_devices(), model, calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = model.fit(X, Y, 8, epochs=3, verbose=0, callbacks=[move], **validation).history
    assert {device for variable in model.variables for device in devices_of(variable)} == set(jax.devices()[4:])
    assert_same_numbers([result, fit(model)], expected)


@pytest.mark.parametrize(
    ("moment", "arguments"), [("on_train_batch_end", {}), slow("on_epoch_end", {"steps_per_epoch": 1})]
)
def test_a_model_that_is_moved_to_other_devices_within_a_pass_through_the_data_is_an_error(moment, arguments):
    start_anew()
    kd.set_distribution(first_devices())
    model = dense_model()
    with pytest.raises(ValueError, match="at the start or the end of an epoch"):
        model.fit(X, Y, 8, epochs=3, verbose=0, callbacks=[moving(moment, other_devices(), model)], **arguments)
    kd.redistribute(model)
    assert np.isfinite(fit(model)).all()


@pytest.mark.parametrize(
    "distribution", [slow(kd.DataParallel), lambda: model_parallel(kd, BY_COLUMNS)], ids=["data", "model"]
)
def test_a_moving_average_of_the_weights_survives_a_second_fit(distribution):
    """On one device and under Keras's distributions the second fit crashes; the reference is one fit of two epochs."""

    def build():
        return dense_model(keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=2))

    expected = on_one_device(lambda model: fit(model, epochs=2), build=build)
    start_anew()
    kd.set_distribution(distribution())
    model = build()
    assert_same_numbers([fit(model) + fit(model)], expected)


def test_a_random_generator_created_after_redistribute():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.body, self.head = keras.Sequential([keras.layers.Dense(8)]), keras.layers.Dense(1)

        def call(self, x, training=False):
            return self.head(self.body(x, training=training))

    def add_dropout(model, between=lambda: None):
        model(X)
        between()
        model.body.add(keras.layers.Dropout(0.5))
        model(X)
        return model

    def build():
        model = Subclassed()
        model.compile("sgd", "mse")
        return model

    expected = on_one_device(lambda model: fit(add_dropout(model)), build=build)
    start_anew()
    distribution, model = kd.DataParallel(), build()
    add_dropout(model, between=lambda: kd.redistribute(model, distribution))
    (state,) = (variable for variable in model.variables if variable.name == "seed_generator_state")
    assert len(devices_of(state)) == 1
    with distribution.scope():
        losses = fit(model)
    assert len(devices_of(state)) == DEVICES
    assert_same_numbers([losses], expected)


@pytest.mark.parametrize(
    "argument", [keras.Variable(np.full(4, 7.25), name="table"), 3, "model"], ids=["variable", "number", "text"]
)
def test_redistribute_takes_models(argument):
    with pytest.raises(TypeError) as error:
        kd.redistribute(argument)
    assert type(argument).__name__ in str(error.value)
    assert "7.25" not in str(error.value)  # a variable's values may be many

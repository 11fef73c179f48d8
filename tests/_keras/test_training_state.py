"""Steps donate the arrays of variables: no other variable, and nothing that a user keeps, may lose its value by that.

What Keras computes on one device is the right number. There, too, a step cannot take an array that was donated, so the
numbers are those of steps that donate nothing.
"""

import functools
import itertools

import jax
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.slow_cases import slow_unless
from support.strategy_models import fsdp

import keras_dist as kd
from keras_dist._keras import internals, training_state
from keras_dist.steps import host_offload

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 8)).astype("float32")


def perceptron(optimizer, seed=1):
    """Two layers with statistics and a random generator, so that a step takes all kinds of variables."""
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=2)]
    model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(8)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def averaging(**options):
    model = perceptron(keras.optimizers.Adam(1e-3, use_ema=True, ema_momentum=0.9, **options))
    model.optimizer.build(model.trainable_variables)
    return model


def share_with_averages(model):
    """Leaves each weight and its average with one array, as Keras does at the end of each `fit`."""
    model.optimizer.finalize_variable_values(model.trainable_variables)


def save(model):
    return model.get_weights() + [np.asarray(variable) for variable in model.optimizer.variables]


ROWS = {"batch_size": 8, "verbose": 0}
METHODS = {
    "fit": lambda model: model.fit(X, Y, shuffle=False, **ROWS).history["loss"],
    "evaluate": lambda model: model.evaluate(X, Y, **ROWS),
    "predict": lambda model: model.predict(X, **ROWS),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
    "save": save,
}


# Each method follows each, also itself.
PATH = [
    name
    for place, first in enumerate(METHODS)
    for name in (first, first, *itertools.chain.from_iterable((other, first) for other in [*METHODS][place + 1 :]))
]


def numbers_of(model, path, before_each):
    numbers = []
    for name in path:
        before_each(model)
        numbers.append(METHODS[name](model))
    return jax.tree.map(np.asarray, numbers)


@pytest.fixture
def without_donation(monkeypatch):
    """A function that computes another one on one device, where steps donate nothing."""

    def compute(function):
        real = internals.trainer.jit
        with monkeypatch.context() as patch:
            patch.setattr(internals.trainer, "jit", lambda step, donate_argnums=None, **rest: real(step, **rest))
            return function()

    return compute


@pytest.fixture
def copied(monkeypatch):
    """The shapes of the arrays that steps copied."""
    shapes, real = [], training_state.own_copy
    monkeypatch.setattr(training_state, "own_copy", lambda array: (shapes.append(array.shape), real(array))[1])
    return shapes


def assert_close(actual, expected):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def by_columns():
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:4,model:2"))
    layout_map[".*kernel"] = (None, "model")
    return kd.ModelParallel(layout_map=layout_map)


CASES = {
    "DP": (kd.DataParallel, {}),
    "DP, accumulated gradients": (kd.DataParallel, {"gradient_accumulation_steps": 2}),
    "DP, weights overwritten": (kd.DataParallel, {"ema_overwrite_frequency": 2}),
    "ZeRO-1": (functools.partial(kd.DataParallel, shard_optimizer_state=True), {}),
    "FSDP": (fsdp, {}),
    "FSDP, accumulated gradients": (fsdp, {"gradient_accumulation_steps": 2}),
    "FSDP, offload": (lambda: fsdp().with_step_options(kd.StepOptions(offload="optimizer")), {}),
    "ModelParallel": (by_columns, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_any_method_follows_any_while_weights_share_arrays_with_their_averages(case, without_donation, monkeypatch):
    assert set(itertools.pairwise(PATH)) == set(itertools.product(METHODS, repeat=2))
    monkeypatch.setattr(host_offload, "MIN_OFFLOAD_BYTES", 0)
    distribution, options = CASES[case]
    expected = without_donation(lambda: numbers_of(averaging(**options), PATH, share_with_averages))
    with distribution().scope():
        assert_close(numbers_of(averaging(**options), PATH, share_with_averages), expected)


def test_averages_are_kept_where_the_distribution_is_no_longer_active(without_donation):
    path = ["fit", "evaluate", "fit", "train_on_batch", "save"]
    expected = without_donation(lambda: numbers_of(averaging(), path, share_with_averages))
    with kd.DataParallel().scope():
        model = averaging()
    with pytest.warns(UserWarning, match="No distribution is active in this thread"):
        found = numbers_of(model, path, share_with_averages)
    assert_close(found, expected)


def share(assign, model, other):
    for weight, another in zip(model.weights, other.weights, strict=True):
        assign(another, weight)


def alias(weight):
    """An array in the memory of a weight: JAX returns one for a sharding that means the same."""
    sharding = weight.value.sharding
    return jax.device_put(weight.value, NamedSharding(sharding.mesh, PartitionSpec()))


WAYS_TO_SHARE = {
    "variable": lambda another, weight: another.assign(weight),
    "value": lambda another, weight: another.assign(weight.value),
    "cast to the same dtype": lambda another, weight: another.assign(weight.value.astype(weight.dtype)),
    "placed again": lambda another, weight: another.assign(jax.device_put(weight.value, weight.value.sharding)),
    "another sharding": lambda another, weight: another.assign(alias(weight)),
    "one device": lambda another, weight: another.assign(weight.value.addressable_data(0)),
    "in memory of the host": lambda another, weight: another.assign(np.asarray(weight)),
}


def test_models_that_share_arrays_train_apart():
    """A target network, for example, and its online network."""
    with kd.DataParallel().scope():
        online, target, third = (perceptron(keras.optimizers.SGD(0.1), seed) for seed in (1, 2, 3))
        for way, assign in WAYS_TO_SHARE.items():
            share(assign, online, target)
            share(assign, target, third)
            shared = online.get_weights()
            loss = online.train_on_batch(X, Y)
            assert_close(target.get_weights(), shared)
            third.fit(X, Y, **ROWS)
            assert_close(target.get_weights(), shared)
            assert target.train_on_batch(X, Y) == pytest.approx(loss, rel=1e-5), way


def test_models_that_share_arrays_on_one_device_are_apart_on_a_mesh():
    models = [perceptron(keras.optimizers.SGD(0.1), seed) for seed in (1, 2)]
    share(WAYS_TO_SHARE["variable"], *models)
    with kd.DataParallel().scope():
        one, other = map(kd.redistribute, models)
        shared = one.get_weights()
        one.train_on_batch(X, Y)
        assert_close(other.get_weights(), shared)
        other.train_on_batch(X, Y)


class AssignToTarget(keras.callbacks.Callback):
    """Assigns the weights to another model after each epoch, and computes with them in the next one."""

    def __init__(self, target):
        super().__init__()
        self.target, self.outputs = target, []

    def on_epoch_end(self, epoch, logs=None):
        share(WAYS_TO_SHARE["variable"], self.model, self.target)

    def on_epoch_begin(self, epoch, logs=None):
        self.outputs.append(self.target.predict(X, **ROWS))


def test_callbacks_that_exchange_weights_give_the_numbers_of_one_device(without_donation):
    def numbers():
        model = averaging(ema_overwrite_frequency=3)
        target = AssignToTarget(averaging())
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        rest = {"validation_data": (X, Y), "epochs": 2, "shuffle": False} | ROWS
        history = [model.fit(X, Y, callbacks=[swap, target], **rest).history for _ in range(2)]
        return history, target.outputs, model.evaluate(X, Y, **ROWS), save(model)

    expected = without_donation(numbers)
    with kd.DataParallel().scope():
        assert_close(numbers(), expected)


def model_and_part():
    keras.utils.set_random_seed(1)
    part = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((8,)), part, keras.layers.Dense(8)])
    for each in (part, model):
        each.compile("adam", "mse")
    return model, part


RUNS = {
    "fit": ("on_train_batch_end", lambda model, calls: model.fit(X, Y, shuffle=False, callbacks=calls, **ROWS)),
    "evaluate": ("on_test_batch_end", lambda model, calls: model.evaluate(X, Y, callbacks=calls, **ROWS)),
    "predict": ("on_predict_batch_end", lambda model, calls: model.predict(X, callbacks=calls, **ROWS)),
}


@pytest.mark.parametrize(
    ("run", "is_part"),
    [
        slow_unless((run, is_part) in (("fit", False), ("predict", True)), run, is_part)
        for is_part in (True, False)
        for run in RUNS
    ],
    ids=lambda value: {True: "of a part of the model", False: "of what it is a part of"}.get(value, value),
)
def test_methods_of_another_model_with_its_variables_are_called_in_a_run(run, is_part):
    """The same methods are called through `Callback.model` in plain Keras, which gives variables their values."""
    moment, start = RUNS[run]

    def numbers():
        running, other = model_and_part() if is_part else model_and_part()[::-1]
        found, callback = [], keras.callbacks.Callback()

        def call(batch, logs=None):
            assert is_distributed or callback.model is running
            found.append([METHODS[name](other) for name in ("predict", "evaluate", "fit", "predict")])

        setattr(callback, moment, call)
        start(running, [callback])
        assert len(found) == 2
        return found, METHODS["predict"](running), save(running), save(other)

    is_distributed = False
    expected = numbers()
    is_distributed = True
    with fsdp().scope():
        assert_close(numbers(), expected)


def test_values_stay_in_the_run_of_a_model_without_these_variables(monkeypatch):
    with kd.DataParallel().scope():
        (model, _), (other, _) = model_and_part(), model_and_part()
        callback = keras.callbacks.Callback()
        put_back, real = [], training_state._put_back
        monkeypatch.setattr(training_state, "_put_back", lambda each: (put_back.append(each), real(each)))
        callback.on_train_batch_end = lambda batch, logs=None: other.predict(X, **ROWS)
        model.fit(X, Y, callbacks=[callback], **ROWS)
    assert model not in put_back


def test_arrays_that_a_user_keeps_keep_their_values():
    with kd.DataParallel().scope():
        model = perceptron("sgd")
        weight = model.trainable_variables[0]
        kept, view, read = weight.value, np.asarray(weight), np.array(weight)
        model.fit(X, Y, **ROWS)
        model.train_on_batch(X, Y)
        assert np.abs(weight.value - read).max() > 0
        np.testing.assert_array_equal(kept + 0, read)
        np.testing.assert_array_equal(view, read)


def interrupt(batch, logs):
    raise KeyboardInterrupt


def test_arrays_that_only_a_variable_has_are_not_copied(copied, tmp_path):
    tracebacks = []
    with kd.DataParallel().scope():
        model, inputs = averaging(), keras.Input((8,))
        same_layers = keras.Model(inputs, model.layers[0](inputs))
        same_layers.compile("sgd", "mse")
        model.fit(X, Y, epochs=2, validation_data=(X, Y), **ROWS)
        del copied[:]
        model.predict(X, **ROWS)
        assert sorted(copied) == sorted(tuple(weight.shape) for weight in model.trainable_variables)  # from averages
        del copied[:]
        for method in ("predict", "evaluate", "test_on_batch", "predict_on_batch", "save", "predict"):
            METHODS[method](model)
        model.optimizer.use_ema = False  # otherwise, weights and averages share arrays after each `fit`
        for callback in (
            kd.TrainingCheckpoint(str(tmp_path / "ours"), save_freq=1),
            keras.callbacks.OrbaxCheckpoint(str(tmp_path / "keras"), save_freq=1),
            keras.callbacks.LambdaCallback(on_train_batch_end=interrupt),
            keras.callbacks.LambdaCallback(on_test_batch_end=interrupt),
            kd.StepMonitor(log_every=None),
        ):
            try:
                model.fit(X, Y, epochs=2, callbacks=[callback], validation_data=(X, Y), **ROWS)
            except KeyboardInterrupt as error:
                tracebacks.append(error)
        for _ in range(2):
            model.train_on_batch(X, Y)
            same_layers.train_on_batch(X, Y)
        assert len(tracebacks) == 2
    assert copied == []


def test_a_deleted_array_is_an_error_that_keeps_the_others():
    with kd.DataParallel().scope():
        model = perceptron("sgd")
        weight, *others = model.weights
        expected = [np.array(other) for other in others]
        weight.value.delete()
        for method in ("train_on_batch", "fit", "predict"):
            with pytest.raises(ValueError, match=f"{weight.path}.* has been deleted"):
                METHODS[method](model)
        weight.assign(np.ones((8, 8)))
        assert_close(others, expected)
        METHODS["fit"](model)


def test_an_error_of_a_first_step_that_has_added_variables_is_raised_and_loses_no_value():
    class Averaging(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(8)
            self.dense.build((None, 8))
            self.built = True

        def call(self, x):
            return self.dense(x)

        def train_step(self, state, data):
            self.averages = [keras.Variable(np.zeros(v.shape), trainable=False) for v in self.trainable_variables]
            raise RuntimeError("the user's own mistake")

    with kd.DataParallel().scope():
        model = Averaging()
        model.compile("adam", "mse")
        kernel = np.asarray(model.dense.kernel)
        with pytest.raises(RuntimeError, match="own mistake"):
            model.fit(X, Y, verbose=0)
        np.testing.assert_array_equal(model.dense.kernel, kernel)


class Scored(keras.Model):
    """Own steps, and a metric that creates its variables when it is updated."""

    def __init__(self):
        super().__init__()
        self.dense, self.mean, self.score = keras.layers.Dense(8), keras.metrics.Mean("loss"), keras.metrics.F1Score()

    @property
    def metrics(self):
        return [self.mean, self.score]

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state

        def loss_of(trainable):
            outputs, _ = self.stateless_call(trainable, others, data[0])
            return keras.ops.mean(keras.losses.mean_squared_error(data[1], outputs)), outputs

        (loss, outputs), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = self.updated(metrics, loss, data[1], outputs)
        return logs, (trainable, others, optimizer, metrics)

    def test_step(self, state, data):
        trainable, others, metrics = state
        outputs, _ = self.stateless_call(trainable, others, data[0])
        logs, metrics = self.updated(metrics, keras.ops.mean(outputs), data[1], outputs)
        return logs, (trainable, others, metrics)

    def updated(self, metrics, loss, y, outputs):
        mean = self.mean.stateless_update_state(metrics[:2], loss)
        score = self.score.stateless_update_state(metrics[2:], keras.ops.cast(y > 0, "float32"), outputs)
        logs = {"loss": self.mean.stateless_result(mean), "score": self.score.stateless_result(score)}
        return logs, [*mean, *score]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("distribution", [kd.DataParallel, fsdp])
def test_a_first_step_may_create_variables_of_a_metric(distribution, reads):
    """Also if the values of variables are put back in the middle of `fit`, as to compare them between processes."""

    def history(reads=False):
        keras.utils.set_random_seed(0)
        model = Scored()
        model.compile("sgd")
        put_back = functools.partial(training_state.put_values_back, model)
        read = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: put_back())
        options = {"callbacks": [read] if reads else [], "validation_data": (X[:12], Y[:12]), "epochs": 2} | ROWS
        found = model.fit(X, Y, shuffle=False, **options).history
        return found, [np.asarray(variable) for variable in model.metrics_variables]

    expected = history()
    with distribution().scope():
        assert_close(history(reads), expected)

"""`steps_per_execution=k`: one compiled loop over k batches, with the numbers, logs and callbacks of single steps."""

import functools

import jax
import keras
import numpy as np
import pytest
from jax.experimental import sparse
from keras import layers
from support.slow_cases import crossed, slow, slow_unless
from support.strategy_models import fsdp, scope

import keras_dist as kd
from keras_dist.data.executions import StackedBatches, num_stacked
from keras_dist.steps.looped_steps import looped

BATCH, BATCHES = 8, 11
ROWS = (BATCHES - 1) * BATCH + 3  # the last batch has three rows
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
DISTRIBUTIONS = {
    "no strategy": lambda: None,
    "DP": kd.DataParallel,
    "FSDP": fsdp,
    "one device": lambda: kd.DataParallel(devices=kd.list_devices()[:1]),
}
METHODS = {
    "fit": lambda model: model.fit(X, Y, BATCH, epochs=2, validation_data=(X[:20], Y[:20]), verbose=0).history,
    "evaluate": lambda model: model.evaluate(X, Y, BATCH, verbose=0),
    "predict": lambda model: model.predict(X, BATCH, verbose=0),
}
pytestmark = pytest.mark.filterwarnings("ignore:Batches of")


def build(steps_per_execution, call=None, optimizer=keras.optimizers.Adam, **options):
    """A model with random numbers, moving averages and a metric: all kinds of state that a step changes."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    x = layers.BatchNormalization()(layers.Dropout(0.2)(layers.Dense(16, "relu", name="hidden")(inputs)))
    model = keras.Model(inputs, layers.Dense(1)(x if call is None else call(x)))
    model.compile(optimizer(), "mse", metrics=["mae"], steps_per_execution=steps_per_execution, **options)
    return model


def run(use, steps_per_execution, distribution=None, **options):
    with scope(distribution):
        model = build(steps_per_execution, **options)
        result = use(model)
        return result, model.get_weights()


def assert_equal(actual, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), actual, expected)


FAST = {("one device", "fit", 64), ("DP", "evaluate", 4), ("DP", "evaluate", 64), ("FSDP", "predict", 4)}


@pytest.mark.parametrize(
    ("distribution", "method", "steps_per_execution"),
    crossed(DISTRIBUTIONS, METHODS, [4, 5, 64], fast=FAST),  # last groups of 3, of 1, and of less than k
)
def test_numbers_are_those_of_single_steps(distribution, method, steps_per_execution):
    use, make = METHODS[method], DISTRIBUTIONS[distribution]
    assert_equal(run(use, steps_per_execution, make()), run(use, 1, make()))


OPTIONS = {
    "microbatches": ({"microbatches": 2}, {}),
    "remat": ({"remat": keras.RematScope("list_of_layers", layer_names=["hidden"])}, {}),
    "accumulated gradients": (
        {},
        {"optimizer": functools.partial(keras.optimizers.Adam, gradient_accumulation_steps=3)},
    ),
    "moving averages": ({}, {"optimizer": functools.partial(keras.optimizers.Adam, use_ema=True)}),
    "eager": ({}, {"run_eagerly": True}),
    "not compiled": ({}, {"jit_compile": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_give_the_numbers_of_single_steps(name):
    step_options, options = OPTIONS[name]

    def trained(steps_per_execution):
        distribution = kd.DataParallel(step_options=kd.StepOptions(**step_options))
        return run(METHODS["fit"], steps_per_execution, distribution, **options)

    assert_equal(trained(4), trained(1))


def test_optimizer_state_in_host_memory_stays_there():
    x = np.random.default_rng(0).normal(size=(64, 256)).astype("float32")

    def trained(steps_per_execution):
        keras.utils.set_random_seed(0)
        with fsdp(step_options=kd.StepOptions(offload="optimizer")).scope():
            model = keras.Sequential([keras.Input((256,)), layers.Dense(256, "tanh"), layers.Dense(1)])
            model.compile("adam", "mse", steps_per_execution=steps_per_execution)
            losses = model.fit(x, x[:, :1], 8, verbose=0).history["loss"]
            kinds = {v.value.sharding.memory_kind for v in model.optimizer.variables if np.prod(v.shape) > 2**14}
            return losses, kinds

    losses, kinds = trained(4)
    assert kinds == {"pinned_host"}
    assert_equal(losses, trained(1)[0])


# ------------------------------------------------------------------------------------------------------ the program


def traces_of_layer(steps_per_execution, batches=64):
    """How often Python runs a layer while a model is fitted."""
    calls = []

    class Counted(layers.Layer):
        def call(self, x):
            calls.append(x.shape)
            return x

    with kd.DataParallel().scope():
        model = build(steps_per_execution, Counted())
        calls.clear()
        model.fit(np.ones((batches * BATCH, 4), "float32"), np.ones((batches * BATCH, 1)), BATCH, verbose=0)
    assert {shape[0] for shape in calls} <= {None, BATCH}
    return len(calls)


@pytest.mark.slow
def test_a_step_is_traced_as_often_as_without_the_loop():
    assert traces_of_layer(8) == traces_of_layer(32) == traces_of_layer(1)


@pytest.mark.parametrize("distribution", ["DP", slow("FSDP")])
def test_the_program_holds_one_step(distribution):
    """In the traced and in the compiled program, whatever the number of batches."""

    def products(steps):
        batch = X[:BATCH], Y[:BATCH]
        if steps > 1:
            batch = StackedBatches(tuple(np.stack([each] * steps) for each in batch))
        made = DISTRIBUTIONS[distribution]()
        with made.scope():
            model = build(1)
            model.fit(X[:BATCH], Y[:BATCH], BATCH, verbose=0)
            parts = model.trainable_variables, model.non_trainable_variables
            parts += model.optimizer.variables, model.metrics_variables
            state = tuple([v.value for v in part] for part in parts)
            step = looped(made.steps.of_model(model, "train"), concatenates=False)
            lowered = jax.jit(step).lower(state, batch)
        return lowered.as_text().count("dot_general"), lowered.compile().as_text().count(" dot(")

    one, *others = map(products, (1, 8, 32))
    assert min(one) > 0
    assert others == [one, one]


def executions(model, use):
    """The number of batches of each call of a compiled step: of a loop, or 1."""
    counts, jit = [], keras.src.backend.jax.trainer.jit

    def counting(function, *args, **kwargs):
        compiled = jit(function, *args, **kwargs)

        def call(state, batch):
            counts.append(batch.count if isinstance(batch, StackedBatches) else 1)
            return compiled(state, batch)

        return call if "donate_argnums" in kwargs else compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.src.backend.jax.trainer, "jit", counting)
        use(model)
    return counts


@pytest.mark.parametrize(
    ("steps_per_execution", "expected"),
    [(4, [4, 4, 2, 1]), (5, [5, 5, 1]), (11, [10, 1]), (64, [10, 1]), (1, [1] * 11)],
)
def test_a_loop_computes_all_batches_but_a_smaller_last_one(steps_per_execution, expected):
    with kd.DataParallel().scope():
        found = executions(build(steps_per_execution), lambda model: model.fit(X, Y, BATCH, verbose=0))
    assert found == expected


# -------------------------------------------------------------------------------------------------------- callbacks


class Calls(keras.callbacks.Callback):
    """All calls of a callback, with the numbers of batches and the logs."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.calls, self.stop_at = [], stop_at

    def _note(self, name, number=None, logs=None):
        logs = {key: np.asarray(value) for key, value in (logs or {}).items()}
        self.calls.append((name, number, logs))

    def on_epoch_begin(self, epoch, logs=None):
        self._note("epoch begin", epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch end", epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        self._note("batch begin", batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self._note("batch end", batch, logs)
        self.model.stop_training = batch == self.stop_at

    def on_test_batch_end(self, batch, logs=None):
        self._note("test batch end", batch, logs)

    def on_predict_batch_end(self, batch, logs=None):
        self._note("predict batch end", batch, logs)


ARGUMENTS = {
    "epochs": {"epochs": 2},
    "initial_epoch": {"initial_epoch": 1, "epochs": 3},
    "steps_per_epoch": {"steps_per_epoch": 2, "epochs": 4},  # parts of one pass through the data
    "validation_steps": {"validation_data": (X, Y), "validation_steps": 3},
}


@pytest.mark.parametrize("name", [slow_unless("steps" in name, name) for name in ARGUMENTS])
def test_callbacks_are_called_as_by_keras(name):
    def use(model):
        calls = Calls()
        model.fit(X, Y, BATCH, verbose=0, callbacks=[calls], shuffle=False, **ARGUMENTS[name])
        model.evaluate(X, Y, BATCH, verbose=0, callbacks=[calls])
        model.predict(X, BATCH, verbose=0, callbacks=[calls])
        return calls.calls, int(model.optimizer.iterations.numpy())

    (found, steps), _ = run(use, 4, kd.DataParallel())
    (expected, steps_of_keras), _ = run(use, 4)
    assert steps == steps_of_keras
    assert [call[:2] for call in found] == [call[:2] for call in expected]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        *([c[2] for c in each] for each in (found, expected)),
    )


def test_a_callback_stops_training_after_an_execution():
    with kd.DataParallel().scope():
        model, calls = build(4), Calls(stop_at=7)
        model.fit(X, Y, BATCH, verbose=0, callbacks=[calls])
        assert int(model.optimizer.iterations.numpy()) == 8
    assert [number for name, number, _ in calls.calls if name == "batch end"] == [3, 7]


# ---------------------------------------------------------------------------------------------------------- batches


def stacked(*batches):
    return num_stacked([(batch, None) for batch in batches])


def test_all_batches_are_stacked_or_all_but_the_last():
    batch, short, other = np.ones((8, 4)), np.ones((3, 4)), np.ones((8, 4), "int32")
    assert stacked(batch) == 0
    assert stacked(batch, batch) == stacked(batch, batch, short) == stacked(batch, batch, other) == 2
    assert stacked(batch, short) == stacked(batch, short, batch) == stacked(short, batch, batch) == 0
    assert stacked(batch, batch, short, short) == 0


def test_batches_that_differ_in_more_than_numbers_are_not_stacked():
    batch = np.ones((8, 4))
    assert stacked((batch, None), (batch,)) == stacked({"a": batch}, {"b": batch}) == 0
    assert stacked((batch, 0.5), (batch, 0.5)) == 0  # a Python number has no dtype
    assert stacked((batch, np.float32(0.5)), (batch, np.float32(0.7))) == 2
    assert stacked(jax.numpy.ones(3), np.ones(3, "float32")) == 0
    assert stacked(*[sparse.BCOO.fromdense(np.eye(3))] * 2) == 0
    assert stacked(jax.numpy.ones(()), jax.numpy.ones(())) == 2
    assert num_stacked([(batch, [[4, 4]]), (batch, [[5, 3]])]) == 0  # the rows of two processes
    assert stacked((), ()) == 0


def placed_by_the_user(rows):
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(jax.devices(), ("rows",)), jax.sharding.PartitionSpec("rows")
    )
    return jax.device_put(rows, sharding)


def batches_of(name):
    """Twelve batches, of which a Keras loop could compute each."""
    for number in range(12):
        x = np.full((8, 2 + number % 3 if name == "lengths" else 6, 4), number / 12, "float32")
        if name == "rows":
            x = x[: 8 - number % 2]
        y = x.sum(axis=(1, 2))[:, None]
        scale = {"0-d arrays": np.float32(number / 12), "Python numbers": number / 12}.get(name, np.ones((), "float32"))
        if name == "arrays on devices":
            x = placed_by_the_user(x)
        if name == "arrays on one device":
            x = jax.numpy.asarray(x)
        if name == "float64":
            x, y = x.astype("float64"), y.astype("float64")
        yield {"rows": x, "scale": scale}, y


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["DP", "one device"])
@pytest.mark.parametrize(
    "name",
    [
        "lengths",
        "rows",
        "0-d arrays",
        "Python numbers",
        "float64",
        "arrays on one device",
        "arrays on devices",
    ],
)
def test_batches_of_any_kind_give_the_numbers_of_single_steps(name, distribution):
    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, inputs):
            return self.dense(keras.ops.mean(inputs["rows"], axis=1)) * keras.ops.cast(inputs["scale"], "float32")

    def trained(steps_per_execution):
        keras.utils.set_random_seed(0)
        with DISTRIBUTIONS[distribution]().scope():
            model = Scaled()
            model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
            return model.fit(batches_of(name), verbose=0).history, model.get_weights()

    assert_equal(trained(4), trained(1))


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("distribution", ["DP", "one device"])
def test_a_source_may_reuse_the_memory_of_a_batch(distribution, steps_per_execution):
    class Reused(keras.utils.PyDataset):
        x = aligned(BATCH, 512)  # CPU devices compute with it as it is

        def __len__(self):
            return 6

        def __getitem__(self, number):
            self.x[:] = number
            return self.x, np.zeros((BATCH, 1))

    with DISTRIBUTIONS[distribution]().scope():
        products = [layers.Dense(512, kernel_initializer="identity") for _ in range(4)]  # longer than reading
        mean = layers.Dense(1, kernel_initializer=keras.initializers.Constant(1 / 512))
        model = keras.Sequential([keras.Input((512,)), *products, mean])
        model.compile("sgd", "mae", steps_per_execution=steps_per_execution)
        assert model.evaluate(Reused(), verbose=0) == pytest.approx(2.5)


def aligned(rows, columns):
    """Returns an array that begins at a multiple of 64 bytes."""
    memory = np.empty(rows * columns + 16, "float32")
    return memory[-memory.ctypes.data % 64 // 4 :][: rows * columns].reshape(rows, columns)


def test_a_source_that_fails_raises_its_own_error():
    def batches():
        for number in range(6):
            if number == 5:
                raise OSError("disk 5")
            yield X[:BATCH], Y[:BATCH]

    with kd.DataParallel().scope():
        model = build(4)
        with pytest.raises(OSError, match="disk 5"):
            model.fit(batches(), verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 4  # the first execution


def test_logs_of_a_train_step_of_the_user_are_those_of_the_last_batch():
    class Numbered(keras.Model):
        def train_step(self, state, data):
            _, state = super().train_step(state, data)
            return {"first": data[0][0, 0], "constant": 3}, state

    x = np.arange(12, dtype="float32")[:, None]
    with kd.DataParallel(devices=kd.list_devices()[:2]).scope():
        inputs = keras.Input((1,))
        model = Numbered(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse", steps_per_execution=3)
        history = model.fit(x, x, 2, shuffle=False, verbose=0).history
    assert history == {"first": [10.0], "constant": [3]}


def test_a_step_that_creates_variables_is_an_error_with_the_fix():
    class Counting(keras.Model):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs)
            self.score = keras.metrics.F1Score()  # creates its variables when it is updated

        @property
        def metrics(self):
            return [self.score]

        def test_step(self, state, data):
            trainable, others, metrics = state
            outputs, others = self.stateless_call(trainable, others, data[0])
            return {}, (trainable, others, self.score.stateless_update_state(metrics, data[1], outputs))

    with kd.DataParallel().scope():
        inputs = keras.Input((4,))
        model = Counting(inputs, layers.Dense(4, "softmax")(inputs))
        model.compile(steps_per_execution=2)
        with pytest.raises(ValueError, match=r"created 4 variables.*steps_per_execution=1"):
            model.evaluate(X[:32], X[:32], 8, verbose=0)


def test_outputs_without_elements_are_concatenated():
    with kd.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x[:, :0])])
        model.compile("sgd", "mse", steps_per_execution=2)
        assert model.predict(X[:32], 8, verbose=0).shape == (32, 0)

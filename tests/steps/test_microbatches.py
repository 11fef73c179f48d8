"""Training in microbatches: numbers of undivided batches, whatever the losses, and errors where options do nothing."""

import jax
import keras
import numpy as np
import pytest
from jax.experimental import sparse
from keras import layers, ops
from support.slow_cases import slow, slow_unless
from support.strategy_models import MODELS, STRATEGIES, OwnStep, assert_same_numbers, scope

import keras_dist as kd

ROWS = 48
random = np.random.default_rng(0)


def vectors(*shape):
    return random.normal(size=shape).astype("float32")


def classes(first, last, *shape):
    return random.integers(first, last + 1, shape, "int32")


def masked():
    """Means over elements that an embedding does not mask; each part of a batch has another number of them."""
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(8, 32, mask_zero=True)(tokens)
    x = layers.LayerNormalization()(layers.Dense(32, "tanh")(x))
    model = keras.Model(tokens, layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def ignoring_a_class():
    model = keras.Sequential([keras.Input((6, 4)), layers.Dense(8)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3))
    return model


def two_losses():
    """A sum, and a mean over sample weights."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "tanh")(inputs)
    model = keras.Model(inputs, {"a": layers.Dense(4, name="a")(x), "b": layers.Dense(3, name="b")(x)})
    losses = {
        "a": keras.losses.MeanSquaredError(reduction="sum"),
        "b": keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
    }
    model.compile("adam", losses, loss_weights={"a": 0.01, "b": 1.0})
    return model


def recurrent():
    inputs = keras.Input((5, 8))
    x = layers.Bidirectional(layers.GRU(16, return_sequences=True))(inputs)
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5), "mse")
    return model


def depthwise():
    images = keras.Input((6, 6, 4))
    x = layers.SeparableConv2D(16, 3, depth_multiplier=2)(images)
    x = layers.Conv2DTranspose(8, 3, strides=2, activation="relu")(layers.GroupNormalization(4)(x))
    model = keras.Model(images, layers.Dense(2)(layers.Flatten()(x)))
    model.compile("adam", "mse")
    return model


LOSSES = {
    "masked": (masked, classes(0, 2, ROWS, 6), classes(0, 7, ROWS, 6), None),
    "masked and weighted": (masked, classes(0, 2, ROWS, 6), classes(0, 7, ROWS, 6), vectors(ROWS, 6)),
    "ignoring a class": (ignoring_a_class, vectors(ROWS, 6, 4), classes(2, 4, ROWS, 6), None),
    "two losses": (
        two_losses,
        vectors(ROWS, 16),
        {"a": vectors(ROWS, 4), "b": vectors(ROWS, 3)},
        {"a": np.abs(vectors(ROWS)), "b": np.abs(vectors(ROWS))},
    ),
    "recurrent": (recurrent, vectors(ROWS, 5, 8), vectors(ROWS, 2), None),
    "depthwise": (depthwise, vectors(ROWS, 6, 6, 4), vectors(ROWS, 2), None),
}


FAST = {("two losses", "update")}


def fitted(build, x, y, sample_weight=None, distribution=None, batch_size=24):
    """The losses and metrics of two epochs, and predictions after them."""
    keras.utils.set_random_seed(0)
    with scope(distribution):
        model = build()
        history = model.fit(x, y, batch_size, epochs=2, verbose=0, shuffle=False, sample_weight=sample_weight).history
        return {"fit": history, "predict": model.predict(x, verbose=0)}


def four_devices(**options):
    return kd.DataParallel(devices=jax.devices()[:4], step_options=kd.StepOptions(**options))


@pytest.mark.parametrize(
    ("name", "reduce_gradients"),
    [slow_unless((name, reduce) in FAST, name, reduce) for name in LOSSES for reduce in ("update", "microbatch")],
)
def test_numbers_are_those_of_undivided_batches(name, reduce_gradients):
    """Batches of 20 rows: 5 for each device, in parts of 2, 2 and 1; the last one has 8."""
    data = LOSSES[name]
    distribution = four_devices(microbatches=3, reduce_gradients=reduce_gradients)
    expected = fitted(*data, batch_size=20)
    assert_same_numbers(fitted(*data, distribution=distribution, batch_size=20), expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_computes_the_numbers_of_one_device(strategy):
    build, x, y = MODELS["transformer"]
    distribution = STRATEGIES[strategy](build).with_step_options(kd.StepOptions(microbatches=2))
    expected = fitted(build, x, y, batch_size=16)
    assert_same_numbers(fitted(build, x, y, distribution=distribution, batch_size=16), expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_any_number_of_rows(rows):
    build, x, y, _ = LOSSES["masked"]
    expected = fitted(build, x[:rows], y[:rows], batch_size=rows)
    distribution = four_devices(microbatches=3)
    assert_same_numbers(fitted(build, x[:rows], y[:rows], distribution=distribution, batch_size=rows), expected, 1e-4)


def test_batch_statistics_are_those_of_each_part():
    """On one device, the moving average follows the means of both halves, one after the other."""
    x = np.concatenate([np.zeros((4, 2)), np.ones((4, 2))]).astype("float32")
    distribution = kd.DataParallel(devices=jax.devices()[:1], step_options=kd.StepOptions(microbatches=2))
    with distribution.scope():
        norm = layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((2,)), norm])
        model.compile("sgd", "mse")
        model.train_on_batch(x, x)
    np.testing.assert_allclose(norm.moving_mean, [0.5, 0.5])  # 0.5 * (0.5 * 0 + 0.5 * 0) + 0.5 * 1


def test_each_part_has_its_own_dropout_mask():
    class Recording(keras.Layer):
        def call(self, x):
            jax.debug.callback(lambda value: seen.append(np.asarray(value)), x)
            return x

    seen = []
    with four_devices(microbatches=2).scope():
        model = keras.Sequential([keras.Input((64,)), layers.Dropout(0.5, seed=1), Recording(), layers.Dense(1)])
        model.compile("sgd", "mse")
        model.train_on_batch(np.ones((16, 64), "float32"), np.ones((16, 1), "float32"))
        jax.effects_barrier()
    first, second = seen
    assert first.shape == second.shape == (8, 64)
    assert (first != second).any()


def test_mixed_precision_with_a_scaled_loss():
    def build():
        policy = "mixed_float16"
        model = keras.Sequential(
            [keras.Input((16,)), layers.Dense(32, "tanh", dtype=policy), layers.Dense(4, dtype=policy)]
        )
        model.compile("sgd", "mse")
        return model

    x, y = vectors(16, 16), vectors(16, 4)
    assert_same_numbers(fitted(build, x, y, distribution=four_devices(microbatches=2)), fitted(build, x, y), 2e-3)


def test_arrays_without_rows_are_not_split():
    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, inputs):
            x, scale = inputs
            return self.dense(x) * scale

    def numbers(distribution):
        keras.utils.set_random_seed(0)
        with scope(distribution):
            model = Scaled()
            model.compile("sgd", "mse")
            data = [((vectors_of_data, np.float32(2)), targets)] * 2
            return model.fit((batch for batch in data), steps_per_epoch=2, verbose=0).history

    vectors_of_data, targets = vectors(8, 3), vectors(8, 2)
    assert_same_numbers(numbers(four_devices(microbatches=2)), numbers(None), 1e-5)


def test_arrays_with_other_numbers_of_rows_raise():
    class Paired(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs[0]) + ops.sum(inputs[1])

    with four_devices(microbatches=2).scope():
        model = Paired()
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match=r"microbatches=2 .*\(8, 3\), \(5, 3\)"):
            model.fit((batch for batch in [((vectors(8, 3), vectors(5, 3)), vectors(8, 2))]), verbose=0)


class LoggingStep(keras.Model):
    """A model whose train step adds to Keras's."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return logs | {"one": 1.0}, state


def model_with(kind):
    inputs = keras.Input((3,))
    model = kind(inputs, layers.Dense(2)(inputs))
    model.compile("sgd", "mse")
    return model


def test_a_train_step_that_ignores_options_raises():
    x, y = vectors(8, 3), vectors(8, 2)
    with four_devices(microbatches=2).scope():
        with pytest.raises(ValueError, match=r"OwnStep.train_step .*StepOptions\(microbatches=2\)"):
            model_with(OwnStep).fit(x, y, verbose=0)
        assert model_with(LoggingStep).fit(x, y, verbose=0).history["one"] == [1.0]
    with pytest.raises(ValueError, match="OwnStep"):
        kd.plan(lambda: model_with(OwnStep), four_devices(microbatches=2), 8)
    with four_devices().scope():
        model_with(OwnStep).fit(x, y, verbose=0)


def test_run_eagerly():
    build, x, y, _ = LOSSES["ignoring a class"]

    def eager():
        model = build()
        model.run_eagerly = True
        return model

    x, y = x[:8], y[:8]
    expected = fitted(build, x, y, batch_size=8)
    assert_same_numbers(fitted(eager, x, y, distribution=four_devices(microbatches=2), batch_size=8), expected, 1e-4)


@pytest.mark.slow
def test_a_checkpoint_is_taken_on_with_other_options(tmp_path):
    """The file has the variables of any other model, and training continues as in undivided batches."""
    build, x, y, _ = LOSSES["two losses"]
    path = tmp_path / "model.keras"
    numbers = []
    for first, second in ((None, None), (four_devices(microbatches=2), None), (None, four_devices(microbatches=3))):
        keras.utils.set_random_seed(0)
        with scope(first):
            model = build()
            model.fit(x, y, 24, verbose=0, shuffle=False)
            model.save(path)
        with scope(second):
            model = keras.saving.load_model(path)
            numbers.append(model.fit(x, y, 24, verbose=0, shuffle=False).history)
    for each in numbers[1:]:
        assert_same_numbers(each, numbers[0], 1e-4)


@pytest.mark.parametrize(
    ("dtype", "axes", "kernel"),
    [
        slow("float32", "data:4", None),
        slow("bfloat16", "data:4", ("data", None)),
        ("bfloat16", "data:2,model:2", ("model", None)),
    ],
)
def test_gradients_are_reduced_in_a_dtype(dtype, axes, kernel):
    """Reduced in bfloat16, each gradient has an error of up to 1/256 of itself, here 0.2% of the losses."""
    build, x, y, _ = LOSSES["depthwise"]
    layout_map = kd.LayoutMap(kd.create_device_mesh(axes, devices=jax.devices()[:4]))
    if kernel is not None:
        layout_map["dense.*/kernel"] = kernel
    distribution = kd.ModelParallel(layout_map=layout_map, step_options=kd.StepOptions(reduce_dtype=dtype))
    found = fitted(build, x, y, distribution=distribution)
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    assert_same_numbers(found, fitted(build, x, y), tolerance)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"microbatches": 0}, "0"),
        ({"microbatches": 2.0}, "2.0"),
        ({"reduce_gradients": "epoch"}, "'epoch'"),
        ({"reduce_dtype": "int8"}, "'int8'"),
        ({"reduce_dtype": "bf16"}, "'bf16'"),
        ({"reduce_dtype": "bfloat16", "reduce_gradients": "microbatch"}, "'update'"),
    ],
)
def test_values_that_options_do_not_take(options, value):
    with pytest.raises(ValueError, match=value):
        kd.StepOptions(**options)


def test_something_else_than_options():
    with pytest.raises(TypeError, match="StepOptions"):
        kd.DataParallel(step_options={"microbatches": 2})


def two_dense(loss, metrics=None, **dense):
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(256, "tanh", **dense)
    model = keras.Sequential([keras.Input((6, 4)), hidden, layers.Dense(8, dtype="float32")])
    model.compile("sgd", loss, metrics=metrics)
    return model


def test_a_loss_as_metric():
    def ignoring():
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)

    x, y = vectors(16, 6, 4), classes(0, 7, 16, 6)

    def logs(options):
        with kd.DataParallel(step_options=options).scope():
            return two_dense(ignoring(), [ignoring()]).train_on_batch(x, y, return_dict=True)

    undivided, divided = logs(None), logs(kd.StepOptions(microbatches=2))
    assert divided["loss"] == pytest.approx(undivided["loss"], rel=1e-5)
    assert divided.keys() == undivided.keys()


def test_a_loss_that_is_a_number():
    with kd.DataParallel(step_options=kd.StepOptions(microbatches=np.int64(2))).scope():
        assert two_dense(lambda y, predicted: 0.0).train_on_batch(vectors(16, 6, 4), vectors(16, 6, 8)) == 0.0


def test_weights_that_a_layer_reads_in_float32_are_gathered_so():
    class Plain(layers.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_bfloat16", autocast=False)

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 256), name="kernel")

        def call(self, x):
            return ops.cast(x, "float32") @ self.kernel

    def loss(gather_weights):
        keras.utils.set_random_seed(0)
        options = kd.StepOptions(microbatches=2, gather_weights=gather_weights)
        with kd.FullyShardedDataParallel(min_shard_bytes=0, step_options=options).scope():
            model = keras.Sequential([keras.Input((64,)), keras.Sequential([keras.Input((64,)), Plain()])])
            model.compile("sgd", "mse")
            return model.train_on_batch(X64, np.ones((16, 256)))

    X64 = vectors(16, 64)
    assert loss("update") == pytest.approx(loss("microbatch"), rel=1e-6)


@pytest.mark.parametrize("rows", [32, 20])
@pytest.mark.parametrize("reduce_gradients", ["update", "microbatch"])
def test_float8_has_the_scales_of_undivided_batches(reduce_gradients, rows):
    x = vectors(64, 8)

    def trained(options):
        keras.utils.set_random_seed(0)
        mesh = kd.create_device_mesh("data:2", devices=jax.devices()[:2])
        with kd.DataParallel(mesh, step_options=options).scope():
            model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(4)])
            for layer in model.layers:
                layer.quantize("float8")
            model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
            losses = model.fit(x, x[:, :4], batch_size=rows, epochs=2, shuffle=False, verbose=0).history["loss"]
            overwritten = [v.numpy() for v in model.trainable_variables if v.overwrite_with_gradient]
        return losses, overwritten

    losses, overwritten = trained(kd.StepOptions(microbatches=3, reduce_gradients=reduce_gradients))
    expected_losses, expected = trained(None)
    assert len(expected) == 12
    assert_same_numbers(overwritten, expected, 1e-3)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-3)


def test_a_layer_with_states_of_all_rows_raises():
    def train(options):
        with kd.DataParallel(step_options=options).scope():
            recurrent = layers.Bidirectional(layers.LSTM(4, stateful=True), name="recurrent")
            model = keras.Sequential([keras.Input(batch_shape=(16, 3, 4)), recurrent])
            model.compile("sgd", "mse")
            model.train_on_batch(np.ones((16, 3, 4), "float32"), np.ones((16, 8), "float32"))

    train(kd.StepOptions(reduce_dtype="bfloat16"))  # does not split the rows
    with pytest.raises(ValueError, match="'recurrent' has stateful=True"):
        train(kd.StepOptions(microbatches=2))


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (lambda: sparse.BCOO.fromdense(np.eye(16, 4, dtype="float32")), "which a sparse array does not store"),
        (lambda: np.ones((0, 4), "float32"), "but this one has none"),
    ],
)
def test_batches_that_have_no_rows_to_split(x, says):
    with kd.DataParallel(step_options=kd.StepOptions(microbatches=2)).scope():
        model = keras.Sequential([keras.Input((4,), sparse=says.startswith("which")), layers.Dense(2)])
        model.compile("sgd", "mse")
        given = x()
        with pytest.raises(ValueError, match=says):
            model.train_on_batch(given, np.ones((given.shape[0], 2), "float32"))


@pytest.mark.parametrize("microbatches", [3, slow(2)])
def test_losses_that_a_layer_adds_are_added_up_for_rows_and_averaged_for_the_rest(microbatches):
    """As Keras sums them, also if others have as many numbers as a microbatch has rows, and before masked losses."""

    class Endpoint(layers.Layer):
        def call(self, targets, predictions):
            squares = (targets - predictions) ** 2
            self.add_loss(ops.mean(squares, axis=-1, keepdims=True) / 10)
            self.add_loss(ops.reshape(squares, (-1,)) / 10)
            self.add_loss(ops.mean(squares, axis=0))
            return predictions

    class Masked(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            masked = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
            return super().compute_loss(x, y, y_pred, sample_weight, training) + masked(classes_of_rows(x[1]), y_pred)

    def classes_of_rows(targets):
        return ops.cast(targets[:, 0] > 0, "int32")

    def build():
        x, y = keras.Input((4,)), keras.Input((8,))
        model = Masked([x, y], Endpoint()(y, layers.Dense(8)(x)))
        model.compile(keras.optimizers.SGD(0.01))
        return model

    def history(distribution):
        keras.utils.set_random_seed(0)
        with scope(distribution):
            return build().fit([X, Y], batch_size=24, epochs=2, shuffle=False, verbose=0).history["loss"]

    X, Y = vectors(ROWS, 4), vectors(ROWS, 8)
    options = kd.StepOptions(microbatches=microbatches)
    np.testing.assert_allclose(history(kd.DataParallel(step_options=options)), history(None), rtol=1e-5)

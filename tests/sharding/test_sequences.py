"""Sequences are sharded outside of attention, of any length, with the numbers of one device."""

import re

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.keras_scenarios import start_anew
from support.slow_cases import slow
from support.strategy_models import assert_same_numbers, scope

import keras_dist as kd

LENGTH, WIDTH, VOCABULARY = 9, 16, 32  # four devices hold 3, 3, 3 and no positions
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture
def mesh():
    return kd.DeviceMesh((2, 4), ["data", "context"])


def model_parallel(mesh):
    layout_map = kd.LayoutMap(mesh)
    layout_map["up/output"] = ("data", "context", None)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", sequence_dim_name="context")


DISTRIBUTIONS = {
    "data parallel": lambda mesh: kd.DataParallel(mesh, sequence_dim_name="context"),
    "model parallel": model_parallel,
    "fully sharded": lambda mesh: kd.FullyShardedDataParallel(mesh, min_shard_bytes=0, sequence_dim_name="context"),
}


def tagger(*between, **options):
    """A model from tokens to a class for each. Token 0 is padding."""
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True, name="embedding")(tokens)
    x = layers.Dense(WIDTH, activation="tanh", name="up")(x)
    for layer in between:
        x = layer(x)
    model = keras.Model(tokens, layers.Dense(VOCABULARY, name="head")(x), name="tagger")
    model.compile("sgd", LOSS, weighted_metrics=["accuracy"], **options)
    return model


def tokens_and_targets(rows, length=LENGTH):
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCABULARY, (rows, length))
    tokens[::2, -2:] = 0
    return tokens, random.integers(0, VOCABULARY, (rows, length)), random.uniform(0.5, 2, (rows, length))


def in_epochs(distribution, build, rows=10):
    """Fits, evaluates, predicts and calls a model, with batches of 4, 4 and 2 rows."""
    tokens, targets, weights = tokens_and_targets(rows)
    start_anew()
    with scope(distribution):
        model = build()
        return {
            "fit": model.fit(tokens, targets, 4, verbose=0, sample_weight=weights, shuffle=False).history,
            "evaluate": model.evaluate(tokens, targets, 4, verbose=0),
            "predict": model.predict(tokens, 4, verbose=0),
            "call": model(tokens[:3]),
            "weights": model.get_weights(),
        }


@pytest.mark.parametrize(
    "strategy",
    ["model parallel", *(slow(name) for name in ("data parallel", "fully sharded"))],
)
def test_sequences_that_the_axis_does_not_divide(strategy, mesh):
    assert_same_numbers(in_epochs(DISTRIBUTIONS[strategy](mesh), tagger), in_epochs(None, tagger), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"jit_compile": False}, {"steps_per_execution": 2}], ids=str
)
def test_other_ways_to_run_a_step(options, mesh):
    def build():
        return tagger(layers.Conv1D(WIDTH, 3, padding="same"), **options)

    assert_same_numbers(in_epochs(model_parallel(mesh), build), in_epochs(None, build), 1e-5)


class Sorted(layers.Layer):
    """Adds to each position what a sort along the sequence gives."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return x + self.function(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.sort(x, axis=1),
        lambda x: ops.sort(x, axis=-1),
        slow(lambda x: ops.median(x, axis=1, keepdims=True)),
        slow(lambda x: ops.quantile(x, 0.3, axis=(1, 2), keepdims=True)),
        slow(lambda x: ops.sparsemax(x, axis=1)),
        slow(lambda x: ops.sparsemax(x)),
        slow(lambda x: ops.cumsum(x, axis=1) + ops.flip(x, 1) + ops.roll(x, 2, 1)),
        lambda x: ops.max_pool(x, (3,), (1,), padding="same"),
        slow(lambda x: ops.average_pool(x, (3,), (1,), padding="same")),
    ],
    ids=[
        "sort",
        "sort channels",
        "median",
        "quantile",
        "sparsemax",
        "sparsemax of channels",
        "cumsum, flip, roll",
        "max pool",
        "average pool",
    ],
)
def test_functions_along_the_sequence(function, mesh):
    """XLA ends the process on the gradient of a sort in unequal shards, and is wrong about that of a maximum."""
    tokens, targets, _ = tokens_and_targets(4)

    def trained(distribution):
        start_anew()
        with scope(distribution):
            model = tagger(Sorted(function))
            return [model.train_on_batch(tokens, targets) for _ in range(2)], model.get_weights()

    assert_same_numbers(trained(model_parallel(mesh)), trained(None), 1e-5)


def test_lists_of_numbers_are_sorted_and_looked_up():
    with kd.DataParallel().scope():
        assert ops.sort([3, 1, 2]).tolist() == [1, 2, 3]
        assert float(ops.median([3.0, 1.0, 2.0])) == 2
        assert ops.take([[1, 2], [3, 4]], [1], axis=0).tolist() == [[3, 4]]
        assert ops.take_along_axis([1, 2, 3], [2, 0], axis=0).tolist() == [3, 1]


def test_adaptive_max_pool(mesh):
    """In a function that users compile, and differentiate themselves."""
    x = np.random.default_rng(0).normal(size=(4, 9, WIDTH)).astype("float32")
    pool = keras.Sequential([keras.Input((9, WIDTH)), layers.AdaptiveMaxPooling1D(3)])

    def loss(x):
        return ops.sum(ops.sin(pool.stateless_call([], [], x)[0]))

    expected = jax.grad(loss)(x)
    with DISTRIBUTIONS["data parallel"](mesh).scope():
        assert_same_numbers(jax.jit(jax.grad(loss))(x), expected, 1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.GRU(WIDTH, return_sequences=True),
        slow(lambda: layers.Bidirectional(layers.LSTM(8, return_sequences=True, dropout=0.2))),
        slow(lambda: layers.RNN(layers.SimpleRNNCell(WIDTH), go_backwards=True)),
    ],
    ids=["GRU", "Bidirectional LSTM", "last output, backwards"],
)
def test_sequences_are_gathered_for_recurrent_layers(layer, mesh):
    def trained(distribution):
        tokens, targets, _ = tokens_and_targets(4)
        start_anew()
        with scope(distribution):
            recurrent = layer()
            model = tagger(recurrent)
            targets = targets[:, : model.output_shape[1]] if len(model.output_shape) > 2 else targets[:, 0]
            return [model.train_on_batch(tokens, targets) for _ in range(2)], model.get_weights()

    assert_same_numbers(trained(DISTRIBUTIONS["data parallel"](mesh)), trained(None), 1e-5)


def test_a_recurrent_layer_sends_nothing_in_its_loop(mesh):
    distribution = DISTRIBUTIONS["data parallel"](mesh)
    with distribution.scope():
        layer = layers.GRU(WIDTH, return_sequences=True)
        layer.build((None, 8, 4))
        values = [variable.value for variable in layer.trainable_variables]
        seeds = [variable.value for variable in layer.non_trainable_variables]
        x = distribution.distribute_batch(np.ones((4, 8, 4), "float32"))
        step = jax.jit(lambda values, x: layer.stateless_call(values, seeds, x)[0])
        text = step.lower(values, x).compile().as_text()
        assert step(values, x).sharding.shard_shape((4, 8, WIDTH)) == (2, 2, WIDTH)
    collectives = re.findall(r"(\S+) = .* (all-\w+|collective-\w+|reduce-scatter)\(", text)
    assert [kind for _, kind in collectives] == ["all-gather"]
    in_loops = [body for body in text.split("\n\n") if re.match(r"\s*%?\S*(while|region)", body)]
    assert in_loops
    assert not any("all-gather" in body for body in in_loops)


@pytest.mark.slow
@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("length", [253, 256])
def test_activations_are_sharded_along_sequences_of_any_length(length, mesh):
    rows = 4
    batch = tuple(jax.ShapeDtypeStruct((rows, length), "int32") for _ in range(2))
    planned = kd.plan(tagger, DISTRIBUTIONS["data parallel"](mesh), batch)
    activations = rows * length * (2 * WIDTH + 2 * VOCABULARY) * 4  # on one device
    assert planned.memory.temporaries < 1.6 * activations / 8


@pytest.mark.parametrize("shape", [(8,), (8, 3), (8, 3, 32)])
def test_inputs_without_a_sequence(shape, mesh):
    with DISTRIBUTIONS["data parallel"](mesh).scope():
        model = keras.Sequential([keras.Input(shape[1:]), layers.Flatten(), layers.Dense(2)])
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match=r"context:4"):
            model.fit(np.ones((shape[0], *shape[1:])), np.ones((shape[0], 2)), verbose=0)


def test_a_rule_for_outputs_with_any_length(mesh):
    """In a step, shards may be of unequal sizes. Eager arrays, and fewer positions than devices, are not split."""
    with model_parallel(mesh).scope():
        dense = layers.Dense(6, name="up")
        assert dense(np.ones((4, 9, 4))).sharding.shard_shape((4, 9, 6)) == (2, 9, 6)
        assert dense(np.ones((4, 8, 4))).sharding.shard_shape((4, 8, 6)) == (2, 2, 6)
        step = jax.jit(lambda x: ops.sum(ops.sin(dense(x))))
        for length, shard in ((9, "[2,3,6]"), (1, "[2,1,4]")):
            text = step.lower(np.ones((4, length, 4), "float32")).compile().as_text()
            assert f"f32{shard}" in text


class Positions(keras.Layer):
    """Adds a class token, and a learned vector for each position, looked up in a table."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")
        self.table = keras.layers.Embedding(shape[1] + 1, shape[-1])
        self.table.build((1, shape[1] + 1))

    def call(self, x):
        token = keras.ops.broadcast_to(self.token, (keras.ops.shape(x)[0], 1, x.shape[-1]))
        return keras.ops.concatenate([token, x], 1) + self.table(keras.ops.arange(x.shape[1] + 1)[None])

    def compute_output_shape(self, shape):
        return shape[0], shape[1] + 1, shape[2]


def test_positions_that_the_axis_does_not_divide_are_looked_up():
    def gradients():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        inputs = keras.Input((12, 8))
        model = keras.Model(inputs, keras.layers.Dense(1)(Positions()(inputs)))
        model.compile(keras.optimizers.SGD(1.0, momentum=0.9), "mse")
        x = np.random.default_rng(0).standard_normal((8, 12, 8))
        weights = np.random.default_rng(1).random((8, 13))
        model.train_on_batch(x, np.arange(13.0)[None, :, None] * np.ones((8, 1, 1)), sample_weight=weights)
        return [np.asarray(variable.value) for variable in model.optimizer.variables]

    expected = gradients()
    with kd.DataParallel(kd.create_device_mesh("data:2,context:4"), sequence_dim_name="context").scope():
        for ours, theirs in zip(gradients(), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)

"""Lookups in embedding tables, tied ones included: numbers of one device, and sums in float32 on each device."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.slow_cases import crossed, slow
from support.strategy_models import STRATEGIES, assert_same_numbers, fsdp, scope

import keras_dist as kd
from keras_dist.sharding.lookups import sums_of_rows

ROWS, LENGTH, WIDTH, VOCABULARY = 16, 8, 16, 32
random = np.random.default_rng(0)
X, Y = (random.integers(1, VOCABULARY, (ROWS, LENGTH), "int32") for _ in range(2))


def tied(policy=None):
    """A language model that multiplies with its table for the logits."""
    embedding = layers.ReversibleEmbedding(VOCABULARY, WIDTH, mask_zero=True, dtype=policy, name="embedding")
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Dense(WIDTH, "tanh", dtype=policy, name="hidden")(embedding(tokens))
    model = keras.Model(tokens, embedding(x, reverse=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=1.0), loss, metrics=["accuracy"])
    return model


def fitted(build, distribution=None, x=X, y=Y):
    keras.utils.set_random_seed(0)
    with scope(distribution):
        model = build()
        history = model.fit(x, y, batch_size=len(x), epochs=2, verbose=0, shuffle=False).history
        predictions = model.predict(x, verbose=0)
        return {"fit": history, "predict": predictions, "weights": [np.asarray(weight) for weight in model.weights]}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["DP", "ZeRO-1", "HSDP", "FSDP x TP"])
def test_tied_tables_have_the_numbers_of_one_device(strategy, shard_small_optimizer_state):
    assert_same_numbers(fitted(tied, STRATEGIES[strategy](tied)), fitted(tied), 1e-5)


def test_rows_that_no_axis_divides():
    x, y = X[:5], Y[:5]
    assert_same_numbers(fitted(tied, kd.DataParallel(), x, y), fitted(tied, None, x, y), 1e-5)


def looks_up(policy=None, kind=layers.Embedding):
    """Devices have 128 columns or more of each row of the table."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = kind(64, 1024, mask_zero=True, dtype=policy, name="embedding")(tokens)
    model = keras.Model(tokens, layers.Dense(VOCABULARY)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    ("strategy", "microbatches"), [slow("FSDP", 1), ("FSDP, resharding", 1), ("FSDP", 2), slow("HSDP", 1)]
)
def test_rows_that_devices_exchange(strategy, microbatches):
    distribution = STRATEGIES[strategy](looks_up).with_step_options(kd.StepOptions(microbatches=microbatches))
    with distribution.scope():
        table = looks_up().get_layer("embedding").embeddings
        assert distribution.get_variable_layout(table).axes == (None, "fsdp")
    x = X - (X == 1)  # some are masked
    assert_same_numbers(fitted(looks_up, distribution, x, Y), fitted(looks_up, None, x, Y), 1e-5)


class Head(layers.Layer):
    """Multiplies with the table of another layer, as the masked language models of KerasHub do."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, x):
        return self.table(x, reverse=True)


def test_reversible_tables_that_are_only_looked_up():
    """Their rows are exchanged as those of an `Embedding`; a table that a layer multiplies with is gathered."""

    def with_head(kind):
        tokens = keras.Input((LENGTH,), dtype="int32")
        table = kind(64, 1024, mask_zero=True, name="embedding")
        model = keras.Model(tokens, Head(table)(table(tokens)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def planned(build, kind):
        return kd.plan(lambda: build(kind=kind), fsdp(), (X[:8], Y[:8]))

    reversible, plain = (planned(looks_up, kind) for kind in (layers.ReversibleEmbedding, layers.Embedding))
    assert reversible.wire_bytes == plain.wire_bytes
    for plan, is_gathered in ((reversible, False), (planned(with_head, layers.ReversibleEmbedding), True)):
        gathered = [each.bytes for each in plan.collectives if each.kind == "all-gather"]
        assert (4 * 64 * 1024 in gathered) == is_gathered


def test_replicas_sum_in_bfloat16_on_a_mesh_with_other_axes():
    def build():
        return looks_up("mixed_bfloat16")

    rules = kd.LayoutMap(kd.create_device_mesh("replica:2,fsdp:2,model:2"))
    rules["dense/kernel"] = (None, "model")
    found, expected = fitted(build, fsdp(layout_map=rules))["fit"], fitted(build)["fit"]
    assert_same_numbers(found, expected, 5e-3)


def test_one_index_for_each_row():
    def build():
        token = keras.Input((), dtype="int32")
        table = layers.Embedding(64, 1024, dtype="mixed_bfloat16", name="embedding")
        model = keras.Model(token, layers.Dense(VOCABULARY)(ops.cast(table(token), "float32")))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = X[:, 0], Y[:, 0]
    assert_same_numbers(fitted(build, STRATEGIES["FSDP"](build), x, y)["fit"], fitted(build, None, x, y)["fit"], 1e-3)


@pytest.mark.parametrize(("strategy", "num_rows"), [("DP", 64), slow("FSDP", 64), slow("DP", 65536), ("FSDP", 65536)])
def test_lookups_are_summed_in_float32(strategy, num_rows):
    """Each device looks up one row 800 times; a sum in bfloat16 would stay at 256."""

    def build():
        tokens = keras.Input((400,), dtype="int32")
        table = layers.Embedding(num_rows, 8, embeddings_initializer="zeros", dtype="mixed_bfloat16")
        model = keras.Model(tokens, table(tokens))
        model.compile(keras.optimizers.SGD(1.0), loss=lambda y, x: ops.sum(ops.cast(x, "float32"), axis=(1, 2)))
        return model

    x = np.ones((16, 400), "int32")
    expected = np.zeros((num_rows, 8), "float32")
    expected[1] = -400.0  # the mean over 16 rows of the sum over 400 positions
    (table,) = fitted(build, STRATEGIES[strategy](build), x, x)["weights"]
    np.testing.assert_allclose(table, 2 * expected, rtol=2**-8)


@pytest.mark.parametrize(("dtype", "num_rows"), crossed(["uint8", "int32"], [50, 1000]))
def test_indices_count_from_the_end_and_those_beyond_it_have_no_gradient(num_rows, dtype):
    """A table with few and with many more rows than a device looks up."""
    generator = np.random.default_rng(0)
    indices = generator.integers(-60 if dtype == "int32" else 0, 60, (1, 100)).astype(dtype)
    gradient = generator.normal(size=(1, 100, 4)).astype("bfloat16")
    table = jax.ShapeDtypeStruct((num_rows, 4), "float32")
    rows = jax.linear_transpose(lambda table: jax.numpy.take(table, indices, axis=0), table)
    expected = rows(jax.numpy.asarray(gradient, "float32"))[0]
    actual = sums_of_rows(jax.numpy.asarray(indices), jax.numpy.asarray(gradient), (num_rows, 4))
    np.testing.assert_allclose(actual.astype("float32"), expected, rtol=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["DP", "FSDP"])
def test_rows_of_a_table_that_is_cast_first_are_equal(strategy):
    """Predictions in bfloat16 are those of one device to the last bit, and losses to the precision of gradients."""

    def build():
        return tied("mixed_bfloat16")

    def predicted(distribution):
        keras.utils.set_random_seed(0)
        with scope(distribution):
            tokens = keras.Input((LENGTH,), dtype="int32")
            table = layers.Embedding(VOCABULARY, 24, dtype="mixed_bfloat16")
            return keras.Model(tokens, table(tokens)).predict(X, verbose=0)

    distribution = STRATEGIES[strategy](build)
    np.testing.assert_array_equal(predicted(distribution).astype("f4"), predicted(None).astype("f4"))
    actual, expected = (fitted(build, each)["fit"]["loss"] for each in (distribution, None))
    assert_same_numbers(actual, expected, 5e-3)


def test_a_step_that_runs_eagerly_is_that_of_keras():
    def build():
        model = tied()
        model.compile(model.optimizer, model.loss, run_eagerly=True)
        return model

    distribution = kd.DataParallel(devices=jax.devices()[:2])
    assert_same_numbers(fitted(build, distribution)["fit"], fitted(tied)["fit"], 1e-5)

"""Steps on any number of rows: each device computes its share, with the numbers of one device."""

import functools
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.applied_functions import Applied
from support.keras_scenarios import start_anew
from support.kernels_on_cpus import KERNEL, use_kernel_of
from support.slow_cases import slow
from support.strategy_models import MODELS, STRATEGIES, assert_same_numbers, fsdp, model_parallel, scope

import keras_dist as kd
from keras_dist.steps.step_state import recorded_calls

DEVICES, WIDTH = 8, 64
DISTRIBUTIONS = {
    "DP": kd.DataParallel,
    "ZeRO-1": functools.partial(kd.DataParallel, shard_optimizer_state=True),
    "FSDP": fsdp,
    "HSDP": functools.partial(fsdp, "replica:2,fsdp:4", replica_axis="replica"),
}


def numbers_of(name, distribution, rows):
    """Returns the numbers of `fit` on batches of a number of rows and of 2, and of `predict` on all."""
    build, x, y = MODELS[name]
    x, y = (np.concatenate([array, array[::-1]])[: rows + 2] for array in (x, y))
    weights = np.random.default_rng(0).uniform(0.5, 2, y.shape[:2] if y.ndim > 1 else y.shape)
    start_anew()
    with scope(distribution):
        model = build("sgd")
        fitted = model.fit(x, y, batch_size=rows, sample_weight=weights, epochs=2, verbose=0, shuffle=False)
        return {
            "fit": fitted.history,
            "predict": model.predict(x, verbose=0),
            "weights": [np.asarray(variable.value) for variable in model.variables],
        }


CASES = [
    ("mixture", "FSDP", 11),  # batch normalization: tests/data/test_keras_batches.py
    ("transformer", "FSDP", 11),
    *((name, strategy, rows) for name in MODELS for strategy in DISTRIBUTIONS for rows in (3, 13)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy", "rows"), CASES)
@pytest.mark.usefixtures("shard_small_optimizer_state")
def test_numbers_are_those_of_one_device(name, strategy, rows):
    distribution = DISTRIBUTIONS[strategy]()
    assert distribution.steps.rows_of_device("train", rows) == -(-rows // DEVICES)
    actual = numbers_of(name, distribution, rows)
    assert_same_numbers(actual, numbers_of(name, None, rows), 1e-5)


def predicted(build, x, distribution):
    start_anew()
    with scope(distribution):
        return build("sgd").predict(x, batch_size=len(x), verbose=0)


def context_parallel(build):
    return kd.DataParallel(kd.create_device_mesh("data:2,context:4"), sequence_dim_name="context")


WITH_REPEATED_ROWS = {
    **{name: STRATEGIES[name] for name in ("TP", "TP, SP", "FSDP x TP", "HSDP x TP")},
    "CP": context_parallel,
}
SLOW = [slow(name, strategy, rows) for name in MODELS for strategy in WITH_REPEATED_ROWS for rows in (3, 13)]


@pytest.mark.parametrize(
    ("name", "strategy", "rows"), [slow("transformer", "TP", 11), ("mixture", "HSDP x TP", 11), *SLOW]
)
def test_predict_splits_rows_also_where_devices_repeat_them(name, strategy, rows):
    build, x, _ = MODELS[name]
    x = np.concatenate([x, x])[:rows]
    distribution = WITH_REPEATED_ROWS[strategy](build)
    assert distribution.steps.rows_of_device("predict", rows) == -(-rows // distribution.num_model_replicas)
    assert distribution.steps.rows_of_device("train", rows) == rows  # as gradients of lookups would be wrong
    assert_same_numbers(predicted(build, x, distribution), predicted(build, x, None), 1e-5)


def wide():
    """A model of sequences with attention, a grouped convolution and wide dense layers."""
    inputs = keras.Input((12, WIDTH))
    x = layers.MultiHeadAttention(4, WIDTH // 4, name="attention")(inputs, inputs)
    x = layers.DepthwiseConv1D(3, padding="same", name="depthwise")(x)
    x = layers.Dense(4 * WIDTH, activation="relu", name="wide")(x)
    x = layers.BatchNormalization(name="norm")(x)
    model = keras.Model(inputs, layers.Dense(8, name="head")(x), name="wide")
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def flops_over_ideal(rows, step):
    one_device = kd.DataParallel(kd.create_device_mesh("data:1", devices=jax.devices()[:1]))
    ideal = kd.plan(wide, one_device, -(-rows // DEVICES), step=step)
    return kd.plan(wide, kd.DataParallel(), rows, step=step).flops / ideal.flops


@pytest.mark.parametrize(
    ("rows", "step"),
    [
        (9, "train"),
        slow(13, "train"),
        slow(13, "test"),
        (13, "predict"),
        *[slow(rows, "train") for rows in (2, 3, 8, 12, 23, 31, 50, 63)],
    ],
)
def test_a_device_computes_its_share_of_rows(rows, step):
    assert 0.9 <= flops_over_ideal(rows, step) <= 1.1


def test_a_plan_lists_attention_once():
    plan = kd.plan(wide, kd.DataParallel(), 13)
    assert [(each.implementation, each.calls) for each in plan.attention] == [("XLA", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_attention_kernels_compute_unequal_shards(platform, monkeypatch):
    """11 rows, of which some are padded, on 8 devices."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(11, 128, 8)).astype("float32"), random.normal(size=(11, 128, 1)).astype("float32")

    visible = np.arange(128) < random.integers(1, 128, (11, 1))

    def trained(distribution):
        start_anew()
        with scope(distribution), recorded_calls() as calls:
            inputs, mask = keras.Input((128, 8)), keras.Input((128,), dtype="bool")
            attended = layers.MultiHeadAttention(1, 64)(inputs, inputs, key_mask=mask, use_causal_mask=True)
            model = keras.Model([inputs, mask], layers.Dense(1)(attended))
            model.compile("sgd", "mse")
            losses = [model.train_on_batch([x, visible], y) for _ in range(2)]
        return [losses, model.get_weights()], {call.implementation for call in calls}

    expected, _ = trained(None)
    use_kernel_of(platform, monkeypatch)
    actual, implementations = trained(kd.DataParallel())
    assert implementations == {KERNEL[platform]}
    assert_same_numbers(actual, expected, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_attention_kernels_of_predict_compute_unequal_shards_and_heads(platform, monkeypatch):
    x = np.random.default_rng(0).normal(size=(11, 128, 8)).astype("float32")

    def build(optimizer):
        inputs = keras.Input((128, 8))
        attended = layers.MultiHeadAttention(2, 64, name="attention")(inputs, inputs, use_causal_mask=True)
        model = keras.Model(inputs, layers.Dense(1)(attended))
        model.compile(optimizer, "mse")
        return model

    expected = predicted(build, x, None)
    use_kernel_of(platform, monkeypatch)
    with recorded_calls() as calls:
        actual = predicted(build, x, STRATEGIES["TP"](lambda: build("sgd")))
    assert {call.implementation for call in calls} == {KERNEL[platform]}
    assert_same_numbers(actual, expected, 2e-5)


def narrow(between=lambda x: x, **options):
    inputs = keras.Input((12, 8))
    model = keras.Model(inputs, layers.Dense(8)(Applied(between)(inputs)))
    model.compile("sgd", "mse", **options)
    return model


def fitted(build, distribution, rows=13):
    """Returns losses and weights after two steps on one batch."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, rows, 12, 8)).astype("float32")
    start_anew()
    with scope(distribution):
        model = build()
        losses = model.fit(x, y, batch_size=rows, epochs=2, verbose=0).history
        return losses, model.get_weights()


def on_two_axes():
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:4,model:2"))
    layout_map[".*kernel"] = (None, "model")
    return model_parallel(layout_map)


EQUAL_SHARDS = {
    "another axis": (
        on_two_axes,
        narrow,
        r"the 4 shards .*\(data:4\), so each row is computed 4 times\.",
    ),
    "microbatches": (
        lambda: kd.DataParallel(step_options=kd.StepOptions(microbatches=2)),
        narrow,
        r"the 8 shards .*\(batch:8\), so each row is computed 8 times\.",
    ),
}


@pytest.mark.parametrize(("make", "build", "message"), EQUAL_SHARDS.values(), ids=EQUAL_SHARDS)
def test_a_step_that_needs_equal_shards_has_them_and_warns_once(make, build, message):
    distribution = make()
    with pytest.warns(UserWarning, match=f"Batches of 13 rows are not divisible by {message}") as found:
        actual = fitted(build, distribution)
    assert len([each for each in found if "rows" in str(each.message)]) == 1
    with warnings.catch_warnings(action="error"):
        fitted(build, distribution, rows=11)
    assert_same_numbers(actual, fitted(build, None), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}], ids=str)
def test_steps_that_are_not_compiled(options):
    build = functools.partial(narrow, **options)
    assert_same_numbers(fitted(build, kd.DataParallel()), fitted(build, None), 1e-5)


def test_steps_that_a_model_overrides_split_rows():
    class Custom(keras.Model):
        def train_step(self, state, data):
            gradients, new_state = jax.grad(self._loss, has_aux=True)(state[0], state[1:], data)
            weights, optimizer = self.optimizer.stateless_apply(state[2], gradients, state[0])
            return {"one": 1.0}, (weights, new_state, optimizer, state[3])

        def _loss(self, weights, state, data):
            y, others = self.stateless_call(weights, state[0], data[0], training=True)
            return ops.mean((y - data[1]) ** 2), others

    def build():
        inputs = keras.Input((4,))
        model = Custom(inputs, layers.Dense(64)(inputs))
        model.compile("sgd", "mse")
        return model

    for step in ("train", "test"):
        flops = [kd.plan(build, kd.DataParallel(), rows, step=step).flops for rows in (13, 16)]
        assert flops[0] == flops[1]

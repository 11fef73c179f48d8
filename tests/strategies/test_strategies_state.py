"""Models move between strategies: in the middle of training, through files, quantized, with LoRA, deferred."""

import contextlib
import functools
import itertools

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.strategy_models import MODELS, STRATEGIES, fsdp, only_rules, tensor_parallel

import keras_dist as kd
from keras_dist.strategies.shard_dim import shard_one_more_dim

ROWS = 16
X = np.random.default_rng(0).normal(size=(ROWS, 16)).astype("float32")
Y = np.random.default_rng(1).normal(size=(ROWS, 8)).astype("float32")


@pytest.fixture(autouse=True)
def small_slots_too(monkeypatch):
    """ZeRO-1 shards what belongs to small weights, too."""
    module = vars(kd.DataParallel)["get_update_layout"].__globals__
    monkeypatch.setitem(module, "shard_one_more_dim", functools.partial(shard_one_more_dim, min_shard_bytes=0))


def perceptron(optimizer="adam", dropout=0.0):
    """Two dense layers with a norm and a dropout between them."""
    stack = [layers.Dense(32, "relu", name="up"), layers.BatchNormalization(name="norm"), layers.Dropout(dropout)]
    model = keras.Sequential([keras.Input((16,)), *stack, layers.Dense(8, name="down")])
    model.compile(optimizer, "mse")
    return model


def start_anew():
    """Names and seeds as in a new process."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


def installed(distribution):
    """The scope of a distribution, or none."""
    return distribution.scope() if distribution else contextlib.nullcontext()


def distributions():
    """One of each kind, by name; None is one device."""
    names = ("ZeRO-1", "FSDP, resharded", "TP", "HSDP x TP")
    return {"one device": None} | {name: STRATEGIES[name](perceptron) for name in names}


def through_all_pairs(nodes):
    """A round trip that goes from each node to each other one once."""
    left = {node: [other for other in nodes if other != node] for node in nodes}
    stack, path = [nodes[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            path.append(stack.pop())
    return path[::-1]


def lies_as(distribution, variables):
    """Whether variables lie where a distribution wants them."""
    return all(
        v.value.sharding.is_equivalent_to(distribution.get_variable_layout(v).backend_layout, v.value.ndim)
        for v in variables
    )


def test_training_goes_on_after_each_move_from_one_strategy_to_another():
    all_of_them = distributions()
    path = through_all_pairs(list(all_of_them))
    assert len(set(itertools.pairwise(path))) == len(path) - 1 == 20
    start_anew()
    alone = perceptron(dropout=0.2)
    expected = [float(alone.train_on_batch(X, Y)) for _ in path]
    start_anew()
    model, losses = perceptron(dropout=0.2), []
    for name in path:
        distribution = all_of_them[name]
        kd.redistribute(model, distribution)
        with installed(distribution):
            losses.append(float(model.train_on_batch(X, Y)))
            if distribution:
                assert lies_as(distribution, model.weights)
                [velocity] = [v for v in model.optimizer.variables if v.path.endswith("up_kernel_velocity")]
                wanted = distribution.get_update_layout(model.layers[0].kernel).backend_layout
                assert velocity.value.sharding.is_equivalent_to(wanted, 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for ours, theirs in zip(model.weights, alone.weights, strict=True):
        np.testing.assert_allclose(np.asarray(ours.value), np.asarray(theirs.value), rtol=0, atol=1e-4)


def test_files_of_one_strategy_are_read_by_another(tmp_path):
    all_of_them = distributions()
    start_anew()
    alone = perceptron()
    expected = [float(alone.train_on_batch(X, Y)) for _ in range(10)]
    start_anew()
    model, losses = None, []
    for number, distribution in enumerate(all_of_them.values()):
        with installed(distribution):
            model = keras.saving.load_model(tmp_path / f"{number - 1}.keras") if model else perceptron()
            losses += [float(model.train_on_batch(X, Y)) for _ in range(2)]
            model.save(tmp_path / f"{number}.keras")
            if distribution:
                assert lies_as(distribution, model.weights)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_weights_alone_are_saved_and_read(tmp_path):
    with fsdp().scope():
        first = perceptron()
        first.fit(X, Y, verbose=0)
        first.save_weights(path := tmp_path / "all.weights.h5")
        expected = first.predict(X, verbose=0)
    start_anew()
    with STRATEGIES["HSDP x TP"](perceptron).scope():
        second = perceptron()
        second.load_weights(path)
        np.testing.assert_allclose(second.predict(X, verbose=0), expected, atol=1e-5)
        second.set_weights(first.get_weights())
        assert second.layers[0].kernel.value.sharding.shard_shape((16, 32)) == (8, 16)


@pytest.mark.parametrize("make", [fsdp, lambda: fsdp(reshard_after_forward=True), lambda: fsdp("replica:2,fsdp:4")])
def test_deferred_then_materialized_then_fit(make):
    distribution = make()
    with distribution.scope():
        with kd.deferred():
            model = perceptron()
        kd.materialize(model)
        assert lies_as(distribution, model.weights)
        losses = model.fit(X, Y, batch_size=8, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["FSDP", "TP", "HSDP x TP"])
def test_quantized_and_with_lora(name):
    def run(distribution):
        start_anew()
        with installed(distribution):
            model = perceptron("sgd")
            model.layers[0].enable_lora(4)
            model.compile("sgd", "mse")
            losses = [float(model.train_on_batch(X, Y)) for _ in range(3)]
            model.quantize("int8")
            return model, (losses, model.predict(X, verbose=0), np.asarray(model(X)))

    _, expected = run(None)
    distribution = STRATEGIES[name](perceptron)
    model, actual = run(distribution)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=0.02), actual, expected)
    assert model.layers[0]._kernel.value.dtype == "int8"
    assert not model.layers[0]._kernel.value.sharding.is_fully_replicated


class TestInputRules:
    """Keys that end in `/input` lay out what layers are called with."""

    def scope(self, **rules):
        layout_map = kd.LayoutMap(kd.create_device_mesh("data:4,model:2"))
        for name, axes in rules.items():
            layout_map[f"{name}/input"] = axes
        return only_rules(layout_map).scope()

    def test_masks_are_kept(self):
        def run(scope):
            start_anew()
            with scope:
                tokens = keras.Input((6,), dtype="int32")
                x = layers.Embedding(16, 8, mask_zero=True)(tokens)
                model = keras.Model(tokens, layers.LSTM(8, name="lstm")(layers.Dense(8, name="dense")(x)))
                model.compile("sgd", "mse")
                ids = np.random.default_rng(0).integers(0, 3, (ROWS, 6))
                return model.predict(ids, verbose=0), model.train_on_batch(ids, Y), np.asarray(model(ids))

        expected = run(contextlib.nullcontext())
        actual = run(self.scope(dense=("data", None, "model"), lstm=("data", "model", None)))
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5), actual, expected)

    def test_several_dicts_and_names(self):
        seen = {}

        class Sum(keras.Layer):
            def call(self, first, both, scale=None):
                leaves = [first, *both.values(), scale]
                seen[self.name] = [
                    leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
                ]
                return ops.add(first, both["a"]) * both["b"] * scale

        with self.scope(sum=("data", "model")):
            x, scale = ops.ones((8, 4)), ops.ones((4,))
            y = Sum(name="sum")(x, {"a": x, "b": scale}, scale=x)
        np.testing.assert_allclose(y, 2)
        shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in seen["sum"]]
        assert shapes == [(2, 2), (2, 2), (4,), (8, 4)]  # those of fewer dims, and those passed by name, as they are

    def test_what_does_not_fit_names_the_input(self):
        with self.scope(dense=("data", "model")), pytest.raises(ValueError, match=r"the input of 'dense' .*size 3"):
            layers.Dense(4, name="dense")(np.ones((8, 3), "float32"))


def test_two_models_with_two_strategies_take_turns():
    first, second = fsdp(), only_rules(tensor_parallel(perceptron))
    losses = {}
    for turn in range(2):
        for name, distribution in (("first", first), ("second", second)):
            with distribution.scope():
                if turn == 0:
                    start_anew()
                    losses[name] = [perceptron()]
                model, *_ = losses[name]
                with (second if distribution is first else first).scope():
                    pass  # a scope inside of a scope leaves nothing behind
                assert kd.distribution() is distribution
                losses[name].append(float(model.train_on_batch(X, Y)))
                assert lies_as(distribution, model.weights)
    np.testing.assert_allclose(losses["first"][1:], losses["second"][1:], rtol=1e-5)


def test_a_layer_that_is_called_alone_takes_its_weights_as_they_lie():
    x = np.ones((4, 16), "float32")
    with fsdp().scope():
        dense = layers.Dense(32, kernel_initializer="ones")
        np.testing.assert_allclose(dense(x), 16)
        assert dense.kernel.value.sharding.shard_shape((16, 32)) == (2, 32)
        np.testing.assert_allclose(jax.jit(lambda x: dense(x))(x), 16)
        np.testing.assert_allclose(
            jax.jit(lambda w, x: dense.stateless_call(w, [], x)[0])([v.value for v in dense.weights], x), 16
        )


@pytest.mark.parametrize("name", MODELS)
def test_the_mixed_policy_trains_as_on_one_device(name):
    build, x, y = MODELS[name]

    def run(distribution):
        start_anew()
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            with installed(distribution):
                model = build()
                return [float(model.train_on_batch(x, y)[0]) for _ in range(5)]
        finally:
            keras.config.set_dtype_policy("float32")

    np.testing.assert_allclose(run(fsdp()), run(None), rtol=0.01)

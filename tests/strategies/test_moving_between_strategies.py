"""Models move between strategies: during training, through files, quantized, with LoRA, deferred."""

import itertools
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.keras_scenarios import start_anew
from support.slow_cases import slow
from support.strategy_models import STRATEGIES, fsdp, has_layouts_of, model_parallel, scope, tensor_parallel

import keras_dist as kd

ROWS = 16
X = np.random.default_rng(0).normal(size=(ROWS, 16)).astype("float32")
Y = np.random.default_rng(1).normal(size=(ROWS, 8)).astype("float32")

pytestmark = pytest.mark.usefixtures("shard_small_optimizer_state")


def perceptron(optimizer="adam", dropout=0.0):
    """Two dense layers with a norm and a dropout between them."""
    stack = [layers.Dense(32, "relu", name="up"), layers.BatchNormalization(name="norm"), layers.Dropout(dropout)]
    model = keras.Sequential([keras.Input((16,)), *stack, layers.Dense(8, name="down")])
    model.compile(optimizer, "mse")
    return model


def distributions():
    """One distribution of each kind by name; None is one device."""
    names = ("ZeRO-1", "FSDP, resharding", "TP", "HSDP x TP")
    return {"one device": None} | {name: STRATEGIES[name](perceptron) for name in names}


def through_all_pairs(nodes):
    """A round trip with one step from each node to each other node."""
    left = {node: [other for other in nodes if other != node] for node in nodes}
    stack, path = [nodes[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            path.append(stack.pop())
    return path[::-1]


@pytest.mark.slow
def test_training_continues_after_each_move_between_strategies():
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
        with scope(distribution):
            losses.append(float(model.train_on_batch(X, Y)))
            if distribution:
                assert has_layouts_of(distribution, model.weights)
                [velocity] = [v for v in model.optimizer.variables if v.path.endswith("up_kernel_velocity")]
                expected_layout = distribution.get_update_layout(model.layers[0].kernel).backend_layout
                assert velocity.value.sharding.is_equivalent_to(expected_layout, 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for ours, theirs in zip(model.weights, alone.weights, strict=True):
        np.testing.assert_allclose(np.asarray(ours.value), np.asarray(theirs.value), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_saved_model_continues_under_another_strategy(tmp_path):
    all_of_them = distributions()
    start_anew()
    alone = perceptron()
    expected = [float(alone.train_on_batch(X, Y)) for _ in range(10)]
    start_anew()
    model, losses = None, []
    for number, distribution in enumerate(all_of_them.values()):
        with scope(distribution):
            model = keras.saving.load_model(tmp_path / f"{number - 1}.keras") if model else perceptron()
            losses += [float(model.train_on_batch(X, Y)) for _ in range(2)]
            model.save(tmp_path / f"{number}.keras")
            if distribution:
                assert has_layouts_of(distribution, model.weights)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


WITHOUT_KERAS_DIST = """
import sys
sys.modules["keras_dist"] = None  # importing it raises an ImportError
import keras
import numpy as np
folder = sys.argv[1]
loaded = keras.saving.load_model(f"{folder}/model.keras")
loaded.load_weights(f"{folder}/model.weights.h5")
np.save(f"{folder}/predicted.npy", loaded.predict(np.load(f"{folder}/rows.npy"), verbose=0))
assert len(loaded.fit(np.ones((4, 16)), np.ones((4, 8)), verbose=0).history["loss"]) == 1
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_keras_loads_what_was_saved_without_keras_dist(tmp_path):
    with fsdp().scope():
        model = perceptron()
        model.fit(X, Y, verbose=0)
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
        expected = model.predict(X, verbose=0)
    np.save(tmp_path / "rows.npy", X)
    subprocess.run([sys.executable, "-c", WITHOUT_KERAS_DIST, str(tmp_path)], check=True)
    np.testing.assert_allclose(np.load(tmp_path / "predicted.npy"), expected, rtol=1e-5, atol=1e-6)


def test_weights_saved_under_one_strategy_load_under_another(tmp_path):
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


@pytest.mark.parametrize(
    "make", [slow(fsdp), slow(lambda: fsdp(reshard_after_forward=True)), lambda: fsdp("replica:2,fsdp:4")]
)
def test_a_deferred_model_is_materialized_and_trained(make):
    distribution = make()
    with distribution.scope():
        with kd.deferred():
            model = perceptron()
        kd.materialize(model)
        assert has_layouts_of(distribution, model.weights)
        losses = model.fit(X, Y, batch_size=8, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["TP", *(slow(n) for n in ("FSDP", "HSDP x TP"))])
def test_lora_then_quantization(name):
    def run(distribution):
        start_anew()
        with scope(distribution):
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


def test_two_models_under_two_strategies_take_turns():
    first, second = fsdp(), model_parallel(tensor_parallel(perceptron))
    losses = {}
    for turn in range(2):
        for name, distribution in (("first", first), ("second", second)):
            with distribution.scope():
                if turn == 0:
                    keras.utils.clear_session(free_memory=False)
                    keras.utils.set_random_seed(0)
                    losses[name] = [perceptron()]
                model, *_ = losses[name]
                with (second if distribution is first else first).scope():
                    pass  # an inner scope restores the outer one
                assert kd.distribution() is distribution
                losses[name].append(float(model.train_on_batch(X, Y)))
                assert has_layouts_of(distribution, model.weights)
    np.testing.assert_allclose(losses["first"][1:], losses["second"][1:], rtol=1e-5)


def test_a_layer_called_alone_computes_with_its_sharded_weights():
    x = np.ones((4, 16), "float32")
    with fsdp().scope():
        dense = layers.Dense(32, kernel_initializer="ones")
        np.testing.assert_allclose(dense(x), 16)
        assert dense.kernel.value.sharding.shard_shape((16, 32)) == (2, 32)
        np.testing.assert_allclose(jax.jit(lambda x: dense(x))(x), 16)
        np.testing.assert_allclose(
            jax.jit(lambda w, x: dense.stateless_call(w, [], x)[0])([v.value for v in dense.weights], x), 16
        )

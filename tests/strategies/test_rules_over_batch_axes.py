"""Weights that rules shard over axes of the batch: XLA computes some products with them and some gradients wrongly."""

import keras
import numpy as np
import pytest
from keras import layers
from support.keras_scenarios import start_anew
from support.strategy_models import Experts, assert_same_numbers, scope

import keras_dist as kd


def dense_layers():
    """Layers of which XLA gives the first a wrong output."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, activation="tanh", name="a")(inputs)
    x = layers.Dense(48, activation="tanh", name="b")(x)
    x = layers.Dense(32, activation="tanh", name="c")(x)
    return keras.Model(inputs, layers.Dense(8, name="out")(x))


def attention():
    """A block of which XLA gives the query's kernel a wrong gradient."""
    inputs = keras.Input((11, 24))
    y = layers.LayerNormalization(name="norm")(inputs)
    y = layers.MultiHeadAttention(4, 6, name="attention")(y, y)
    return keras.Model(inputs, layers.Add()([inputs, y]))


DENSE_RULES = {
    "a/kernel": ("y", "x"),
    "[ab]/bias": (("x", "y"),),
    "c/kernel": (None, "y"),
    "out/kernel": ("y", "x"),
    "out/bias": ("y",),
}
ATTENTION_RULES = {
    "norm/beta": (("x", "y"),),
    "attention/query/kernel": ("x", "data", None),
    "attention/attention_output/kernel": ("y", "x", None),
}


def distribution(rules, batch_dim_name, **options):
    layout_map = kd.LayoutMap.from_rules(list(rules.items()), kd.create_device_mesh("data:2,x:2,y:2"))
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name=batch_dim_name, **options)


def numbers(build, make_distribution=None):
    """The loss of a batch, the weights after it, and the predictions, in a step, a traced and an eager call."""
    start_anew()
    active = None if make_distribution is None else make_distribution()
    with scope(active):
        model = build()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        random = np.random.default_rng(0)
        x, y = (random.normal(size=(16, *t.shape[1:])).astype("float32") for t in (model.inputs[0], model.outputs[0]))
        placed = x if active is None else active.distribute_batch(x)
        return {
            "loss": model.train_on_batch(x, y),
            "weights": {weight.path: np.asarray(weight.value) for weight in model.weights},
            "predicted": model.predict_on_batch(x),
            "called": np.asarray(model(placed)),
        }


@pytest.mark.parametrize("batch_axes", ["data", ("data", "x"), ("data", "x", "y")])
@pytest.mark.parametrize(("build", "rules"), [(dense_layers, DENSE_RULES), (attention, ATTENTION_RULES)])
def test_numbers_are_those_of_one_device(build, rules, batch_axes):
    assert_same_numbers(numbers(build, lambda: distribution(rules, batch_axes)), numbers(build), 1e-5)


class OwnStrategy(kd.Distribution):
    """A strategy of a user, which says no more than where variables are stored."""

    def __init__(self, rules, batch_dim_name):
        self._chooser = distribution(rules, batch_dim_name)
        super().__init__(self._chooser.device_mesh, batch_dim_name)

    def get_variable_layout(self, variable):
        return self._chooser.get_variable_layout(variable)


def test_a_strategy_of_a_user_gives_the_numbers_of_one_device():
    found = numbers(dense_layers, lambda: OwnStrategy(DENSE_RULES, ("data", "x")))
    assert_same_numbers(found, numbers(dense_layers), 1e-5)


def assert_compute_axes(active, weight, stored, expected):
    assert active.get_variable_layout(weight).axes == stored
    assert active.get_compute_layout(weight).axes == expected


@pytest.mark.parametrize(
    ("make", "axes", "expected"),
    [
        (layers.Dense, ("x", "y"), (None, "y")),
        (layers.Dense, (("x", "y"), "data"), ("y", None)),
        (layers.Dense, ("y", None), ("y", None)),
        (lambda size: layers.Embedding(size, size), (("data", "x"), None), (("data", "x"), None)),  # rows are sent
        (lambda size: layers.Embedding(size, size), ("data", ("x", "y")), ("data", "y")),
    ],
)
def test_layers_compute_with_weights_gathered_over_axes_of_the_batch(make, axes, expected):
    active = distribution({".*(kernel|embeddings)": axes}, ("data", "x"))
    with active.scope():
        layer = make(8)
        layer.build((None, 8))
    assert_compute_axes(active, layer.weights[0], axes, expected)


def test_experts_stay_on_their_devices():
    axes = ("x", None, "data")
    active = distribution({".*up": axes}, ("data", "x"), expert_dim_name="x")
    with active.scope():
        layer = Experts()
        layer.build((None, 8))
    assert_compute_axes(active, layer.up, axes, ("x", None, None))

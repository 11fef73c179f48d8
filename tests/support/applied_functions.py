"""A model that applies a function to activations, under distributions that shard them along every dim."""

import keras
import numpy as np
from keras import layers

import keras_dist as kd
from support.keras_scenarios import start_anew
from support.strategy_models import scope

ROWS, WIDTH = 8, 16
MESHES = {
    "tensor parallel": ("data:4,model:2", ("data", None, "model")),
    "sequence parallel": ("data:2,model:4", ("data", "model", None)),
    "context parallel": ("data:2,context:4", ("data", "context", None)),
    "sequence and context parallel": ("data:2,context:2,model:2", ("data", ("context", "model"), None)),
    "all": ("data:2,context:2,model:2", ("data", "context", "model")),
}


def distribution_of(name, layers=("up",)):
    """A distribution with rules for the outputs of layers."""
    axes, outputs = MESHES[name]
    layout_map = kd.LayoutMap(kd.create_device_mesh(axes))
    for layer in layers:
        layout_map[f"{layer}/output"] = outputs
    sequences = {"sequence_dim_name": "context"} if "context" in axes else {}
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", **sequences)


class Applied(layers.Layer):
    """A dense layer, and a function of its outputs."""

    def __init__(self, function):
        super().__init__(name="applied")
        self.function, self.up = function, layers.Dense(WIDTH, name="up")

    def build(self, shape):
        self.up.build(shape)

    def call(self, x):
        return self.function(self.up(x))


def trained(function, length, distribution, rows=ROWS):
    """Losses and weights of two steps of a model that applies a function to activations (rows, length, WIDTH)."""
    start_anew()
    x = np.random.default_rng(0).standard_normal((rows, length, 4)).astype("float32")
    with scope(distribution):
        inputs = keras.Input((length, 4), batch_size=rows)
        model = keras.Model(inputs, layers.Dense(3)(Applied(function)(inputs)))
        model.compile("sgd", "mse")
        y = np.random.default_rng(1).standard_normal(model.output.shape).astype("float32")
        return [model.train_on_batch(x, y) for _ in range(2)], model.get_weights()

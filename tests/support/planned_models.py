"""Models and layouts that the tests of planning share."""

import jax
import keras
import numpy as np
from jax.experimental import pallas
from keras import layers

import keras_dist as kd


class LargestDim(kd.Distribution):
    """Shards the largest dim of every variable that the axes divide, as a user's own distribution may."""

    def __init__(self, device_mesh, axes, batch_dim_name):
        super().__init__(device_mesh, batch_dim_name)
        self.axes = tuple(axes)

    def get_variable_layout(self, variable):
        size = int(np.prod([self.device_mesh.axis_sizes[name] for name in self.axes]))
        fitting = [dim for dim, length in enumerate(variable.shape) if length % size == 0]
        axes = [None] * len(variable.shape)
        if fitting and len(variable.shape) > 1:
            axes[max(fitting, key=lambda dim: variable.shape[dim])] = self.axes
        return kd.TensorLayout(axes, self.device_mesh)


def rules(mesh, patterns, batch="data"):
    layout_map = kd.LayoutMap(mesh)
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name=batch)


def tensor_parallel(mesh):
    return rules(
        mesh,
        {
            ".*(query|key|value)/kernel": (None, "model", None),
            ".*attention_output/kernel": ("model", None, None),
            ".*(up|head)/kernel": (None, "model"),
            ".*down/kernel": ("model", None),
        },
    )


LAYOUTS = {
    "data parallel": lambda: kd.DataParallel(),
    "replicated on a 2-D mesh": lambda: rules(kd.create_device_mesh("data:4,model:2"), {}),
    "tensor parallel": lambda: tensor_parallel(kd.create_device_mesh("data:2,model:4")),
    "fully sharded": lambda: LargestDim(kd.create_device_mesh("data:8"), ["data"], "data"),
    "sharded inside, replicated outside": lambda: LargestDim(
        kd.create_device_mesh("replica:2,shard:4"), ["shard"], ("replica", "shard")
    ),
    "over two axes of three": lambda: LargestDim(
        kd.create_device_mesh("data:2,fsdp:2,model:2"), ["fsdp", "model"], ("data", "fsdp")
    ),
}


def gpt(depth=2, width=32, heads=4, vocabulary=64, length=16, optimizer="adamw"):
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width, name="embedding")(tokens)
    for number in range(depth):
        y = layers.LayerNormalization(name=f"block{number}_norm1")(x)
        y = layers.MultiHeadAttention(heads, width // heads, name=f"block{number}_attention")(
            y, y, use_causal_mask=True
        )
        x = layers.Add(name=f"block{number}_add1")([x, y])
        y = layers.LayerNormalization(name=f"block{number}_norm2")(x)
        y = layers.Dense(4 * width, activation="relu", name=f"block{number}_up")(y)
        y = layers.Dense(width, name=f"block{number}_down")(y)
        x = layers.Add(name=f"block{number}_add2")([x, y])
    logits = layers.Dense(vocabulary, use_bias=False, name="head")(layers.LayerNormalization(name="norm")(x))
    model = keras.Model(tokens, logits, name="gpt")
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def perceptron():
    model = keras.Sequential(
        [keras.Input((16,)), layers.Dense(64, "relu", name="up"), layers.Dropout(0.1), layers.Dense(8, name="down")],
        name="perceptron",
    )
    model.compile("sgd", "mse")
    return model


def convnet():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(16, name="up"),
            layers.Dense(8, name="head"),
        ],
        name="convnet",
    )
    model.compile(keras.optimizers.Adam(use_ema=True), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Residual(keras.Model):
    """A subclassed model whose layers are built at its first call, one of them frozen."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.frozen = layers.Dense(32, name="frozen", trainable=False)
        self.up = layers.Dense(64, name="up")
        self.down = layers.Dense(32, name="down")
        self.head = layers.Dense(8, name="head")

    def call(self, x):
        x = self.frozen(x)
        return self.head(x + self.down(keras.ops.gelu(self.up(x))))


def subclassed():
    model = Residual(name="residual")
    model.compile(keras.optimizers.SGD(momentum=0.9, nesterov=True), "mse", metrics=["mae"])
    return model


class Kernel(layers.Layer):
    """A layer whose operation is written in Pallas, which compiles it for TPUs and GPUs only."""

    def call(self, x):
        def copy(source, destination):
            destination[...] = source[...]

        return pallas.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def compute_output_shape(self, input_shape):
        return input_shape


def with_kernel():
    model = keras.Sequential([keras.Input((16,)), Kernel(), layers.Dense(8, name="down")], name="mlp")
    model.compile("sgd", "mse")
    return model


def two_branches():
    left, right = keras.Input((16,), name="left"), keras.Input((8, 8), name="right")
    joined = layers.Concatenate()([layers.Dense(24, name="up")(left), layers.GRU(16)(right)])
    outputs = {"a": layers.Dense(8, name="a")(joined), "b": layers.Dense(1, name="b")(joined)}
    model = keras.Model({"left": left, "right": right}, outputs, name="two_branches")
    model.compile("rmsprop", {"a": "sparse_categorical_crossentropy", "b": "mse"}, metrics={"b": ["mae"]})
    return model


def _random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def _classes(*shape, count=8):
    return np.random.default_rng(0).integers(0, count, size=shape).astype("int32")


ROWS = 16
MODELS = {
    "gpt": (gpt, (_classes(ROWS, 16, count=64), _classes(ROWS, 16, count=64))),
    "perceptron": (perceptron, (_random(ROWS, 16), _random(ROWS, 8))),
    "convnet": (convnet, (_random(ROWS, 8, 8, 3), _classes(ROWS))),
    "subclassed": (subclassed, (_random(ROWS, 32), _random(ROWS, 8))),
    "two branches": (
        two_branches,
        ({"left": _random(ROWS, 16), "right": _random(ROWS, 8, 8)}, {"a": _classes(ROWS), "b": _random(ROWS, 1)}),
    ),
}

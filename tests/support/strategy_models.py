"""Models and distributions that the tests of strategies and of tensor parallel rules share."""

import keras
import numpy as np
from keras import layers, ops

import keras_dist as kd

ROWS, LENGTH, WIDTH, VOCABULARY = 16, 8, 16, 32


@keras.saving.register_keras_serializable("keras_dist_tests")
class Experts(keras.Layer):
    """A mixture of experts: each token goes to the two that a router likes most. Bare weights of three dims."""

    def __init__(self, experts=8, hidden=32, top_k=2, **kwargs):
        super().__init__(**kwargs)
        self.experts, self.hidden, self.top_k = experts, hidden, top_k

    def build(self, shape):
        width = shape[-1]
        self.router = self.add_weight(shape=(width, self.experts), name="router")
        self.up = self.add_weight(shape=(self.experts, width, self.hidden), name="up")
        self.down = self.add_weight(shape=(self.experts, self.hidden, width), name="down")

    def call(self, x):
        chances = ops.softmax(ops.matmul(x, self.router))
        best, which = ops.top_k(chances, self.top_k)
        chosen = ops.sum(ops.one_hot(which, self.experts, dtype=x.dtype) * best[..., None], axis=-2)
        hidden = ops.gelu(ops.einsum("...d,edh->...eh", x, self.up))
        return ops.einsum("...eh,ehd,...e->...d", hidden, self.down, chosen)

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        return super().get_config() | {"experts": self.experts, "hidden": self.hidden, "top_k": self.top_k}


def block(x, name="block", dropout=0.0):
    """Attention and two dense layers, each with a norm before and the sum behind."""
    y = layers.LayerNormalization(name=f"{name}_norm1")(x)
    y = layers.MultiHeadAttention(4, WIDTH // 4, dropout=dropout, name=f"{name}_attention")(y, y, use_causal_mask=True)
    x = layers.Add(name=f"{name}_add1")([x, y])
    y = layers.LayerNormalization(name=f"{name}_norm2")(x)
    y = layers.Dense(4 * WIDTH, activation="gelu", name=f"{name}_up")(y)
    y = layers.Dense(WIDTH, name=f"{name}_down")(y)
    y = layers.Dropout(dropout, name=f"{name}_dropout")(y)
    return layers.Add(name=f"{name}_add2")([x, y])


def transformer(optimizer="adam", dropout=0.0):
    """Tokens in, logits of tokens out."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = block(layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens), dropout=dropout)
    x = layers.LayerNormalization(name="norm")(x)
    model = keras.Model(tokens, layers.Dense(VOCABULARY, name="head")(x), name="transformer")
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def convnet(optimizer="adam"):
    """Convolutions with batch norms, one with a residual. No bias before a norm: Adam would amplify its rounding."""
    images = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False, name="stem")(images)
    x = layers.ReLU()(layers.BatchNormalization(name="stem_norm")(x))
    y = layers.Conv2D(32, 1, use_bias=False, name="wide")(x)
    y = layers.ReLU()(layers.BatchNormalization(name="wide_norm")(y))
    y = layers.Conv2D(16, 3, padding="same", use_bias=False, name="narrow")(y)
    x = layers.Add()([x, layers.BatchNormalization(name="narrow_norm")(y)])
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(images, layers.Dense(8, name="head")(x), name="convnet")
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def mixture(optimizer="adam"):
    """A layer of experts between dense ones, for sequences of vectors."""
    inputs = keras.Input((LENGTH, WIDTH))
    x = layers.Dense(WIDTH, name="first")(inputs)
    x = layers.Add()([x, Experts(name="experts")(layers.LayerNormalization(name="norm")(x))])
    model = keras.Model(inputs, layers.Dense(4, name="head")(x), name="mixture")
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def _data(*shape, classes=0, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, classes, shape).astype("int32") if classes else random.normal(size=shape).astype("f4")


MODELS = {
    "transformer": (
        transformer,
        _data(ROWS, LENGTH, classes=VOCABULARY),
        _data(ROWS, LENGTH, classes=VOCABULARY, seed=1),
    ),
    "convnet": (convnet, _data(ROWS, 8, 8, 3), _data(ROWS, classes=8)),
    "mixture": (mixture, _data(ROWS, LENGTH, WIDTH), _data(ROWS, LENGTH, 4, seed=1)),
}


def fsdp(axes="fsdp:8", layout_map=None, **options):
    """Fully sharded, tiny weights too."""
    mesh = kd.create_device_mesh(axes) if layout_map is None else None
    return kd.FullyShardedDataParallel(mesh, layout_map=layout_map, min_shard_bytes=0, **options)


def tensor_parallel(build, axes="data:4,model:2", sequence_parallel=False):
    """Rules that the model's program gives, over the mesh's axis "model"."""
    return kd.tensor_parallel_layout_map(build, kd.create_device_mesh(axes), "model", sequence_parallel)


def only_rules(layout_map):
    """The rules, with the batch over all axes but "model"."""
    batch = tuple(name for name in layout_map.device_mesh.axis_names if name != "model")
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name=batch)


STRATEGIES = {
    "DP": lambda build: kd.DataParallel(),
    "ZeRO-1": lambda build: kd.DataParallel(shard_optimizer_state=True),
    "FSDP": lambda build: fsdp(),
    "FSDP, resharded": lambda build: fsdp(reshard_after_forward=True),
    "HSDP": lambda build: fsdp("replica:2,fsdp:4"),
    "TP": lambda build: only_rules(tensor_parallel(build)),
    "TP, SP": lambda build: only_rules(tensor_parallel(build, sequence_parallel=True)),
    "FSDP x TP": lambda build: fsdp(layout_map=tensor_parallel(build)),
    "FSDP x TP, SP, resharded": lambda build: fsdp(
        layout_map=tensor_parallel(build, sequence_parallel=True), reshard_after_forward=True
    ),
    "HSDP x TP": lambda build: fsdp(layout_map=tensor_parallel(build, "replica:2,fsdp:2,model:2")),
}

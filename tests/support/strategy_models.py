"""Models, distributions and checks that the tests of strategies share."""

import contextlib

import jax
import keras
import numpy as np
from keras import layers, ops

import keras_dist as kd

ROWS, LENGTH, WIDTH, VOCABULARY = 16, 8, 16, 32


@keras.saving.register_keras_serializable("keras_dist_tests")
class Experts(keras.Layer):
    """A mixture of experts: a router sends each token to two of them. The weights are bare, with three dims."""

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
    """A transformer block: attention and two dense layers, each with a norm before and a residual after it."""
    y = layers.LayerNormalization(name=f"{name}_norm1")(x)
    y = layers.MultiHeadAttention(4, WIDTH // 4, dropout=dropout, name=f"{name}_attention")(y, y, use_causal_mask=True)
    x = layers.Add(name=f"{name}_add1")([x, y])
    y = layers.LayerNormalization(name=f"{name}_norm2")(x)
    y = layers.Dense(4 * WIDTH, activation="gelu", name=f"{name}_up")(y)
    y = layers.Dense(WIDTH, name=f"{name}_down")(y)
    y = layers.Dropout(dropout, name=f"{name}_dropout")(y)
    return layers.Add(name=f"{name}_add2")([x, y])


def transformer(optimizer="adam", dropout=0.0):
    """A language model: tokens in, logits out."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = block(layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens), dropout=dropout)
    x = layers.LayerNormalization(name="norm")(x)
    model = keras.Model(tokens, layers.Dense(VOCABULARY, name="head")(x), name="transformer")
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def convnet(optimizer="adam"):
    """Convolutions with batch norms and a residual. No bias before a norm: Adam would amplify its rounding errors."""
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
    """A mixture of experts between dense layers, for sequences of vectors."""
    inputs = keras.Input((LENGTH, WIDTH))
    x = layers.Dense(WIDTH, name="first")(inputs)
    x = layers.Add()([x, Experts(name="experts")(layers.LayerNormalization(name="norm")(x))])
    model = keras.Model(inputs, layers.Dense(4, name="head")(x), name="mixture")
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


class OwnStep(keras.Model):
    """A model whose train step computes its gradients itself."""

    def train_step(self, state, data):
        weights, others, optimizer, metrics = state

        def loss(weights):
            outputs, _ = self.stateless_call(weights, others, data[0])
            return ops.sum(outputs)

        value, gradients = jax.value_and_grad(loss)(weights)
        weights, optimizer = self.optimizer.stateless_apply(optimizer, gradients, weights)
        return {"loss": value}, (weights, others, optimizer, metrics)


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
    """FSDP that shards small weights, too."""
    mesh = kd.create_device_mesh(axes) if layout_map is None else None
    return kd.FullyShardedDataParallel(mesh, layout_map=layout_map, min_shard_bytes=0, **options)


def tensor_parallel(build, axes="data:4,model:2", sequence_parallel=False, sequence_dim_name=None):
    """Tensor parallel rules of a model over the axis "model"."""
    return kd.tensor_parallel_layout_map(
        build, kd.create_device_mesh(axes), "model", sequence_parallel, sequence_dim_name=sequence_dim_name
    )


def model_parallel(layout_map, sequence_dim_name=None):
    """A distribution of the rules alone, with batches over all axes but "model" and that of sequences."""
    batch = tuple(name for name in layout_map.device_mesh.axis_names if name not in ("model", sequence_dim_name))
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name=batch, sequence_dim_name=sequence_dim_name)


STRATEGIES = {
    "DP": lambda build: kd.DataParallel(),
    "ZeRO-1": lambda build: kd.DataParallel(shard_optimizer_state=True),
    "FSDP": lambda build: fsdp(),
    "FSDP, resharding": lambda build: fsdp(reshard_after_forward=True),
    "HSDP": lambda build: fsdp("replica:2,fsdp:4"),
    "TP": lambda build: model_parallel(tensor_parallel(build)),
    "TP, SP": lambda build: model_parallel(tensor_parallel(build, sequence_parallel=True)),
    "FSDP x TP": lambda build: fsdp(layout_map=tensor_parallel(build)),
    "FSDP x TP, SP, resharding": lambda build: fsdp(
        layout_map=tensor_parallel(build, sequence_parallel=True), reshard_after_forward=True
    ),
    "HSDP x TP": lambda build: fsdp(layout_map=tensor_parallel(build, "replica:2,fsdp:2,model:2")),
}


def scope(distribution):
    """The scope of a distribution; None is one device."""
    return distribution.scope() if distribution else contextlib.nullcontext()


def has_layouts_of(distribution, variables):
    """Whether all variables have the layouts that a distribution gives them."""
    return all(
        v.value.sharding.is_equivalent_to(distribution.get_variable_layout(v).backend_layout, v.value.ndim)
        for v in variables
    )


def assert_same_numbers(actual, expected, tolerance):
    """Compares trees of numbers, each array relative to its largest number (absolute if that is below 0.1)."""
    keras.tree.assert_same_structure(actual, expected)
    for (path, got), want in zip(keras.tree.flatten_with_path(actual), keras.tree.flatten(expected), strict=True):
        got, want = np.asarray(got, "float64"), np.asarray(want, "float64")
        limit = tolerance * max(0.1, np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=0, atol=limit, err_msg=str(path))


def two_layers(policy=None, optimizer="adam"):
    """Two dense layers; the first has nearly all weights, (64, 512)."""
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(512, dtype=policy, name="wide"), layers.Dense(8, dtype=policy, name="head")]
    )
    model.compile(optimizer, "mse")
    return model

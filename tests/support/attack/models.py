"""The models of the draws. A script contains the source of its model and of the layers that the model names.

A model whose function has the argument `rate` is random if the rate is not 0, and one with `whole_batch` has batch
normalization if that is True. Both are turned off where microbatches would change the numbers.
"""

import dataclasses
from collections.abc import Callable

import jax
import keras
from keras import layers, ops

MODELS = {}
REGRESSION, CLASSES = '"mse"', "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to draw: its function, and the sources of its data, with fields for `rows` and `length`, and of its loss.

    Args:
        kind: what dim 1 of the inputs is: "vectors" have none, "sequences" have positions, "images" rows of pixels.
        repeats: whether blocks repeat, so that `remat` works.
        mixes_rows: whether a row depends on others, so that microbatches change the numbers.
        backbone: source of a model of KerasHub.
    """

    build: Callable
    x: str
    y: str
    loss: str
    metrics: str
    kind: str
    repeats: bool = False
    mixes_rows: bool = False
    backbone: str = ""


def attacked(kind, x, y, loss=REGRESSION, metrics='["mae"]', name=None, **traits):
    """Adds a function to the models."""

    def add(build):
        MODELS[name or build.__name__] = Model(build, x, y, loss, metrics, kind, **traits)
        return build

    return add


VECTORS, TOKENS, SEQUENCES = "normal({rows}, 8)", "tokens({rows}, {length})", "normal({rows}, {length}, 8)"
IMAGES, FOUR = "normal({rows}, 8, 8, 3)", "normal({rows}, 4)"
FOUR_EACH = "normal({rows}, {length}, 4)"
accuracy = {"loss": CLASSES, "metrics": '["accuracy"]'}


@attacked("vectors", VECTORS, FOUR)
def perceptron(rate):
    x = keras.Input((8,))
    y = layers.Dense(16, activation="gelu", kernel_regularizer="l2")(x)
    y = layers.Dense(16, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(2.0))(layers.Dropout(rate)(y))
    return keras.Model(x, layers.Dense(4)(y))


@attacked("vectors", VECTORS, "classes({rows})", repeats=True, **accuracy)
def residual(rate):
    inputs = keras.Input((8,))
    x = layers.Dense(16)(inputs)
    for _ in range(3):
        y = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(rate)(layers.Dense(16)(y))])
    return keras.Model(inputs, layers.Dense(4)(x))


@attacked("images", IMAGES, "classes({rows})", **accuracy)
def convolutions(whole_batch):
    x = keras.Input((8, 8, 3))
    y = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
    y = layers.BatchNormalization()(y) if whole_batch else layers.GroupNormalization(2)(y)
    y = layers.DepthwiseConv2D(3, padding="same", activation="gelu")(y)
    y = layers.MaxPooling2D(2)(layers.SeparableConv2D(8, 3, padding="same")(y))
    y = layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu")(y)
    y = layers.Conv2D(8, 3, strides=2, groups=2)(layers.UpSampling2D(2)(layers.AveragePooling2D(2)(y)))
    return keras.Model(x, layers.Dense(4)(layers.GlobalAveragePooling2D()(y)))


@attacked("images", IMAGES, FOUR)
def augmented(rate):
    x = keras.Input((8, 8, 3))
    y = layers.RandomFlip()(layers.RandomContrast(rate)(x)) if rate else x
    y = layers.SpatialDropout2D(rate)(layers.Conv2D(4, 3, activation="relu")(y))
    return keras.Model(x, layers.Dense(4)(layers.Flatten()(layers.GaussianNoise(rate)(y))))


@attacked("sequences", SEQUENCES, FOUR_EACH)
def convolutions_1d(whole_batch):
    x = keras.Input((None, 8))
    y = layers.Conv1D(8, 3, padding="causal", dilation_rate=2, activation="relu")(x)
    y = layers.BatchNormalization()(y) if whole_batch else layers.UnitNormalization()(y)
    y = layers.MaxPooling1D(3, strides=1, padding="same")(layers.Conv1D(8, 2, groups=4, padding="same")(y))
    return keras.Model(x, layers.Conv1D(4, 1)(y))


@attacked("sequences", TOKENS, FOUR)
def recurrent(rate):
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(32, 8, mask_zero=True)(tokens)
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True, dropout=rate))(x)
    x = layers.SimpleRNN(8, return_sequences=True)(layers.GRU(8, return_sequences=True, go_backwards=True)(x))
    return keras.Model(tokens, layers.Dense(4)(layers.LSTM(8)(x)))


@attacked("sequences", "normal({rows}, {length}, 8, 3)", FOUR)
def recurrent_in_time():
    x = keras.Input((None, 8, 3))
    y = layers.ConvLSTM1D(4, 3, padding="same", return_sequences=True)(x)
    return keras.Model(x, layers.Dense(4)(layers.GRU(8)(layers.TimeDistributed(layers.Flatten())(y))))


@keras.saving.register_keras_serializable("attack")
def with_z_loss(y, logits):
    squares = ops.square(ops.logsumexp(logits, axis=-1))
    return ops.sparse_categorical_crossentropy(ops.cast(y, "int32"), logits, from_logits=True) + 0.01 * squares


@keras.saving.register_keras_serializable("attack")
def focal(y, logits):
    return keras.losses.categorical_focal_crossentropy(ops.one_hot(ops.cast(y, "int32"), 32), ops.softmax(logits))


@keras.saving.register_keras_serializable("attack")
def bounded(y, logits):
    """Depends on the best other class. The gradient of a token depends on the other tokens of its row."""
    label = ops.one_hot(ops.cast(y, "int32"), 32, dtype=logits.dtype)
    margin = ops.max(logits - 1e3 * label, axis=-1) - ops.sum(logits * label, axis=-1)
    return ops.tanh(ops.softplus(margin) - 0.5 * ops.mean(margin, axis=-1, keepdims=True))


@attacked("sequences", TOKENS, TOKENS, repeats=True, **accuracy)
def transformer(rate):
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(32, 16)(tokens)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 4, dropout=rate)(y, y, use_causal_mask=True)])
        y = layers.Dense(16)(layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x)))
        x = layers.Add()([x, layers.Dropout(rate)(y)])
    return keras.Model(tokens, layers.Dense(32)(x))


@attacked("sequences", TOKENS, TOKENS, repeats=True, **accuracy)
def tied_transformer(rate):
    tokens = keras.Input((None,), dtype="int32")
    embedding = layers.ReversibleEmbedding(32, 16, mask_zero=True)
    x = embedding(tokens)
    for _ in range(2):
        y = layers.RMSNormalization()(x)
        x = layers.Add()([x, layers.GroupQueryAttention(4, 4, 2)(y, y, use_causal_mask=True)])
        x = layers.Add()([x, layers.Dropout(rate)(layers.Dense(16, activation="silu")(x))])
    return keras.Model(tokens, embedding(x, reverse=True))


@attacked("sequences", '{{"query": normal({rows}, {length}, 8), "keys": normal({rows}, 6, 8)}}', FOUR_EACH)
def cross_attention(rate):
    query, keys = keras.Input((None, 8), name="query"), keras.Input((6, 8), name="keys")
    x = layers.Add()([query, layers.Attention(dropout=rate)([query, keys]), layers.AdditiveAttention()([query, keys])])
    y, scores = layers.MultiHeadAttention(2, 4)(x, keys, return_attention_scores=True)
    y = layers.Concatenate()([x, y, layers.Lambda(lambda s: ops.max(s, axis=(1, 3))[..., None])(scores)])
    return keras.Model({"query": query, "keys": keys}, layers.EinsumDense("bld,df->blf", (None, 4), bias_axes="f")(y))


@keras.saving.register_keras_serializable("attack")
class Experts(keras.Layer):
    def build(self, shape):
        self.router = layers.Dense(4)
        self.router.build(shape)
        self.up = self.add_weight(shape=(4, shape[-1], 16), name="up")
        self.down = self.add_weight(shape=(4, 16, shape[-1]), name="down")

    def call(self, x):
        best, which = ops.top_k(self.router(x), 2)
        chosen = ops.sum(ops.one_hot(which, 4, dtype=x.dtype) * ops.softmax(best)[..., None], axis=-2)
        hidden = ops.gelu(ops.einsum("...d,edh->...eh", x, self.up))
        return ops.einsum("...eh,ehd,...e->...d", hidden, self.down, chosen)


@attacked("sequences", SEQUENCES, FOUR_EACH)
def experts():
    x = keras.Input((None, 8))
    return keras.Model(x, layers.Dense(4)(layers.Add()([x, Experts()(layers.Dense(8)(x))])))


@attacked("sequences", "normal({rows}, 64, 1)", FOUR)
def spectrogram():
    x = keras.Input((64, 1))
    y = layers.STFTSpectrogram("real", frame_length=16, frame_step=8, fft_length=16)(x)
    return keras.Model(x, layers.Dense(4)(layers.Flatten()(layers.Dense(4, activation="tanh")(y))))


class Function(keras.Layer):
    """In a script, its `call` is one of `functions.py`."""


@attacked("sequences", SEQUENCES, FOUR_EACH)
def function():
    x = keras.Input((None, 8))
    return keras.Model(x, layers.Dense(4)(layers.Dense(8, activation="tanh")(Function()(layers.Dense(8)(x)))))


@attacked(
    "sequences",
    '{{"a": normal({rows}, 8), "b": tokens({rows}, {length})}}',
    '{{"p": normal({rows}, 1), "q": classes({rows}), "r": normal({rows}, {length}, 2)}}',
    f'{{"p": "mae", "q": {CLASSES}, "r": keras.losses.Huber()}}',
    '{"p": ["mse"], "q": ["accuracy"]}',
)
def several_inputs_and_outputs():
    a, b = keras.Input((8,), name="a"), keras.Input((None,), dtype="int32", name="b")
    sequence = layers.Embedding(32, 8)(b)
    x = layers.Concatenate()([layers.Dense(8, activation="relu")(a), layers.GlobalMaxPooling1D()(sequence)])
    return keras.Model([a, b], {"p": layers.Dense(1)(x), "q": layers.Dense(4)(x), "r": layers.Dense(2)(sequence)})


@attacked("vectors", VECTORS, "(normal({rows}, 1), normal({rows}, 2))", '["mse", "mae"]', "None")
def outputs_in_a_list():
    x = keras.Input((8,))
    y = layers.Dense(8, activation=layers.PReLU())(x)
    return keras.Model(x, [layers.Dense(1)(y), layers.Dense(2)(layers.Activation("swish")(y))])


@keras.saving.register_keras_serializable("attack")
class OwnStep(keras.Model):
    def train_step(self, state, data):
        weights, others, optimizer, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss(weights):
            outputs, _ = self.stateless_call(weights, others, x, training=True)
            return ops.mean(ops.square(outputs - y))

        value, gradients = jax.value_and_grad(loss)(weights)
        weights, optimizer = self.optimizer.stateless_apply(optimizer, gradients, weights)
        return {"loss": value}, (weights, others, optimizer, metrics)


@attacked("vectors", VECTORS, FOUR, metrics="None")
def own_step():
    x = keras.Input((8,))
    return OwnStep(x, layers.Dense(4)(layers.Dense(16, activation="relu")(x)))


@keras.saving.register_keras_serializable("attack")
class OwnLoss(keras.Model):
    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return logs | {"two": 2.0}, state

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * ops.mean(ops.square(y_pred))


@attacked("vectors", VECTORS, FOUR)
def own_loss():
    x = keras.Input((8,))
    return OwnLoss(x, layers.Dense(4)(layers.Dense(16, activation="relu", activity_regularizer="l1")(x)))


@keras.saving.register_keras_serializable("attack")
class Running(keras.Layer):
    """Adds a loss, and keeps a count and an average of what it has seen."""

    def build(self, shape):
        self.count = self.add_weight(name="count", initializer="zeros", dtype="int32", trainable=False)
        self.average = self.add_weight(shape=shape[-1:], name="average", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1)
            self.average.assign(0.9 * self.average + 0.1 * ops.mean(x, axis=range(len(x.shape) - 1)))
        self.add_loss(0.01 * ops.mean(ops.abs(x)))
        return x + self.average


@attacked("vectors", VECTORS, FOUR, mixes_rows=True)  # and counts calls
def running():
    x = keras.Input((8,))
    y = layers.SpectralNormalization(layers.Dense(8))(Running()(layers.Dense(8)(x)))
    return keras.Model(x, layers.Dense(4)(layers.BatchNormalization(momentum=0.9)(y)))


@keras.saving.register_keras_serializable("attack")
class Contrast(keras.Layer):
    """Compares each row with all others."""

    def call(self, x):
        logits = ops.matmul(x, ops.transpose(x))
        self.add_loss(ops.mean(ops.logsumexp(logits, axis=1) - ops.diagonal(logits)))
        return x + ops.softmax(logits) @ x - ops.mean(x, axis=0)


@attacked("vectors", VECTORS, FOUR, mixes_rows=True)
def contrast():
    x = keras.Input((8,))
    return keras.Model(x, layers.Dense(4)(Contrast()(layers.Dense(8, activation="tanh")(x))))


@keras.saving.register_keras_serializable("attack")
class Sample(keras.Layer):
    def __init__(self, rate, **kwargs):
        super().__init__(**kwargs)
        self.rate, self.seeds = rate, keras.random.SeedGenerator(3)

    def call(self, x):
        noise = keras.random.normal(ops.shape(x), seed=self.seeds, dtype=x.dtype)
        return x + self.rate * noise * keras.random.uniform((x.shape[-1],), seed=self.seeds, dtype=x.dtype)

    def get_config(self):
        return super().get_config() | {"rate": self.rate}


@attacked("vectors", VECTORS, "(normal({rows}, 4) > 0).astype('int32')", '"binary_crossentropy"', '["auc"]')
def sampled(rate):
    x = keras.Input((8,))
    y = Sample(rate)(layers.Dense(8)(x)) if rate else layers.Dense(8)(x)
    return keras.Model(x, layers.Dense(4, activation="sigmoid")(layers.AlphaDropout(rate)(y)))


@keras.saving.register_keras_serializable("attack")
class Subclassed(keras.Model):
    """Is built by its first batch."""

    def __init__(self, rate, **kwargs):
        super().__init__(**kwargs)
        self.rate, self.up, self.down = rate, layers.Dense(16, activation="elu"), layers.Dense(4)
        self.drop, self.gain = layers.Dropout(rate), self.add_weight(shape=(4,), initializer="ones", name="gain")

    def call(self, x, training=False):
        return self.gain * self.down(self.drop(self.up(x), training=training))

    def get_config(self):
        return {"rate": self.rate}


@attacked("vectors", VECTORS, FOUR)
def subclassed(rate, is_built):
    model = Subclassed(rate)
    if is_built:
        model(keras.KerasTensor((None, 8)))
    return model


@attacked("vectors", VECTORS, FOUR)
def low_rank():
    x = keras.Input((8,))
    dense = layers.Dense(16, activation="relu")
    model = keras.Model(x, layers.Dense(4)(dense(x)))
    dense.enable_lora(2)
    return model


PADDED = '{{"token_ids": tokens({rows}, {length}), "padding_mask": mask({rows}, {length})}}'
TWO_TEXTS = (
    '{{"encoder_token_ids": tokens({rows}, {length}), "encoder_padding_mask": mask({rows}, {length}), '
    '"decoder_token_ids": tokens({rows}, {length}), "decoder_padding_mask": mask({rows}, {length})}}'
)
HUB = {
    "GemmaBackbone(32, 2, 4, 1, 16, 32, 4)": ("sequences", PADDED),
    "LlamaBackbone(32, 2, 4, 16, 32, 2)": ("sequences", PADDED),
    "MixtralBackbone(32, 2, 4, 16, 32, 2, num_experts=4)": ("sequences", PADDED),
    "QwenMoeBackbone(32, 2, 4, 4, 16, 32, 16, 16, 4, top_k=2)": ("sequences", PADDED),
    "BertBackbone(32, 2, 4, 16, 32, dropout={rate}, max_sequence_length=16)": (
        "sequences",
        PADDED[:-2] + ', "segment_ids": mask({rows}, {length})}}',
    ),
    "GPT2Backbone(32, 2, 4, 16, 32, dropout={rate}, max_sequence_length=16)": ("sequences", PADDED),
    "T5Backbone(32, 2, 4, 16, 32, dropout={rate})": ("sequences", TWO_TEXTS),
    "BartBackbone(32, 2, 4, 16, 32, dropout={rate}, max_sequence_length=16)": ("sequences", TWO_TEXTS),
    "ViTBackbone((8, 8, 3), 4, 2, 4, 16, 32)": ("images", IMAGES),
    "ResNetBackbone([64], [3], [64, 64], [1, 1], [1, 2], 'basic_block', image_shape=(8, 8, 3))": ("images", IMAGES),
}


def hub(backbone):
    """A dense layer on the mean of the last output of a backbone of KerasHub."""
    features = keras.tree.flatten(backbone.output)[-1]
    axes = tuple(range(1, len(features.shape) - 1))
    return keras.Model(backbone.input, layers.Dense(4)(ops.mean(features, axis=axes) if axes else features))


# By batch normalization, and by the loss that balances the load of experts.
MIX_ROWS = ("ResNet", "Mixtral", "QwenMoe")
for text, (kind, data) in HUB.items():
    name = text.split("Backbone")[0]
    attacked(kind, data, FOUR, name=name, backbone=text, repeats=name != "T5", mixes_rows=name in MIX_ROWS)(hub)

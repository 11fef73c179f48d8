"""Losses computed in chunks of tokens: numbers of those that store logits, for each loss, metric and head."""

import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.slow_cases import slow, slow_unless
from support.strategy_models import LENGTH, MODELS, STRATEGIES, assert_same_numbers, scope

import keras_dist as kd

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
VOCABULARY, WIDTH, ROWS = 40, 16, 12
random = np.random.default_rng(0)
TOKENS = random.integers(0, VOCABULARY, (ROWS, LENGTH)).astype("int32")
LABELS = random.integers(0, VOCABULARY, (ROWS, LENGTH)).astype("int32")
WEIGHTS = random.uniform(0.5, 2, (ROWS, LENGTH)).astype("float32")


def sparse(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def language_model(head, loss=None, metrics=("accuracy",), mask_zero=False, optimizer="sgd", **options):
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedding = layers.Embedding(VOCABULARY, WIDTH, mask_zero=mask_zero, name="embedding")
    x = embedding(tokens)
    x = layers.LayerNormalization(name="norm")(layers.Dense(WIDTH, "tanh", name="hidden")(x))
    model = keras.Model(tokens, head(x, embedding))
    model.compile(optimizer, sparse() if loss is None else loss, metrics=list(metrics), **options)
    return model


def dense(x, embedding):
    return layers.Dense(VOCABULARY, name="head")(x)


def without_bias(x, embedding):
    return layers.Dense(VOCABULARY, use_bias=False, name="head")(x)


def probabilities(x, embedding):
    return layers.Dense(VOCABULARY, activation="softmax", name="head")(x)


def capped(x, embedding):
    return ops.tanh(layers.Dense(VOCABULARY, name="head")(x) / 3.0) * 3.0


@keras.saving.register_keras_serializable("keras_dist_tests")
class Tied(layers.Layer):
    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


def tied(x, embedding):
    return Tied(embedding, name="head")(x)


def float32_logits(x, embedding):
    return layers.Activation("linear", dtype="float32")(layers.Dense(VOCABULARY, name="head")(x))


def focal(labels, logits):
    """A loss of a user: it is not known as one."""
    logs = ops.log_softmax(logits)
    chosen = ops.take_along_axis(logs, ops.cast(labels, "int32")[..., None], axis=-1)[..., 0]
    return -((1 - ops.exp(chosen)) ** 2) * chosen


def root(labels, logits):
    """A loss that is not linear in the losses of tokens."""
    return ops.sqrt(ops.mean(ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)))


def onehot(labels):
    return np.eye(VOCABULARY, dtype="float32")[labels]


# The model's head and options, and what `fit` gets.
CASES = {
    "dense": (dense, {}, {}),
    "without a bias": (without_bias, {}, {}),
    "tied": (tied, {}, {}),
    "soft cap": (capped, {}, {}),
    "probabilities": (probabilities, {"loss": "sparse_categorical_crossentropy"}, {}),
    "logits in float32": (float32_logits, {}, {}),
    "sample weights": (dense, {"weighted_metrics": ["accuracy"]}, {"sample_weight": WEIGHTS}),
    "mask": (dense, {"mask_zero": True, "weighted_metrics": ["accuracy"]}, {}),
    "mask and sample weights": (tied, {"mask_zero": True}, {"sample_weight": WEIGHTS}),
    "ignored class": (dense, {"loss": sparse(ignore_class=3)}, {}),
    "sum": (dense, {"loss": sparse(reduction="sum")}, {}),
    "mean over weights": (
        dense,
        {"loss": sparse(reduction="mean_with_sample_weight")},
        {"sample_weight": WEIGHTS},
    ),
    "one-hot labels": (dense, {"loss": keras.losses.CategoricalCrossentropy(from_logits=True)}, {"y": onehot(LABELS)}),
    "label smoothing": (
        dense,
        {"loss": keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)},
        {"y": onehot(LABELS)},
    ),
    "focal loss of a function": (dense, {"loss": focal}, {}),
    "root of a mean": (dense, {"loss": root}, {}),
    "top-k": (dense, lambda: {"metrics": [keras.metrics.SparseTopKCategoricalAccuracy(3)]}, {}),
    "cross entropy as a metric": (
        dense,
        lambda: {"metrics": [keras.metrics.SparseCategoricalCrossentropy(from_logits=True), "accuracy"]},
        {},
    ),
    "squared error": (dense, {"loss": "mse", "metrics": ["mae"]}, {"y": onehot(LABELS)}),
    "loss scale": (dense, {"auto_scale_loss": True, "optimizer": "adam"}, {}),
    "several steps in an execution": (dense, {"steps_per_execution": 2}, {}),
    "accumulated": (dense, lambda: {"optimizer": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)}, {}),
    "clipped": (dense, lambda: {"optimizer": keras.optimizers.SGD(0.1, global_clipnorm=0.1)}, {}),
}


def on_one_device(**options):
    return kd.DataParallel(devices=kd.list_devices()[:1], step_options=kd.StepOptions(**options))


def fsdp(**options):
    mesh = kd.create_device_mesh("fsdp:4", devices=kd.list_devices()[:4])
    return kd.FullyShardedDataParallel(mesh, min_shard_bytes=0, step_options=kd.StepOptions(**options))


def trained(build, x, y, distribution, batch_size, **fitted):
    """Losses and metrics of two epochs, those of `evaluate`, and the weights."""
    keras.utils.set_random_seed(0)
    with scope(distribution):
        model = build()
        found = model.fit(x, y, batch_size, epochs=2, verbose=0, shuffle=False, **fitted).history
        found["evaluate"] = model.evaluate(x, y, batch_size, verbose=0, sample_weight=fitted.get("sample_weight"))
        return found, [np.asarray(weight) for weight in model.get_weights()]


def assert_chunks_change_nothing(build, x, y, distribution, chunk, batch_size=6, tolerance=2e-6, **fitted):
    """Trains with and without chunks, under `distribution(**step options)`."""
    found, expected = (
        trained(build, x, y, distribution(**options), batch_size, **fitted) for options in ({"loss_chunk": chunk}, {})
    )
    assert_same_numbers(found, expected, tolerance)


def case(name):
    head, options, fitted = CASES[name]

    def build():
        return language_model(head, **(options() if callable(options) else options))

    return {"build": build, "x": TOKENS, "y": LABELS, **fitted}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sharded_training_has_equal_numbers(name):
    """Batches of 6 rows on 4 devices: two rows of 8 tokens on three of them, in chunks of 3 tokens."""
    assert_chunks_change_nothing(distribution=fsdp, chunk=3, **case(name))


FAST = "mask and sample weights", "label smoothing", "root of a mean", "top-k"


@pytest.mark.parametrize("name", [slow_unless(name in FAST, name) for name in CASES])
def test_one_device_has_equal_numbers(name):
    assert_chunks_change_nothing(distribution=on_one_device, chunk=7, tolerance=1e-6, **case(name))


@pytest.mark.parametrize("strategy", [slow_unless(name == "FSDP x TP", name) for name in STRATEGIES])
def test_each_strategy_has_equal_numbers(strategy):
    build, x, y = MODELS["transformer"]
    plain = STRATEGIES[strategy](build)

    def distribution(**options):
        return plain.with_step_options(kd.StepOptions(**options))

    assert_chunks_change_nothing(functools.partial(build, "sgd"), x, y, distribution, chunk=3, batch_size=16)


@pytest.mark.parametrize("distribution", [on_one_device, slow(fsdp)])
def test_microbatches_whose_divisor_is_that_of_the_batch(distribution):
    """The chunks read the number of unmasked tokens of the batch, a value of the trace around that of a microbatch."""
    assert_chunks_change_nothing(distribution=functools.partial(distribution, microbatches=2), chunk=3, **case("mask"))


@pytest.mark.slow
@pytest.mark.parametrize("distribution", [on_one_device, fsdp])
def test_class_weights_of_rows(distribution):
    def build():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(VOCABULARY)])
        model.compile("sgd", sparse(), metrics=["accuracy"])
        return model

    x, weights = random.normal(size=(ROWS, 8)).astype("float32"), {n: 1.0 + n % 3 for n in range(VOCABULARY)}
    assert_chunks_change_nothing(build, x, LABELS[:, 0], distribution, chunk=2, batch_size=12, class_weight=weights)


@pytest.mark.slow
def test_classes_of_pixels():
    def build():
        images = keras.Input((4, 4, 3))
        x = layers.Conv2D(8, 3, padding="same", activation="relu")(images)
        model = keras.Model(images, layers.Dense(VOCABULARY, activation="softmax")(x))
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    x = random.normal(size=(ROWS, 4, 4, 3)).astype("float32")
    y = random.integers(0, VOCABULARY, (ROWS, 4, 4)).astype("int32")
    assert_chunks_change_nothing(build, x, y, fsdp, chunk=5)


def causal_lm():
    backbone = keras_hub.models.LlamaBackbone(VOCABULARY, 2, 4, WIDTH, 2 * WIDTH, 2)
    return keras_hub.models.LlamaCausalLM(backbone)


def capped_causal_lm():
    """Its logits have a soft cap, and its table is tied."""
    sizes = {"head_dim": 8, "use_post_ffw_norm": True, "use_post_attention_norm": True, "final_logit_soft_cap": 3.0}
    sizes |= {"attention_logit_soft_cap": 5.0, "sliding_window_size": 4, "use_sliding_window_attention": True}
    return keras_hub.models.GemmaCausalLM(keras_hub.models.GemmaBackbone(VOCABULARY, 2, 2, 1, WIDTH, 64, **sizes))


HUB = {
    "causal, untied": causal_lm,
    "causal, tied and capped": capped_causal_lm,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HUB)
def test_language_models_of_keras_hub(name):
    def build():
        model = HUB[name]()
        model.compile("sgd", sparse(), weighted_metrics=["accuracy", keras_hub.metrics.Perplexity(from_logits=True)])
        return model

    x = {"token_ids": TOKENS, "padding_mask": TOKENS > 5}
    assert_chunks_change_nothing(build, x, LABELS, fsdp, chunk=3, sample_weight=WEIGHTS)


@pytest.mark.slow
def test_masked_language_model_of_keras_hub():
    def build():
        backbone = keras_hub.models.BertBackbone(VOCABULARY, 2, 2, WIDTH, 32, dropout=0, max_sequence_length=LENGTH)
        model = keras_hub.models.BertMaskedLM(backbone)
        for weight in model.weights:  # no probability is so small that it is clipped
            weight.assign(weight * 0.1)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(), weighted_metrics=["accuracy"])
        return model

    places = np.sort(np.argsort(random.uniform(size=(ROWS, LENGTH)), axis=1)[:, :6]).astype("int32")
    x = {"token_ids": TOKENS, "segment_ids": TOKENS * 0, "padding_mask": TOKENS > -1, "mask_positions": places}
    y = np.take_along_axis(LABELS, places, axis=1)
    assert_chunks_change_nothing(build, x, y, fsdp, chunk=3, sample_weight=WEIGHTS[:, :6])


def test_logits_with_a_gradient_of_their_own_are_not_chunked():
    """A function that only changes the gradient looks like a change of layouts: it computes nothing."""

    @jax.custom_jvp
    def scaled(x):
        return x

    scaled.defjvp(lambda primals, tangents: (primals[0], 10.0 * tangents[0]))

    def head(x, embedding):
        return layers.Lambda(scaled)(dense(x, embedding))

    with on_one_device(loss_chunk=7).scope(), pytest.raises(ValueError, match="custom_jvp_call uses it"):
        language_model(head).fit(TOKENS, LABELS, 6, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2, "sequence": 2}, {"data": 1, "sequence": 4}])
def test_positions_that_are_sharded(axes):
    """Context parallelism: each device has half of the positions, or a quarter."""
    build, x, y = MODELS["transformer"]

    def distribution(**options):
        mesh = kd.create_device_mesh(axes, devices=kd.list_devices()[:4])
        return kd.DataParallel(mesh, sequence_dim_name="sequence", step_options=kd.StepOptions(**options))

    assert_chunks_change_nothing(functools.partial(build, "sgd"), x, y, distribution, chunk=3, batch_size=8)


def test_a_head_that_is_sharded_along_its_input():
    """Sequence parallelism shards the positions of its output: a change of layouts that is in the chunks, too."""

    def distribution(**options):
        layout_map = kd.LayoutMap(kd.create_device_mesh("data:2,model:2", devices=kd.list_devices()[:4]))
        layout_map["head/kernel"] = ("model", None)
        layout_map["head/input"] = ("data", None, "model")
        layout_map["head/output"] = ("data", "model", None)
        return kd.ModelParallel(
            layout_map=layout_map, batch_dim_name="data", step_options=kd.StepOptions(**options), strict=True
        )

    assert_chunks_change_nothing(functools.partial(language_model, dense), TOKENS, LABELS, distribution, chunk=3)


def test_gradients_in_bfloat16_are_as_exact():
    """The gradient of the head is added up over 32 chunks in float32, and that of what is before it is rounded once."""
    x, y = random.normal(size=(8, 128, 64)).astype("float32"), random.integers(0, 256, (8, 128))
    start = random.normal(size=(64, 256)).astype("float32") * 0.3

    def gradients(dtype, chunk):
        with on_one_device(loss_chunk=chunk).scope():
            hidden, head = layers.Dense(64, use_bias=False, dtype=dtype), layers.Dense(256, dtype=dtype)
            model = keras.Sequential([keras.Input((128, 64)), hidden, head])
            model.compile(keras.optimizers.SGD(1.0), sparse())
            hidden.kernel.assign(np.eye(64))
            head.kernel.assign(start)
            before = model.get_weights()
            model.train_on_batch(x, y)
            return [old - new for old, new in zip(before, model.get_weights(), strict=True)]

    def errors(chunk):
        found = gradients("mixed_bfloat16", chunk)
        return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, exact, strict=True)]

    exact = gradients("float32", None)
    for chunked, stored in zip(errors(32), errors(None), strict=True):
        assert chunked <= 1.25 * stored

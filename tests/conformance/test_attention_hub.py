"""Models of KerasHub, and Keras's attention layers, with the fused kernels of TPUs and GPUs: the numbers of one CPU.

Each model is trained for a step, and texts are generated, under distributions whose kernels run in a form for CPUs.
"""

import functools
import inspect
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from support.kernels_on_cpus import DEVICES, KERNEL, use_kernel_of
from support.slow_cases import slow_unless
from support.strategy_models import fsdp, model_parallel, tensor_parallel

import keras_dist as kd
from keras_dist.planning.targets.target_platform import platform_overridden
from keras_dist.steps.step_state import recorded_calls

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
models = keras_hub.models

ROWS, LENGTH, VOCABULARY, WIDTH = 8, 248, 64, 32
SIZES = {"vocabulary_size": VOCABULARY, "num_layers": 1, "hidden_dim": WIDTH, "intermediate_dim": 64}
HEADS = {"num_query_heads": 8, "num_key_value_heads": 4}
PADDING = np.arange(LENGTH) < np.array([248, 248, 120, 5, 128, 1, 77, 248])[:, None]
KEY_PADDING = np.arange(250) < np.array([250, 229, 250, 3, 1, 64, 250, 100])[:, None]


# ------------------------------------------------------------------------------------------------------------- models


def llama3(**sizes):
    return models.Llama3CausalLM(models.Llama3Backbone(**SIZES | HEADS | sizes), preprocessor=None)


def qwen(**sizes):
    return models.QwenCausalLM(models.QwenBackbone(**SIZES | HEADS | sizes), preprocessor=None)


def mistral():
    return models.MistralCausalLM(models.MistralBackbone(**SIZES | HEADS, sliding_window=40), preprocessor=None)


def gemma(**sizes):
    sizes = SIZES | HEADS | {"head_dim": 8} | sizes
    return models.GemmaCausalLM(models.GemmaBackbone(**sizes), preprocessor=None)


def gemma2():
    window = {"sliding_window_size": 40, "use_sliding_window_attention": True}
    return gemma(**window, attention_logit_soft_cap=2.0, final_logit_soft_cap=30.0, num_layers=2)


def gemma3():
    window = {"sliding_window_size": 40, "use_sliding_window_attention": True, "vision_encoder": None}
    backbone = models.Gemma3Backbone(**SIZES | HEADS, head_dim=8, image_size=16, **window)
    return models.Gemma3CausalLM(None, backbone)


def bert():
    backbone = models.BertBackbone(**SIZES, num_heads=8, dropout=0.0, max_sequence_length=LENGTH)
    return keras.Model(backbone.input, keras.layers.Dense(1)(backbone.output["sequence_output"]))


def vit():
    backbone = models.ViTBackbone(
        image_shape=(60, 60, 3), patch_size=4, num_layers=1, num_heads=8, hidden_dim=WIDTH, mlp_dim=64
    )
    return keras.Model(backbone.input, keras.layers.Dense(1)(backbone.output))


def attention_layer(layer, **options):
    """A model of a layer that reads other tokens, some of them padding."""
    inputs = {
        "query": keras.Input((LENGTH, WIDTH), name="query"),
        "value": keras.Input((250, WIDTH), name="value"),
        "query_mask": keras.Input((LENGTH,), dtype="bool", name="query_mask"),
        "value_mask": keras.Input((250,), dtype="bool", name="value_mask"),
    }
    return keras.Model(inputs, keras.layers.Dense(1)(layer(**inputs, **options)))


class Window(keras.Layer):
    """Which tokens each token sees: those around it."""

    def call(self, x):
        positions = keras.ops.arange(LENGTH)
        return (keras.ops.abs(positions[:, None] - positions) < 20)[None]


def windowed():
    x = keras.Input((LENGTH, WIDTH))
    outputs = keras.layers.MultiHeadAttention(8, 4, name="attention")(x, x, attention_mask=Window()(x))
    return keras.Model(x, keras.layers.Dense(1)(outputs))


def cross_attention():
    return attention_layer(keras.layers.MultiHeadAttention(8, 4, name="attention"))


def causal_grouped_attention():
    return attention_layer(keras.layers.GroupQueryAttention(4, 8, 4, name="attention"), use_causal_mask=True)


MODELS = {
    "Llama 3": llama3,
    "Gemma": gemma,
    "Gemma 3": gemma3,
    "Mistral": mistral,
    "Qwen": qwen,
    "BERT": bert,
    "ViT": vit,
    "MultiHeadAttention across": cross_attention,
    "MultiHeadAttention in a window": windowed,
    "GroupQueryAttention, causal": causal_grouped_attention,
}


TRANSFORMS = {
    "checkpoint": lambda attend, x: keras.remat(attend)(x),
    "vmap": lambda attend, x: keras.ops.vectorized_map(lambda row: attend(row[None])[0], x),
    "scan": lambda attend, x: keras.ops.scan(lambda y, _: (y + attend(y), None), x, None, length=2)[0],
    "cond": lambda attend, x: keras.ops.cond(keras.ops.sum(x) > -1e9, lambda: attend(x), lambda: x),
}


class InTransform(keras.Layer):
    """Attention that a layer computes inside of a transformation of JAX."""

    def __init__(self, transform):
        super().__init__(name="transform")
        self.transform, self.attention = TRANSFORMS[transform], keras.layers.MultiHeadAttention(8, 4, name="attention")

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.transform(lambda y: self.attention(y, y, use_causal_mask=True), x)

    def compute_output_shape(self, shape):
        return shape


def in_transform(name):
    x = keras.Input((LENGTH, WIDTH))
    return keras.Model(x, keras.layers.Dense(1)(InTransform(name)(x)))


def inputs_of(model):
    """Random values for the inputs of a model, with padding."""
    rng = np.random.default_rng(0)

    def array(name, tensor):
        if "mask" in name:
            return (KEY_PADDING if tensor.shape[1] == 250 else PADDING).astype(tensor.dtype)
        shape = ROWS, *(LENGTH if size is None else size for size in tensor.shape[1:])
        if name == "segment_ids":
            return np.zeros(shape, "int32")
        is_tokens = tensor.dtype.startswith("int")
        return rng.integers(1, VOCABULARY, shape, "int32") if is_tokens else rng.normal(size=shape).astype("float32")

    if isinstance(model.input, dict):
        return {name: array(name, tensor) for name, tensor in model.input.items()}
    return array("", model.input)


def targets_of(model):
    """Random targets, the loss, and the weights of a model's outputs."""
    rng = np.random.default_rng(1)
    if isinstance(model, models.CausalLM):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return rng.integers(0, VOCABULARY, (ROWS, LENGTH)), loss, PADDING.astype("float32")
    return rng.normal(size=(ROWS, model.output.shape[1] or LENGTH, 1)).astype("float32"), "mse", None


def start_anew():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


def loss_and_gradients(build, policy="float32", platform="cpu"):
    """The loss of a step, and the gradients: after one step they are the momentums, but for the sign."""
    start_anew()
    keras.config.set_dtype_policy(policy)
    try:
        model = build()
    finally:
        keras.config.set_dtype_policy("float32")
    y, loss, weights = targets_of(model)
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    model.compile(optimizer, loss, weighted_metrics=[])
    with platform_overridden(DEVICES[platform]):
        loss = model.train_on_batch(inputs_of(model), y, sample_weight=weights)
    names = [variable.path for variable in model.trainable_variables]
    return float(loss), dict(zip(names, [np.asarray(momentum.value) for momentum in optimizer.momentums], strict=True))


@functools.cache
def on_one_device(name):
    return loss_and_gradients(MODELS[name], "float32")


def rules_for(build, axes="data:2,model:4", **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="[0-9]+ weights? .* replicated")
        return tensor_parallel(build, axes, **options)


DISTRIBUTIONS = {
    "DP": lambda build: kd.DataParallel(),
    "FSDP": lambda build: fsdp(),
    "TP": lambda build: model_parallel(rules_for(build)),
    "FSDP x CP": lambda build: kd.FullyShardedDataParallel(
        kd.create_device_mesh("fsdp:2,context:4"), min_shard_bytes=0, sequence_dim_name="context"
    ),
    "TP + SP x CP": lambda build: model_parallel(
        rules_for(build, "data:2,context:2,model:2", sequence_parallel=True, sequence_dim_name="context"),
        sequence_dim_name="context",
    ),
}


def assert_trains_as_on_one_device(platform, monkeypatch, name, strategy, policy="float32", tolerance=1e-4):
    expected_loss, expected = on_one_device(name)  # in float32: sums in bfloat16 over all tokens lose up to a seventh
    start_anew()
    distribution = DISTRIBUTIONS[strategy](MODELS[name])
    use_kernel_of(platform, monkeypatch)
    with distribution.scope(), recorded_calls() as calls:
        loss, gradients = loss_and_gradients(MODELS[name], policy, platform)
    assert {(call.implementation, call.reason) for call in calls} == {(KERNEL[platform], None)}
    np.testing.assert_allclose(loss, expected_loss, rtol=tolerance)
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for path, gradient in expected.items():  # some are zero but for rounding: those of the biases of keys
        limit = tolerance * max(np.abs(gradient).max(), 0.01 * largest)
        np.testing.assert_allclose(gradients[path], gradient, rtol=tolerance, atol=limit, err_msg=path)


FAST = {
    ("gpu", "DP", "MultiHeadAttention in a window"),
    ("tpu", "TP + SP x CP", "MultiHeadAttention across"),
}
WITH_SEQUENCES = {"Llama 3", "Gemma 3", "BERT", "ViT", "MultiHeadAttention across"}  # the others are much like these
CASES = [
    (platform, strategy, name)
    for platform, strategy, name in itertools.product(KERNEL, DISTRIBUTIONS, MODELS)
    if name in WITH_SEQUENCES or "CP" not in strategy
]


@pytest.mark.parametrize(
    ("platform", "strategy", "name"),
    [slow_unless(case in FAST, *case) for case in CASES],
)
def test_models_train_as_on_one_cpu(platform, strategy, name, monkeypatch):
    assert_trains_as_on_one_device(platform, monkeypatch, name, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_attention_inside_of_transformations(transform, monkeypatch):
    monkeypatch.setitem(MODELS, transform, functools.partial(in_transform, transform))
    assert_trains_as_on_one_device("tpu", monkeypatch, transform, "DP")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", DISTRIBUTIONS)
def test_a_soft_cap(strategy, monkeypatch):
    """Without a kernel, KerasHub computes Gemma 2's attention, and its cap, step by step."""
    monkeypatch.setitem(MODELS, "Gemma 2", gemma2)
    assert_trains_as_on_one_device("tpu", monkeypatch, "Gemma 2", strategy)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "name"), [("tpu", "BERT"), ("gpu", "Llama 3")])
def test_mixed_precision(platform, name, monkeypatch):
    assert_trains_as_on_one_device(platform, monkeypatch, name, "TP", "mixed_bfloat16", tolerance=3e-2)


# ------------------------------------------------------------------------------------------------- generated texts

GENERATORS = {"Llama 3": llama3, "Gemma": gemma, "Qwen": qwen}
SHORT = np.arange(24) < np.array([3, 8, 1, 5, 12, 7, 2, 9])[:, None]
LONG = np.arange(LENGTH) < np.array([240, 243, 241, 5, 245, 242, 240, 247])[:, None]  # the kernels take 128 tokens


def prompts(given):
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, given.shape)
    return {"token_ids": np.int32(tokens * given), "padding_mask": np.int32(given)}


def generated(build, given, platform="cpu"):
    """Texts, and the model that continued them."""
    start_anew()
    model = build()
    for weight in model.weights:  # otherwise all tokens are about equally likely
        weight.assign(4 * weight if weight.ndim > 1 else weight)
    model.compile(sampler="greedy")
    with platform_overridden(DEVICES[platform]):
        return model.generate(prompts(given), stop_token_ids=None)["token_ids"], model


def cache_shapes(model, given):
    """The shapes on one device of arrays of 6 dims in the loop over tokens: the cache of keys and values."""
    program = inspect.getclosurevars(model.generate_function).nonlocals["compiled_generate_function"]
    variables = model.sampler.variables, model.trainable_variables, model.non_trainable_variables
    state = tuple([variable.value for variable in part] for part in variables)
    text = program.lower(jax.tree.map(jnp.asarray, prompts(given)), None, state).compile().as_text()
    loops = "".join(line.split(" while(")[0] for line in text.splitlines() if " while(" in line)
    return {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[(\d+(?:,\d+){5})\]", loops)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key_heads"),
    [("Llama 3", 4), ("Gemma", 4), ("Qwen", 4), ("Llama 3", 2)],
)
def test_generated_tokens_and_a_cache_that_is_sharded_as_the_heads(name, key_heads):
    build = functools.partial(GENERATORS[name], num_key_value_heads=key_heads)
    expected, _ = generated(build, SHORT)
    assert len(np.unique(expected[~SHORT])) > 5
    start_anew()
    with model_parallel(rules_for(build)).scope():
        tokens, model = generated(build, SHORT)
        np.testing.assert_array_equal(tokens, expected)
        # Rows, layers, keys and values, tokens, heads, head size. All rows: `generate` does not shard prompts.
        assert {shape[:5] for shape in cache_shapes(model, SHORT)} == {(ROWS, 1, 2, 24, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "platform"),
    [*itertools.product(GENERATORS, KERNEL)],
)
def test_prompts_are_read_by_the_kernel(name, platform, monkeypatch):
    expected, _ = generated(GENERATORS[name], LONG)
    start_anew()
    distribution = model_parallel(rules_for(GENERATORS[name]))
    use_kernel_of(platform, monkeypatch)
    with distribution.scope(), recorded_calls() as calls:
        tokens, _ = generated(GENERATORS[name], LONG, platform)
    np.testing.assert_array_equal(tokens, expected)
    prompt, *steps = [call.implementation for call in calls]
    assert prompt == KERNEL[platform]
    assert set(steps) == {"XLA"}

"""What is recognized of the attention of Keras Hub's models: masks, the axes of heads, and repeated keys."""

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.slow_cases import slow, slow_unless

from keras_dist.attention.mask_recognition import recognize, recognize_bias
from keras_dist.tracing.dim_axes import axes_of_dim, without_repeats
from keras_dist.tracing.traced_values import root_of

LENGTH = 8
PADDING = np.array([[1] * 6 + [0] * 2, [0] + [1] * 7], "int32")
SIZES = {"vocabulary_size": 64, "num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64}
GROUPED = {**SIZES, "num_query_heads": 4, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8, "sliding_window_size": 4, "use_sliding_window_attention": True}
T5GEMMA = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {
        **{"hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2, "num_attention_heads": 4, "head_dim": 8},
        **{"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"]},
    }.items()
}


class Attention(NamedTuple):
    """What is recognized of one call."""

    lower: int | None
    upper: int | None
    arrays: tuple[str, ...]
    repeats: int = 1


CAUSAL = Attention(None, 0, ("key_valid",))
PADDED = Attention(None, None, ("key_valid",))

# The class, its arguments, what is recognized, and the dim of the query kernel that has the heads.
MODELS = {
    "BERT": ("BertBackbone", {**SIZES, "num_heads": 4, "dropout": 0}, {PADDED}, 1),
    "GPT-2": ("GPT2Backbone", {**SIZES, "num_heads": 4, "dropout": 0}, {CAUSAL}, 1),
    "BART": ("BartBackbone", {**SIZES, "num_heads": 4, "dropout": 0}, {PADDED, CAUSAL}, 1),
    "GPT-NeoX": ("GPTNeoXBackbone", {**SIZES, "num_heads": 4}, {CAUSAL}, 1),
    "Llama": ("LlamaBackbone", GROUPED, {CAUSAL._replace(repeats=2)}, 1),
    "Llama 3": ("Llama3Backbone", GROUPED, {CAUSAL._replace(repeats=2)}, 1),
    "Qwen": ("QwenBackbone", GROUPED, {CAUSAL._replace(repeats=2)}, 1),
    "Qwen 3": ("Qwen3Backbone", {**GROUPED, "head_dim": 8}, {CAUSAL._replace(repeats=2)}, 1),
    "Phi-3": ("Phi3Backbone", GROUPED, {CAUSAL._replace(repeats=2)}, 1),
    "Mistral": ("MistralBackbone", {**GROUPED, "sliding_window": 3}, {CAUSAL._replace(lower=-2, repeats=2)}, 1),
    "Mixtral": (
        "MixtralBackbone",
        {**GROUPED, "sliding_window": 3, "num_experts": 2},
        {CAUSAL._replace(lower=-2, repeats=2)},
        1,
    ),
    "Gemma 2": ("GemmaBackbone", GEMMA, {CAUSAL, CAUSAL._replace(lower=-3)}, 0),
    "Gemma 3": (
        "Gemma3Backbone",
        {**GEMMA, "image_size": 16, "vision_encoder": None, "num_layers": 6},
        {CAUSAL, CAUSAL._replace(lower=-3)},
        0,
    ),
    "EmbeddingGemma": (
        "Gemma3Backbone",
        {**GEMMA, "image_size": 16, "vision_encoder": None, "use_bidirectional_attention": True},
        {Attention(-1, 2, ("query_valid", "key_valid"))},
        0,
    ),
    "T5Gemma": (
        "T5GemmaBackbone",
        {
            **T5GEMMA,
            **{"vocabulary_size": 64, "dropout_rate": 0, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 8},
            **{"attention_bias": False, "hidden_activation": "gelu_approximate", "sliding_window": 4},
            "cross_attention_hidden_size": 32,
        },
        {PADDED, CAUSAL, CAUSAL._replace(lower=-4)},
        1,
    ),
}


@pytest.fixture
def fused_attention(monkeypatch):
    """Keras Hub's models call `ops.dot_product_attention`, as they do on GPUs."""
    pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
    for name, module in list(sys.modules.items()):
        for check in ("fused_attention_op_available", "running_on_gpu", "gpu_supports_fused_attention_op"):
            if name.startswith("keras_hub") and hasattr(module, check):
                monkeypatch.setattr(module, check, lambda: True)


def record_attention(monkeypatch, look=lambda query: None):
    """Returns a set of what is recognized of each call, and a list of whether it equals the mask."""
    found, equal, compute = set(), [], jax.nn.dot_product_attention

    def attention(query, key, value, bias=None, mask=None, **kwargs):
        recognized = recognize_bias(bias) if mask is None else recognize(mask)
        assert recognized is not None
        names = ("query_valid", "key_valid", "segments", "dense")
        arrays = tuple(name for name in names if getattr(recognized, name) is not None)
        repeats = without_repeats(key, 2)[1]
        assert without_repeats(value, 2)[1] == repeats
        found.add(Attention(recognized.lower, recognized.upper, arrays, repeats))
        dense = recognized.to_dense(query.shape[1], key.shape[1])
        equal.append((dense == (bias == 0 if mask is None else mask)).all())
        look(query)
        return compute(query, key, value, bias=bias, mask=mask, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    return found, equal


@pytest.mark.parametrize("name", [slow_unless(name in ("BART", "Mistral", "Gemma 3"), name) for name in MODELS])
def test_models(monkeypatch, fused_attention, name):
    import keras_hub

    class_name, arguments, expected, heads_dim = MODELS[name]
    model = getattr(keras_hub.models, class_name)(**arguments)
    names = [variable.path.split("/")[-2] for variable in model.trainable_variables]
    inputs = {key: PADDING if "mask" in key else np.ones_like(PADDING) for key in model.input}
    axes = set()

    def read_axes(query):
        axes.add((axes_of_dim(query, 0, axes_of_weight), axes_of_dim(query, 2, axes_of_weight)))

    found, equal = record_attention(monkeypatch, read_axes)

    def axes_of_weight(value):
        return layouts.get(id(value))

    layouts = {}

    def step(trained, states, inputs):
        layouts.update({id(root_of(array)): ("data", None) for array in inputs.values()})
        for name, weight in zip(names, trained, strict=True):
            layouts[id(root_of(weight))] = [f"{name} {dim}" for dim in range(weight.ndim)]
        outputs, _ = model.stateless_call(trained, states, inputs)
        return sum(jnp.sum(output.astype("float32")) for output in jax.tree.leaves(outputs)), equal

    states = [
        [variable.value for variable in part] for part in (model.trainable_variables, model.non_trainable_variables)
    ]
    all_equal = jax.jit(lambda *arguments: jax.grad(step, has_aux=True)(*arguments)[1])(*states, inputs)
    assert found == expected
    assert all(all_equal)
    assert {(batch, heads[0].split()[-1]) for batch, heads in axes} == {(("data",), str(heads_dim))}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The prompt is read from index 0 of a cache as long as the text, then one token at a time.
        slow("Llama", {Attention(None, 0, (), 2), Attention(None, None, ("key_valid",), 2)}),
        ("Gemma 2", {Attention(None, 0, ()), Attention(-3, 0, ()), Attention(None, None, ("key_valid",))}),
    ],
)
def test_generated_text(monkeypatch, fused_attention, name, expected):
    import keras_hub

    class_name, arguments, *_ = MODELS[name]
    backbone = getattr(keras_hub.models, class_name)(**arguments)
    model = getattr(keras_hub.models, class_name.replace("Backbone", "CausalLM"))(backbone, preprocessor=None)
    found, _ = record_attention(monkeypatch)
    model.generate({"token_ids": np.ones_like(PADDING), "padding_mask": PADDING}, stop_token_ids=None)
    assert found == expected

"""What a token of `generate()` sends under tensor parallelism, for the language models of KerasHub."""

import jax
import pytest
from support.keras_scenarios import start_anew

import keras_dist as kd

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
models = keras_hub.models
VOCABULARY, LENGTH, BLOCKS, ROWS = 512, 64, 2, 8
SIZES = {"vocabulary_size": VOCABULARY, "num_layers": BLOCKS, "hidden_dim": 64, "intermediate_dim": 128}
HEADS = {"num_query_heads": 8, "num_key_value_heads": 8}
POSITIONS = {"max_sequence_length": LENGTH}
EXPERTS = {"num_experts": 8, "top_k": 2}
VISION = {"image_size": 16, "vision_encoder": None}
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
# The prefix of the names of a family's classes, and what its backbone takes beside the sizes.
FAMILIES = {
    "Llama": HEADS,
    "Llama3": HEADS | {"num_key_value_heads": 2},  # fewer than devices
    "Qwen": HEADS,
    "Qwen3": HEADS | {"head_dim": 8},
    "Mistral": HEADS,
    "SmolLM3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True, False],
        "layer_types": 2 * ["full_attention"],
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": LENGTH,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 1.0,
    },
    "Gemma": HEADS | {"head_dim": 16},
    "Gemma3": HEADS | VISION | {"head_dim": 16},
    "Gemma4": HEADS | VISION | {"head_dim": 16},
    "GPT2": POSITIONS | {"num_heads": 8},
    "OPT": POSITIONS | {"num_heads": 8},
    "Phi3": HEADS,
    "Falcon": {"num_attention_heads": 8},
    "GPTNeoX": POSITIONS | {"num_heads": 8},
    "Bloom": {"num_heads": 8},
    "Mixtral": HEADS | EXPERTS,
    "GptOss": HEADS | EXPERTS,
    "QwenMoe": HEADS | EXPERTS | {"moe_intermediate_dim": 64, "shared_expert_intermediate_dim": 64},
    "Qwen3Moe": HEADS | EXPERTS | {"moe_intermediate_dim": 64, "head_dim": 8},
    "Qwen3_5": HEADS | LINEAR | {"head_dim": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_sums_twice_a_block_and_gathers_neither_weights_nor_cache(family):
    def build():
        backbone = getattr(models, f"{family}Backbone")(**SIZES, **FAMILIES[family])
        model = getattr(models, f"{family}CausalLM")(backbone=backbone, preprocessor=None)
        model.compile(sampler="greedy")
        return model

    start_anew()
    mesh = kd.create_device_mesh("data:2,model:4")
    distribution = kd.ModelParallel(layout_map=kd.tensor_parallel_layout_map(build, mesh), batch_dim_name="data")
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32")
    batch = ({"token_ids": tokens, "padding_mask": tokens},)
    sent = kd.plan(build, distribution, batch, step="generate", progress=False).collectives
    assert {each.kind for each in sent} <= {"all-reduce", "all-gather"}
    sums = sum(each.count for each in sent if each.kind == "all-reduce")
    assert BLOCKS <= sums <= 2 * BLOCKS + 3  # the others look a token up, and choose the next one
    # Less than the logits of a row: what is chosen of them, and where experts choose tokens, their gates.
    assert all(each.bytes < 4 * VOCABULARY for each in sent if each.kind == "all-gather")

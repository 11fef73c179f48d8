"""Memory of a chip on which Gemma 4 26B-A4B is fine-tuned with LoRA on 4,096 tokens per chip, planned on a CPU.

KerasHub's Gemma 4 with 25 billion parameters in bfloat16, of which a token uses 4 billion: 30 blocks of width 2,816,
each with 128 experts of width 704, of which tokens choose 8. LoRA of rank 8 on the queries and values of attention,
AdamW, one sequence for each of the eight chips of TPU v5e. FSDP with experts sharded over the same axis; each block is
computed again for the backward pass, and so are gathered weights. Images and audio are left out.

All blocks are compiled, in 11 minutes of CPU time and 10.3 GiB of memory.

Run: pip install ".[tpu,hub]" tensorflow-cpu && python benchmarks/gemma4_lora.py
"""

import os
import time

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import jax
import keras
import keras_hub

import keras_dist as kd

BLOCKS, ROWS, LENGTH = 30, 8, 4096


def build(blocks: int = BLOCKS) -> keras.Model:
    """Returns a compiled Gemma 4 with LoRA. Nothing in it refers to a distribution."""
    # Source: the configuration of google/gemma-4-26B-A4B, `text_config`.
    backbone = keras_hub.models.Gemma4Backbone(
        vocabulary_size=262144,
        image_size=896,
        num_layers=blocks,
        num_query_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        hidden_dim=2816,
        intermediate_dim=2112,
        enable_moe_block=True,
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_dim=704,
        sliding_window_size=1024,
        sliding_window_pattern=6,
        global_rope_partial_rotary_factor=0.25,
        final_logit_soft_cap=30.0,
        dtype="bfloat16",
    )
    backbone.enable_lora(rank=8)
    model = keras_hub.models.Gemma4CausalLM(preprocessor=None, backbone=backbone)
    model.compile(keras.optimizers.AdamW(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def planned() -> kd.Plan:
    """Plans a training step of the model."""
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32")
    batch = dict.fromkeys(("token_ids", "padding_mask", "position_ids"), tokens), tokens
    distribution = kd.FullyShardedDataParallel(
        kd.create_device_mesh("fsdp:8", devices=kd.target("v5e:2x4")),
        expert_dim_name="fsdp",
        reshard_after_forward=True,
        step_options=kd.StepOptions(remat="full"),
    )
    return kd.plan(build, distribution, batch)


def main():
    started = time.perf_counter()
    print(planned())
    print(f"Planned in {time.perf_counter() - started:.0f} s.")


if __name__ == "__main__":
    main()

"""FLOP, traffic and memory of a training step of Qwen3-MoE, its mixtures computed in several ways.

They are computed for all experts ("dense"), for chosen ones ("sparse"), and for chosen ones with the experts sharded
over all devices, so that tokens are sent to them ("exchanged"); also with tensor parallelism ("TP").

Two blocks of width 512 with 32 experts of width 256, of which tokens choose 4; 16 sequences of 1,024 tokens, AdamW,
bfloat16 compute and float32 weights under FSDP (x TP), compiled for eight devices that need not be attached.

Run: pip install ".[tpu,cuda12]" keras-hub && python benchmarks/experts.py [--targets v5e:2x4 h100:8]
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import keras_dist as kd  # isort: skip  # sets Keras's backend
import jax
import keras
import keras_hub

LENGTH, ROWS = 1024, 16


def build():
    backbone = keras_hub.models.Qwen3MoeBackbone(
        vocabulary_size=1024,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=512,
        intermediate_dim=2048,
        moe_intermediate_dim=256,
        num_experts=32,
        head_dim=64,
        top_k=4,
        norm_top_k_prob=True,
        dtype="mixed_bfloat16",
    )
    inputs = {name: keras.Input((LENGTH,), dtype="int32", name=name) for name in ("token_ids", "padding_mask")}
    model = keras.Model(inputs, backbone.token_embedding(backbone(inputs), reverse=True))
    model.compile(keras.optimizers.AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


FORMS = "dense", "sparse", "exchanged", "dense, TP", "sparse, TP"


def planned(target: str, form: str, reserved: int = 0) -> kd.Plan:
    """Plans the step on all eight devices of a target: under FSDP, or with tensor parallelism over four of them."""
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32")
    batch = {"token_ids": tokens, "padding_mask": tokens}, tokens
    mesh = kd.create_device_mesh("data:2,model:4" if "TP" in form else "data:8", devices=kd.target(target))
    distribution = kd.FullyShardedDataParallel(
        mesh,
        layout_map=kd.tensor_parallel_layout_map(build, mesh) if "TP" in form else None,
        expert_dim_name="data" if form == "exchanged" else None,
        step_options=kd.StepOptions(experts="dense" if "dense" in form else "sparse"),
    )
    options = {"xla_tpu_user_reserved_hbm_bytes": reserved * 2**20} if reserved else None
    return kd.plan(build, distribution, batch=batch, compiler_options=options, progress=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", nargs="+", default=["v5e:2x4", "h100:8"])
    parser.add_argument("--reserved", type=int, default=0, help="MiB of memory that a TPU's compiler must leave free")
    arguments = parser.parse_args()
    print("| | GFLOP a device | MiB sent | MiB of temporaries | forecast, ms |\n|---|---|---|---|---|")
    for target in arguments.targets:
        for form in FORMS:
            plan = planned(target, form, arguments.reserved)
            figures = plan.flops / 1e9, plan.wire_bytes / 2**20, plan.memory.temporaries / 2**20
            row = [f"{target}, {form}", *(f"{each:.1f}" for each in figures)]
            print(f"| {' | '.join(row)} | {plan.roofline.forecast.seconds * 1e3:.2f} |", flush=True)


if __name__ == "__main__":
    main()

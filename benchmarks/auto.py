"""How good the choices of `kd.auto` are: against all candidates, and against KerasHub's own layout maps.

* `exhaustive`: 20 small cases, 5 models on 4 targets. Each candidate of each case is compiled. The choice of `kd.auto`
  is compared with the candidate whose forecast is best, in time and in the number of compilations. The models use ReLU,
  because XLA:TPU needs minutes to find good fusions for GELU.
* `keras_hub`: KerasHub's causal language models that have a layout map, with few blocks, on two targets. Bytes sent and
  temporaries of the choice are compared with those of `ModelParallel` with KerasHub's map on the same devices.
* `families`: small models of KerasHub and Keras of many kinds, each with its choice on two targets.
* `llama`: a Llama 3 of 8 and of 70 billion parameters, chosen for 64 and 512 chips of TPU v5p.

What is compiled is kept on disk (see `docs/auto.md`), so a run that was stopped goes on where it was.

Run: pip install ".[tpu,cuda12,hub]" tensorflow-cpu && python benchmarks/auto.py exhaustive [case ...]
"""

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import keras
from keras import layers, ops

import keras_dist as kd
from keras_dist.planning.search.choosing import Task
from keras_dist.planning.search.estimates import seconds_of
from keras_dist.planning.search.places import place_of
from keras_dist.planning.search.search_space import search_space

TARGETS = "v5e:2x2", "v5e:2x4", "h100:4", "h100:8"


# --------------------------------------------------------------------------------------------------------------- models


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def perceptron() -> keras.Model:
    """Wide layers and few rows: weights are larger than activations."""
    x = inputs = keras.Input((2048,))
    for number in range(2):
        x = layers.Dense(8192, activation="relu", name=f"up{number}")(x)
        x = layers.Dense(2048, name=f"down{number}")(x)
    return compiled(keras.Model(inputs, layers.Dense(16, name="head")(x), name="perceptron"))


def attention_block(x, number: int, width: int, causal: bool):
    y = layers.LayerNormalization(name=f"block{number}_norm1")(x)
    y = layers.MultiHeadAttention(8, width // 8, name=f"block{number}_attention")(y, y, use_causal_mask=causal)
    x = layers.Add(name=f"block{number}_add1")([x, y])
    y = layers.LayerNormalization(name=f"block{number}_norm2")(x)
    y = layers.Dense(4 * width, activation="relu", name=f"block{number}_up")(y)
    return layers.Add(name=f"block{number}_add2")([x, layers.Dense(width, name=f"block{number}_down")(y)])


def gpt() -> keras.Model:
    """A decoder with short sequences and many rows."""
    tokens = keras.Input((256,), dtype="int32")
    x = attention_block(layers.Embedding(2048, 256, name="embedding")(tokens), 0, 256, causal=True)
    return compiled(keras.Model(tokens, layers.Dense(2048, name="head")(x), name="gpt"))


def encoder() -> keras.Model:
    """An encoder with two inputs, long sequences and few rows."""
    tokens, segments = (keras.Input((2048,), dtype="int32", name=name) for name in ("tokens", "segments"))
    x = layers.Add()([layers.Embedding(2048, 256, name="words")(tokens), layers.Embedding(2, 256)(segments)])
    x = attention_block(x, 0, 256, causal=False)
    return compiled(keras.Model([tokens, segments], layers.Dense(2048, name="head")(x), name="encoder"))


def convnet() -> keras.Model:
    """Convolutions, also depthwise, with a batch norm and a residual."""
    images = keras.Input((32, 32, 3))
    x = layers.Conv2D(128, 3, 2, padding="same", use_bias=False, name="stem")(images)
    x = layers.ReLU()(layers.BatchNormalization(name="norm")(x))
    y = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depthwise")(x)
    x = layers.Add()([x, layers.Conv2D(128, 1, name="pointwise")(y)])
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(256, 3, 2, padding="same", name="wide")(x))
    return compiled(keras.Model(images, layers.Dense(16, name="head")(x), name="convnet"))


class Experts(keras.Layer):
    """A mixture of experts: a router weighs all of them for each token."""

    def __init__(self, experts: int, hidden: int, **kwargs):
        super().__init__(**kwargs)
        self.experts, self.hidden = experts, hidden

    def build(self, shape):
        width = shape[-1]
        self.router = self.add_weight(shape=(width, self.experts), name="router")
        self.up = self.add_weight(shape=(self.experts, width, self.hidden), name="up")
        self.down = self.add_weight(shape=(self.experts, self.hidden, width), name="down")

    def call(self, x):
        chances = ops.softmax(ops.matmul(x, self.router))
        hidden = ops.relu(ops.einsum("...d,edh->...eh", x, self.up))
        return ops.einsum("...eh,ehd,...e->...d", hidden, self.down, chances)

    def compute_output_shape(self, shape):
        return shape


def mixture() -> keras.Model:
    """A decoder block whose dense layers are experts."""
    tokens = keras.Input((128,), dtype="int32")
    x = attention_block(layers.Embedding(2048, 256, name="embedding")(tokens), 0, 256, causal=True)
    x = layers.Add()([x, Experts(8, 512, name="experts")(layers.LayerNormalization(name="norm")(x))])
    return compiled(keras.Model(tokens, layers.Dense(2048, name="head")(x), name="mixture"))


# Models with their rows for each device.
MODELS: dict[str, tuple[Callable, float]] = {
    "perceptron": (perceptron, 4),
    "gpt": (gpt, 4),
    "encoder": (encoder, 0.5),
    "convnet": (convnet, 32),
    "mixture": (mixture, 2),
}


# ----------------------------------------------------------------------------------------------------------- exhaustive


def exhaustive(chosen: list[str]) -> Iterator[str]:
    """Yields a row for each case: the choice of `kd.auto`, the best of all candidates, and the compilations of both."""
    yield "| model | target | chosen | best of all | its time | chosen / best | compiled by auto | candidates |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, (build, rows_per_device) in MODELS.items():
        for target in TARGETS:
            if chosen and name not in chosen and f"{name}@{target}" not in chosen:
                continue
            place = place_of(target, None)
            rows = max(1, int(rows_per_device * len(place.devices)))
            choice = kd.auto(build, rows, target)
            task = Task(build)
            candidates = search_space(build, task.step, task.strategies, place, rows).candidates
            times = {}
            for candidate, distribution in candidates.items():
                plan = task.plan(distribution, rows)
                if plan.fits:
                    times[candidate] = seconds_of(plan)
            best = min(times, key=times.__getitem__)
            compilations = sum(trial.plan is not None for trial in choice.trials)
            ratio = seconds_of(choice.plan) / times[best]
            yield (
                f"| {name} | {target} | {choice.trials[0].candidate} | {best} | {1e6 * times[best]:.0f} us | "
                f"{ratio:.3f} | {compilations} | {len(candidates)} |"
            )


# ------------------------------------------------------------------------------------------------------------ KerasHub


def token_batch(rows: int, length: int) -> tuple:
    ids = jax.ShapeDtypeStruct((rows, length), "int32")
    return {"token_ids": ids, "padding_mask": ids}, ids


def hub_model(family: str, depth: int) -> keras.Model:
    """Returns a causal language model of KerasHub with `depth` blocks."""
    import keras_hub

    keras.config.set_dtype_policy("mixed_bfloat16")
    sizes = {"vocabulary_size": 8192, "num_layers": depth, "num_query_heads": 8, "hidden_dim": 1024}
    sizes |= {"intermediate_dim": 4096, "num_key_value_heads": 4}
    if family == "Gemma":
        sizes |= {"head_dim": 128}
    if "Moe" in family:
        sizes |= {"moe_intermediate_dim": 512, "num_experts": 8, "top_k": 2, "head_dim": 128}
        sizes |= {"shared_expert_intermediate_dim": 1024} if family == "QwenMoe" else {}
        sizes.pop("head_dim") if family == "QwenMoe" else None
    backbone = getattr(keras_hub.models, f"{family}Backbone")(**sizes)
    return compiled(getattr(keras_hub.models, f"{family}CausalLM")(backbone, preprocessor=None))


FAMILIES = "Llama", "Llama3", "Gemma", "Qwen", "QwenMoe", "Qwen3Moe"


def against_keras_hub(chosen: list[str]) -> Iterator[str]:
    """Yields a row for each family and target: the choice of `kd.auto` and KerasHub's own map."""
    import keras_hub

    yield "| model | target | chosen | sent: hub, chosen | temporaries: hub, chosen | forecast: hub, chosen |"
    yield "|---|---|---|---|---|---|"
    for family in FAMILIES:
        for target in ("v5e:4x4", "h100:8"):
            if chosen and family not in chosen:
                continue
            devices = kd.target(target)
            batch = token_batch(2 * len(devices), 1024)
            mesh = kd.create_device_mesh({"batch": len(devices) // 4, "model": 4}, devices=devices)
            layout_map = getattr(keras_hub.models, f"{family}Backbone").get_layout_map(mesh)
            hub = kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
            theirs = kd.plan(lambda family=family: hub_model(family, 2), hub, batch)
            choice = kd.auto(lambda family=family: hub_model(family, 2), batch, target)
            ours = choice.plan
            yield (
                f"| {family} | {target} | {choice.trials[0].candidate} "
                f"| {theirs.wire_bytes / 2**20:.0f}, {ours.wire_bytes / 2**20:.0f} MiB "
                f"| {theirs.memory.temporaries / 2**20:.0f}, {ours.memory.temporaries / 2**20:.0f} MiB "
                f"| {1e3 * seconds_of(theirs):.2f}, {1e3 * seconds_of(ours):.2f} ms |"
            )


# ------------------------------------------------------------------------------------------------------------ families

WIDTHS = {"num_layers": 2, "hidden_dim": 256, "intermediate_dim": 512}
TEXT = {"vocabulary_size": 1024, **WIDTHS}
HEADS = {"num_query_heads": 8, "num_key_value_heads": 4}
ENCODER_DECODER = {"max_encoder_sequence_length": 128, "max_decoder_sequence_length": 128}
MOBILE = {"include_top": False, "weights": None, "input_shape": (64, 64, 3)}

# Backbones of KerasHub with the arguments that make them small.
BACKBONES: dict[str, dict[str, Any]] = {
    "Bart": {**TEXT, "num_heads": 8, "max_sequence_length": 128},
    "Bert": {**TEXT, "num_heads": 8},
    "FNet": {**TEXT, "max_sequence_length": 128},
    "Gemma3": {**TEXT, **HEADS, "head_dim": 32, "image_size": 16, "vision_encoder": None},
    "GPT2": {**TEXT, "num_heads": 8},
    "GPTNeoX": {**TEXT, "num_heads": 8},
    "Mistral": {**TEXT, **HEADS},
    "Mixtral": {**TEXT, **HEADS, "num_experts": 8, "top_k": 2},
    "Phi3": {**TEXT, **HEADS},
    "RWKV7": {
        "vocabulary_size": 1024, "num_layers": 2, "hidden_size": 256, "intermediate_dim": 512, "head_size": 32,
        "gate_lora": 16, "mv_lora": 8, "aaa_lora": 8, "decay_lora": 8,
    },
    "T5": {**TEXT, "num_heads": 8},
    "ViT": {
        "image_shape": (64, 64, 3), "patch_size": 8, "num_layers": 2, "num_heads": 8, "hidden_dim": 256, "mlp_dim": 512,
    },
    "Whisper": {**TEXT, "num_heads": 8, **ENCODER_DECODER},
    "ResNet": {
        "input_conv_filters": [64], "input_conv_kernel_sizes": [3], "stackwise_num_filters": [64, 128],
        "stackwise_num_blocks": [2, 2], "stackwise_num_strides": [1, 2], "block_type": "bottleneck_block",
        "image_shape": (64, 64, 3),
    },
}  # fmt: skip


def recurrent() -> keras.Model:
    tokens = keras.Input((128,), dtype="int32")
    x = layers.Bidirectional(layers.LSTM(256, return_sequences=True))(layers.Embedding(1024, 256)(tokens))
    return keras.Model(tokens, layers.GRU(256, return_sequences=True)(x))


OTHERS: dict[str, Callable[[], keras.Model]] = {
    "MobileNet": lambda: keras.applications.MobileNet(**MOBILE),
    "EfficientNetV2B0": lambda: keras.applications.EfficientNetV2B0(**MOBILE),
    "LSTM and GRU": recurrent,
}


def family(name: str) -> keras.Model:
    """Returns a small model of a family, whose first output is trained to be zero."""
    import keras_hub

    keras.config.set_dtype_policy("mixed_bfloat16")
    model = OTHERS[name]() if name in OTHERS else getattr(keras_hub.models, f"{name}Backbone")(**BACKBONES[name])
    model = keras.Model(model.inputs, jax.tree.leaves(model.outputs)[0])
    model.compile("adam", lambda true, predicted: ops.mean(ops.square(predicted), axis=-1))
    return model


def batch_of(name: str, rows: int) -> tuple:
    """Returns a batch for a family: its inputs with 128 positions where their length is unknown."""
    with kd.deferred():
        model = family(name)

    def spec(tensor: keras.KerasTensor) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *(128 if size is None else size for size in tensor.shape[1:])), tensor.dtype)

    return [spec(tensor) for tensor in model.inputs], jax.ShapeDtypeStruct((rows, 1), "float32")


def families(chosen: list[str]) -> Iterator[str]:
    """Yields a row for each family and target: whether tensor parallelism is possible, and the choice."""
    yield "| model | target | candidates | tensor parallel | chosen | memory | time | compiled |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in (*BACKBONES, *OTHERS):
        for target in ("v5e:4x4", "h100:8"):
            if chosen and name not in chosen:
                continue
            rows = 2 * len(kd.target(target))
            choice = kd.auto(lambda name=name: family(name), batch_of(name, rows), target, trials=3)
            plan = choice.plan
            assert plan.fits
            compilations = sum(trial.plan is not None for trial in choice.trials)
            has_rules = any("model" in trial.candidate.axes for trial in choice.trials)
            yield (
                f"| {name} | {target} | {len(choice.trials)} | {'yes' if has_rules else 'no'} "
                f"| {choice.trials[0].candidate} | {plan.memory.total / 2**20:.0f} MiB "
                f"| {1e6 * seconds_of(plan):.0f} us | {compilations} |"
            )


# --------------------------------------------------------------------------------------------------------------- Llama


def llama(chosen: list[str]) -> Iterator[str]:
    """Yields the choice for Llama 3, with the time it took and the peak memory of the process."""
    import plan_llama

    for size, target in (("8b", "v5p:4x4x4"), ("70b", "v5p:8x8x8")):
        if chosen and size not in chosen:
            continue
        sizes = dict(plan_llama.SIZES[size])
        depth = sizes.pop("layers")
        rows = len(kd.target(target))
        started = time.perf_counter()
        choice = kd.auto(
            lambda blocks, sizes=sizes: plan_llama.build(blocks, **sizes), token_batch(rows, 4096), target, depth=depth
        )
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        yield str(choice)
        yield f"Llama 3 {size} for {target}: chosen in {seconds:.0f} s, peak memory of the process {peak:.1f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("exhaustive", "keras_hub", "families", "llama"))
    parser.add_argument("case", nargs="*", help="a model, or model@target; all by default")
    options = parser.parse_args()
    tables = {"exhaustive": exhaustive, "keras_hub": against_keras_hub, "families": families, "llama": llama}
    for row in tables[options.table](options.case):
        print(row, flush=True)


if __name__ == "__main__":
    main()

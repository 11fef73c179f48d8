"""KerasHub's mixtures of experts under each strategy: computed for chosen experts only, with the numbers of Keras."""

import functools

import jax
import keras
import numpy as np
import pytest
from support.keras_scenarios import start_anew
from support.slow_cases import slow, slow_unless
from support.strategy_models import assert_same_numbers, fsdp, model_parallel, scope, tensor_parallel

import keras_dist as kd
from keras_dist.steps.repeated_blocks import RepeatedBlocks
from keras_dist.steps.step_state import recorded_calls

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
VOCABULARY, LENGTH = 32, 8
HEADS = {"num_query_heads": 4, "num_key_value_heads": 2}
SIZES = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24}


def mixtral():
    return keras_hub.models.MixtralBackbone(**SIZES, **HEADS, num_experts=8, top_k=2)


def qwen_moe():
    own = {"moe_intermediate_dim": 12, "shared_expert_intermediate_dim": 8, "num_experts": 8, "top_k": 2}
    return keras_hub.models.QwenMoeBackbone(**SIZES, **HEADS, **own)


def qwen3_moe():
    own = {"moe_intermediate_dim": 12, "num_experts": 8, "top_k": 2, "head_dim": 4, "norm_top_k_prob": True}
    return keras_hub.models.Qwen3MoeBackbone(**SIZES, **HEADS, **own)


def gpt_oss():
    return keras_hub.models.GptOssBackbone(**SIZES, **HEADS, head_dim=4, num_experts=8, top_k=2, sliding_window=4)


def qwen3_5_moe():
    """Blocks of linear attention and of attention, each twice: `remat` is for blocks that are repeated."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": 2 * KINDS}
    linear |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4}
    own = {"moe_intermediate_dim": 12, "shared_expert_intermediate_size": 8, "num_experts": 8, "top_k": 2}
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_dim"} | {"num_layers": 4}
    return keras_hub.models.Qwen3_5MoeBackbone(**sizes, **HEADS, **own, **linear, head_dim=8)


def gemma4(**other):
    own = {"enable_moe_block": True, "num_experts": 8, "expert_intermediate_dim": 12, "num_experts_per_token": 2}
    own |= {"head_dim": 4, "image_size": 16, "sliding_window_size": 4}
    return keras_hub.models.Gemma4Backbone(**{**SIZES, **HEADS, **own, **other})


KINDS = ["linear_attention", "full_attention"]
BACKBONES = {
    "Mixtral": mixtral,
    "Qwen-MoE": qwen_moe,
    "Qwen3-MoE": qwen3_moe,
    "Qwen3.5-MoE": qwen3_5_moe,
    "GPT-OSS": gpt_oss,
    "Gemma 4": gemma4,
}
LANGUAGE_MODELS = {
    "Mixtral": keras_hub.models.MixtralCausalLM,
    "Qwen-MoE": keras_hub.models.QwenMoeCausalLM,
    "Qwen3-MoE": keras_hub.models.Qwen3MoeCausalLM,
    "Qwen3.5-MoE": keras_hub.models.Qwen3_5MoeCausalLM,
    "GPT-OSS": keras_hub.models.GptOssCausalLM,
    "Gemma 4": keras_hub.models.Gemma4CausalLM,
}


def with_options(**options):
    return fsdp(step_options=kd.StepOptions(**options))


STRATEGIES = {
    "one device": lambda: kd.DataParallel(kd.create_device_mesh("data:1", devices=1)),
    "DP": kd.DataParallel,
    "ZeRO-1": lambda: kd.DataParallel(shard_optimizer_state=True),
    "FSDP": fsdp,
    "FSDP, gathered again": lambda: fsdp(reshard_after_forward=True),
    "HSDP": lambda: fsdp("replica:2,fsdp:4"),
    "CP": lambda: fsdp("data:4,context:2", sequence_dim_name="context"),
    "CP, gathered again": lambda: fsdp("data:4,context:2", sequence_dim_name="context", reshard_after_forward=True),
    "unreduced": lambda: with_options(reduce_dtype="float32"),
    "microbatches": lambda **options: with_options(microbatches=2, **options),
    "remat full": lambda: with_options(remat="full"),
    "remat dots": lambda: with_options(remat="dots"),
    "accumulation": kd.DataParallel,
}


def language_model(name, accumulated=None, rank=None):
    backbone = BACKBONES[name]()
    if rank is not None:
        backbone.enable_lora(rank)
    inputs = backbone.input
    model = keras.Model(inputs, backbone.token_embedding(backbone(inputs), reverse=True))
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulated)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def outcome(name, distribution, accumulated=None, rank=None):
    """What a model computes in three steps and afterwards, and how its mixtures were computed.

    With a rank, only low-rank factors of attention's weights are trained.
    """
    start_anew()
    with scope(distribution), recorded_calls() as calls:
        keras.utils.set_random_seed(0)
        model = language_model(name, accumulated, rank)
        random = np.random.default_rng(0)
        tokens = random.integers(1, VOCABULARY, (48, LENGTH + 1))
        x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((48, LENGTH), "int32")}
        x["position_ids"] = np.broadcast_to(np.arange(LENGTH, dtype="int32"), (48, LENGTH))
        x = {name: x[name] for name in model.input}
        y = tokens[:, 1:]
        history = model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0).history
        evaluated, predicted = model.evaluate(x, y, 16, verbose=0), model.predict(x, 16, verbose=0)
        return [history, evaluated, predicted, model.get_weights()], calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, strategy) for name in BACKBONES for strategy in STRATEGIES],
)
def test_training_is_that_of_keras_alone(name, strategy):
    accumulated = 3 if strategy == "accumulation" else None
    found, calls = outcome(name, STRATEGIES[strategy](), accumulated)
    mixtures = [call for call in calls if hasattr(call, "form")]
    assert {call.form for call in mixtures} == {"blocks"}
    if "CP" in strategy:  # each device computes the tokens that it has, although layers flatten batch and positions
        assert {call.rows for call in mixtures} == {16 * LENGTH // 8 * call.num_chosen for call in mixtures}
    # A loss that balances the load of experts is another one for each microbatch.
    reference = STRATEGIES[strategy](experts="dense") if strategy == "microbatches" else None
    expected, _ = outcome(name, reference, accumulated)
    assert_same_numbers(found, expected, 5e-5)  # after three steps


def rules_of(name, mesh, **options):
    start_anew()  # some layers are named by how many there are
    return tensor_parallel(lambda: language_model(name), mesh, **options)


def with_experts(axes="data:2,expert:4", expert_dim_name="expert", **arguments):
    return fsdp(axes, expert_dim_name=expert_dim_name, **arguments)


def rules_for_experts(name):
    """Rules that shard experts over two axes, those of the derived rules and that of the expert axis."""
    rules = rules_of(name, "data:2,expert:2,model:2")
    with kd.deferred():
        model = language_model(name)
    for variable in model.weights:
        if len(variable.shape) == 3 and variable.shape[0] == 8:
            _, *others = rules[variable.path].axes
            rules[variable.path] = ("expert", *others) if any(others) else (("expert", "model"), *others)
    return kd.ModelParallel(layout_map=rules, batch_dim_name="data", expert_dim_name="expert")


@functools.cache
def of_keras_alone(name, accumulated):
    return outcome(name, None, accumulated)[0]


SHARDED = {
    "EP": lambda name: with_experts("fsdp:8", "fsdp"),
    "EP, own axis": lambda name: with_experts(),
    "EP, gathered again": lambda name: with_experts(reshard_after_forward=True),
    "EP, remat full": lambda name: with_experts(step_options=kd.StepOptions(remat="full")),
    "EP, remat dots": lambda name: with_experts(step_options=kd.StepOptions(remat="dots")),
    "EP, microbatches": lambda name, **options: with_experts(step_options=kd.StepOptions(microbatches=2, **options)),
    "EP, accumulation": lambda name: with_experts(),
    "EP, HSDP": lambda name: with_experts("replica:2,data:2,expert:2", replica_axis="replica"),
    "EP, CP": lambda name: with_experts("data:2,expert:2,context:2", sequence_dim_name="context"),
    "EP over CP": lambda name: with_experts("data:4,context:2", "context", sequence_dim_name="context"),
    "EP, unreduced": lambda name: with_experts(step_options=kd.StepOptions(reduce_dtype="float32")),
    "TP": lambda name: model_parallel(rules_of(name, "data:4,model:2")),
    "TP, SP": lambda name: model_parallel(rules_of(name, "data:4,model:2", sequence_parallel=True)),
    "FSDP x TP": lambda name: fsdp(layout_map=rules_of(name, "data:4,model:2")),
    "FSDP x TP, gathered again": lambda name: fsdp(
        layout_map=rules_of(name, "data:4,model:2"), reshard_after_forward=True
    ),
    "EP x TP": rules_for_experts,
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("name", BACKBONES)
def test_training_with_sharded_experts_is_that_of_keras_alone(name, strategy):
    accumulated = 3 if "accumulation" in strategy else None
    build = functools.partial(SHARDED[strategy], name)
    found, calls = outcome(name, build(), accumulated)
    calls = [call for call in calls if hasattr(call, "form")]
    assert {call.form for call in calls} == {"blocks"}
    sent = "tokens" if "EP" in strategy else None
    assert {call.exchange and call.exchange.partition(" ")[0] for call in calls} == {sent}
    if "microbatches" in strategy:  # a loss that balances the load of experts is another one for each microbatch
        expected, _ = outcome(name, build(experts="dense"))
    else:
        expected = of_keras_alone(name, accumulated)
    assert_same_numbers(found, expected, 5e-5)  # after three steps


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONES)
def test_low_rank_factors_are_trained_beside_experts(name):
    found, calls = outcome(name, fsdp(), rank=2)
    assert {call.form for call in calls if hasattr(call, "form")} == {"blocks"}
    expected, _ = outcome(name, None, rank=2)
    assert_same_numbers(found, expected, 5e-5)


@pytest.mark.parametrize("rows", [slow(1), 8])
@pytest.mark.parametrize("name", [slow_unless(name == "Qwen3-MoE", name) for name in LANGUAGE_MODELS])
def test_generate_reads_the_weights_of_chosen_experts(name, rows):
    def generated(distribution):
        start_anew()
        with scope(distribution), recorded_calls() as calls:
            keras.utils.set_random_seed(0)
            model = LANGUAGE_MODELS[name](backbone=BACKBONES[name](), preprocessor=None)
            model.compile(sampler="greedy")
            prompts = np.random.default_rng(0).integers(1, VOCABULARY, (rows, LENGTH)) * (np.arange(LENGTH) < 4)
            batch = {"token_ids": prompts.astype("int32"), "padding_mask": (prompts > 0).astype("int32")}
            return np.asarray(model.generate(batch, stop_token_ids=None)["token_ids"]), calls

    found, calls = generated(kd.DataParallel())
    mixtures = [call for call in calls if hasattr(call, "form")]
    layers = 4 if name == "Qwen3.5-MoE" else 2
    assert len(mixtures) == 2 * layers  # for the prompts and for the next token
    assert {call.form for call in mixtures[layers:]} == {"chosen weights" if rows == 1 else "blocks"}
    assert mixtures[-1].rows == 2
    np.testing.assert_array_equal(found, generated(None)[0])


def test_layers_with_local_and_global_attention_are_computed_again_one_by_one():
    """Of seven layers of Gemma 4, the sixth has global attention, with weights of other shapes."""
    local_and_global = {"global_head_dim": 8, "num_global_key_value_heads": 1, "num_layers": 7}
    with kd.deferred():
        backbone = gemma4(**local_and_global)
    (parts,) = RepeatedBlocks(backbone).parts.values()
    blocks = [[node.operation.name for node in part.nodes] for part in parts if part.is_block]
    assert blocks == [[f"decoder_block_{number}"] for number in range(7)]


@pytest.mark.slow
def test_weights_of_experts_are_gathered_again():
    """As those of all layers, with as many bytes as if all experts were computed."""

    def planned(reshard_after_forward, experts):
        step_options = kd.StepOptions(experts=experts)
        distribution = fsdp(reshard_after_forward=reshard_after_forward, step_options=step_options)
        tokens = jax.ShapeDtypeStruct((16, LENGTH), "int32")
        batch = {"token_ids": tokens, "padding_mask": tokens}, tokens
        return kd.plan(lambda: language_model("Qwen3-MoE"), distribution, batch, progress=False)

    again = planned(True, "sparse")
    assert again.wire_bytes <= 1.01 * planned(True, "dense").wire_bytes
    experts = 2 * 4 * 8 * (16 * 24 + 12 * 16)  # bytes of two layers
    assert again.wire_bytes - planned(False, "sparse").wire_bytes >= 0.9 * experts * 7 / 8

"""`generate()` of KerasHub's mixtures of experts on devices that store shards of the weights."""

import inspect

import jax
import keras
import numpy as np
import pytest
from support.keras_scenarios import start_anew
from support.slow_cases import slow_unless
from support.strategy_models import scope

import keras_dist as kd
from keras_dist.planning.hlo.module_costs import ModuleReader

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
VOCABULARY, LENGTH, WIDTH, HIDDEN, CHOSEN = 32, 8, 64, 32, 2
BYTES_OF_EXPERT = 4 * 3 * WIDTH * HIDDEN  # gate, up and down


def language_model(num_experts=16):
    """All its weights are small but those of experts."""
    backbone = keras_hub.models.Qwen3MoeBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        hidden_dim=WIDTH,
        intermediate_dim=24,
        num_query_heads=4,
        num_key_value_heads=2,
        moe_intermediate_dim=HIDDEN,
        num_experts=num_experts,
        top_k=CHOSEN,
        head_dim=4,
        norm_top_k_prob=True,
    )
    model = keras_hub.models.Qwen3MoeCausalLM(backbone=backbone, preprocessor=None)
    model.compile(sampler="greedy")
    return model


def tensor_parallel():
    mesh = kd.create_device_mesh("data:2,model:4")
    layout_map = kd.tensor_parallel_layout_map(language_model, mesh)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


def generated(distribution, rows, num_experts):
    """What a model generates, and its compiled function."""
    start_anew()
    with scope(distribution):
        keras.utils.set_random_seed(0)
        model = language_model(num_experts)
        prompts = np.random.default_rng(0).integers(1, VOCABULARY, (rows, LENGTH)) * (np.arange(LENGTH) < 4)
        batch = {"token_ids": prompts.astype("int32"), "padding_mask": (prompts > 0).astype("int32")}
        tokens = model.generate(batch, stop_token_ids=None)["token_ids"]
        function = inspect.getclosurevars(model.generate_function).nonlocals["compiled_generate_function"]
        variables = model.sampler.variables, model.trainable_variables, model.non_trainable_variables
        state = tuple([variable.value for variable in each] for each in variables)
        return np.asarray(tokens), function.lower(batch, None, state).compile().as_text()


STRATEGIES = {
    "FSDP": kd.FullyShardedDataParallel,
    "HSDP": lambda: kd.FullyShardedDataParallel(kd.create_device_mesh("replica:2,fsdp:4"), shard_axis="fsdp"),
    "EP": lambda: kd.FullyShardedDataParallel(expert_dim_name="fsdp"),
    "TP": tensor_parallel,
}
CASES = [*((name, 1, 16) for name in STRATEGIES), *((name, 8, 16) for name in ("FSDP", "HSDP", "TP")), ("FSDP", 1, 12)]
FAST = {("FSDP", 1, 12)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rows", "num_experts"),
    [pytest.param(*case, marks=slow_unless(case in FAST, case[0]).marks) for case in CASES],
)
def test_generate_sends_tokens_and_no_weights_of_experts(strategy, rows, num_experts):
    """Devices have shards of experts; of 12, they have shards of the width, which are gathered for the prompt."""
    distribution = STRATEGIES[strategy]()
    mesh = distribution.device_mesh
    found, text = generated(distribution, rows, num_experts)
    costs = ModuleReader(text, dict(zip(mesh.axis_names, mesh.shape, strict=True))).module_costs()
    # The loop's body, of a token, counts once. Of the last layer, a prompt takes only keys and values.
    gathered = num_experts * BYTES_OF_EXPERT * 7 / 8 if num_experts == 12 else 0
    assert gathered < costs.wire_bytes < gathered + CHOSEN * BYTES_OF_EXPERT
    np.testing.assert_array_equal(found, generated(None, rows, num_experts)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "rows", "is_gathered"), [("predict", 8, False), ("predict", 1024, True), ("train", 8, True)]
)
def test_weights_are_gathered_for_many_tokens_and_in_train_steps(step, rows, is_gathered):
    """From 32 rows for an expert on, each device computes its own tokens."""

    def build():
        model = language_model().backbone
        model.compile("sgd", "mse")
        return model

    tokens = jax.ShapeDtypeStruct((rows, 1), "int32")
    batch = {"token_ids": tokens, "padding_mask": tokens}, jax.ShapeDtypeStruct((rows, 1, WIDTH), "float32")
    plan = kd.plan(build, kd.FullyShardedDataParallel(), batch, step=step, progress=False)
    gathered = 2 * 16 * BYTES_OF_EXPERT * 7 / 8
    assert plan.wire_bytes >= gathered if is_gathered else plan.wire_bytes < 0.1 * gathered

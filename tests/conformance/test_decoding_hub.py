"""`generate()` of a dense language model of KerasHub: what each token costs, and the same tokens as without devices."""

import functools
import inspect
from dataclasses import replace

import jax
import keras
import numpy as np
import pytest
from support.compilers import EIGHT_DEVICES, needs_cuda
from support.keras_scenarios import start_anew
from support.slow_cases import slow
from support.strategy_models import scope

import keras_dist as kd
from keras_dist.planning.hlo.module_costs import ModuleReader
from keras_dist.planning.hlo.parser import parse_module
from keras_dist.planning.hlo.shapes import leaves
from keras_dist.planning.targets.target_platform import platform_overridden

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
VOCABULARY, LENGTH, WIDTH, BLOCKS = 512, 64, 128, 2
CACHED = 512  # length of compiled caches: XLA's GPU compiler may copy those of 64 positions, which take a few KiB


def language_model(sampler="greedy", tied=False, dtype=None):
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=BLOCKS,
        num_query_heads=8,
        num_key_value_heads=8,
        hidden_dim=WIDTH,
        intermediate_dim=2 * WIDTH,
        tie_word_embeddings=tied,
        dtype=dtype,
    )
    model = keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None, dtype=dtype)
    model.compile(sampler=sampler)
    return model


def tensor_parallel(devices=None, **options):
    mesh = kd.create_device_mesh("data:2,model:4", devices=devices)
    layout_map = kd.tensor_parallel_layout_map(language_model, mesh, **options)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


def sharded_twice(devices=None):
    mesh = kd.create_device_mesh("fsdp:2,model:4", devices=devices)
    layout_map = kd.tensor_parallel_layout_map(language_model, mesh)
    return kd.FullyShardedDataParallel(layout_map=layout_map, min_shard_bytes=0)


STRATEGIES = {
    "ONE": lambda devices: kd.DataParallel(kd.create_device_mesh("batch:1", devices=devices)),
    "DP": lambda devices=None: kd.DataParallel(kd.create_device_mesh("batch:8", devices=devices)),
    "FSDP": lambda devices=None: kd.FullyShardedDataParallel(
        kd.create_device_mesh("fsdp:8", devices=devices), min_shard_bytes=0
    ),
    "TP": tensor_parallel,
    "TP, SP": functools.partial(tensor_parallel, sequence_parallel=True),
    "FSDP x TP": sharded_twice,
}


def prompts(rows):
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (rows, LENGTH), "int32")
    given = np.arange(LENGTH) < np.random.default_rng(1).integers(3, 9, (rows, 1))
    return {"token_ids": tokens * given, "padding_mask": given.astype("int32")}


def generated(distribution, rows, **options):
    start_anew()
    with scope(distribution):
        keras.utils.set_random_seed(0)
        model = language_model(**options)
        return np.asarray(model.generate(prompts(rows), stop_token_ids=None)["token_ids"])


@pytest.mark.slow
def test_a_redistributed_model_generates_by_another_program():
    """JAX would take the one of the old layouts, since values of both have the same mesh."""
    mesh = kd.create_device_mesh("data:2,model:4")
    layout_map = kd.tensor_parallel_layout_map(language_model, mesh)
    with kd.FullyShardedDataParallel(mesh, shard_axis="model", min_shard_bytes=0).scope():
        keras.utils.set_random_seed(0)
        model = language_model()
        expected = model.generate(prompts(8), stop_token_ids=None)["token_ids"]
    before = model.generate_function
    with kd.ModelParallel(layout_map=layout_map, batch_dim_name="data").scope():
        kd.redistribute(model)
        np.testing.assert_array_equal(model.generate(prompts(8), stop_token_ids=None)["token_ids"], expected)
    assert model.generate_function is not before


CASES = [
    slow("DP", 8, "greedy", False),
    slow("FSDP", 8, "greedy", False),
    ("TP", 8, "greedy", False),
    ("TP, SP", 8, "greedy", False),
    ("DP", 9, "greedy", False),
    slow("FSDP", 3, "greedy", False),
    slow("TP", 9, "beam", False),
    slow("FSDP", 1, "greedy", True),
    slow("FSDP", 8, "top_k", True),
    slow("TP", 8, "top_p", False),
    slow("TP", 3, "beam", True),
    slow("FSDP", 8, "beam", False),
    slow("FSDP x TP", 8, "greedy", True),
    slow("FSDP x TP", 8, "random", False),
]


@pytest.mark.parametrize(("strategy", "rows", "sampler", "tied"), CASES)
def test_tokens_are_those_of_one_device(strategy, rows, sampler, tied):
    options = {"sampler": sampler, "tied": tied}
    found = generated(STRATEGIES[strategy](), rows, **options)
    np.testing.assert_array_equal(found, generated(None, rows, **options))


def test_weights_may_change_between_prompts():
    """The compiled function is passed the weights: it holds none that it has read."""
    start_anew()
    with scope(STRATEGIES["FSDP"]()):
        model = language_model()
        before = model.generate(prompts(8), stop_token_ids=None)["token_ids"]
        for variable in model.trainable_variables:
            variable.assign(keras.random.normal(variable.shape, seed=1))
        after = model.generate(prompts(8), stop_token_ids=None)["token_ids"]
        model.generate_function = None
        again = model.generate(prompts(8), stop_token_ids=None)["token_ids"]
    assert (before != after).any()
    np.testing.assert_array_equal(after, again)


def compiled(make_distribution, compiler, rows=16):
    """Returns the compiled function of `generate()`: its module, and a reader of costs."""
    start_anew()
    devices = jax.devices() if compiler == "cpu" else kd.target(compiler).devices
    distribution = make_distribution(devices)
    mesh = distribution.device_mesh
    with scope(distribution), kd.deferred(), platform_overridden(devices):
        model = language_model(dtype="mixed_bfloat16")
        function = inspect.getclosurevars(model.make_generate_function()).nonlocals["compiled_generate_function"]

        def spec(variable):
            sharding = distribution.get_variable_layout(variable).backend_layout
            return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding)

        parts = model.trainable_variables, model.non_trainable_variables
        state = ([], *(list(map(spec, part)) for part in parts))
        shape = rows, CACHED
        tokens = jax.ShapeDtypeStruct(shape, "int32", sharding=distribution.batch_sharding(shape))
        batch = {"token_ids": tokens, "padding_mask": tokens}
        text = function.lower(batch, None, state).compile().as_text()
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return parse_module(text), ModuleReader(text, sizes)


def largest(instruction):
    return max((each.elements for each in leaves(instruction.shape)), default=0)


def loop_of(module):
    """Returns the body of the loop over tokens: the largest one, since compilers add small ones."""
    instructions = [each for part in module.computations.values() for each in part.instructions.values()]
    bodies = [module.called(each, "body") for each in instructions if each.opcode == "while"]
    return max(bodies, key=lambda body: len(body.instructions))


CPU_AND_OTHERS = ["cpu", *(pytest.param(*each.values, marks=[*each.marks, pytest.mark.slow]) for each in EIGHT_DEVICES)]


@pytest.mark.parametrize("compiler", CPU_AND_OTHERS)
@pytest.mark.parametrize(("strategy", "expected"), [slow("DP", 0), ("FSDP", 0), ("TP", 2 * BLOCKS)])
def test_a_token_sends_only_what_tensor_parallelism_sums(strategy, expected, compiler):
    """Weights are gathered before the loop. In it, TP sums twice a block, and looks up and chooses tokens."""
    module, reader = compiled(STRATEGIES[strategy], compiler)
    body = loop_of(module)
    counts = reader.costs(body.name).counts
    collectives = [replace(reader.collectives[key], count=count) for key, count in counts.items()]
    blocks = [each for each in collectives if "transformer_layer" in each.op_name]
    assert sum(each.count for each in blocks) == expected
    assert {each.kind for each in blocks} <= {"all-reduce"}
    # The embedding's sum, the softmax's maximum and sum, and the best of each device: value and index.
    assert sum(each.count for each in collectives) <= (expected and expected + 5)


@pytest.mark.parametrize("compiler", CPU_AND_OTHERS)
@pytest.mark.parametrize("strategy", ["DP", "TP"])
def test_a_token_copies_no_cache(strategy, compiler):
    """The array of all keys and values, which the loop carries, is updated in its memory."""
    module, _ = compiled(STRATEGIES[strategy], compiler)
    per_device = 16 * BLOCKS * 2 * CACHED * WIDTH // 8
    copies = [
        each
        for each in loop_of(module).instructions.values()
        if each.base_opcode in ("copy", "concatenate") and largest(each) >= per_device // BLOCKS // 2
    ]
    assert not copies


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [pytest.param("h100:1", marks=[needs_cuda, pytest.mark.compiler])])
def test_plan_reads_weights_and_cache_once_a_token(compiler):
    """The bound on the time of a token is that of reading all weights but the embedding table, and the cache."""
    start_anew()
    distribution = STRATEGIES["ONE"](kd.target(compiler).devices)
    tokens = jax.ShapeDtypeStruct((16, LENGTH), "int32")
    batch = ({"token_ids": tokens, "padding_mask": tokens},)
    plan = kd.plan(lambda: language_model(dtype="bfloat16"), distribution, batch, step="generate", progress=False)
    weights = plan.memory.weights - 2 * VOCABULARY * WIDTH
    cache = 2 * 16 * BLOCKS * 2 * LENGTH * WIDTH
    assert weights + cache < plan.memory_traffic < 1.6 * (weights + cache)  # activations count more in a small model
    assert plan.memory.temporaries >= cache
    assert plan.roofline.seconds <= 16 / plan.tokens_per_second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "step"),
    [("DP", "generate"), ("FSDP", "generate"), ("TP", "generate"), ("DP", "predict"), ("TP", "predict")],
)
def test_each_device_computes_its_share_of_rows_that_no_axis_divides(strategy, step):
    def plan(rows):
        tokens = jax.ShapeDtypeStruct((rows, LENGTH), "int32")
        batch = ({"token_ids": tokens, "padding_mask": tokens},)
        return kd.plan(language_model, STRATEGIES[strategy](), batch, step=step, progress=False)

    uneven, even = plan(9), plan(16)
    assert uneven.flops <= 1.2 * even.flops
    if step == "generate":  # each process gets all rows that `predict` returns
        assert uneven.memory.temporaries <= 1.2 * even.memory.temporaries


def test_plan_of_a_sampler_that_sorts_counts_the_gathered_probabilities():
    start_anew()
    batch = ({"token_ids": (8, LENGTH), "padding_mask": (8, LENGTH)},)
    plan = kd.plan(lambda: language_model("top_k"), STRATEGIES["TP"](), batch, step="generate", progress=False)
    gathered = {each.axes: each.bytes for each in plan.collectives if each.kind == "all-gather"}
    assert gathered["model",] == 4 * VOCABULARY * 8 // 2
    assert plan.memory.cache == 4 * 8 * BLOCKS * 2 * LENGTH * WIDTH // 8 < plan.memory.temporaries
    assert sum(each.count for each in plan.traffic if each.kind == "all-reduce") == 2 * BLOCKS + 3


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [pytest.param("h100:8", marks=needs_cuda)])
def test_the_largest_batch_of_a_plan_fits_and_more_rows_do_not(compiler):
    distribution = STRATEGIES["TP"](kd.target(compiler).devices)

    def plan(rows):
        start_anew()
        tokens = jax.ShapeDtypeStruct((rows, LENGTH), "int32")
        batch = ({"token_ids": tokens, "padding_mask": tokens},)
        build = functools.partial(language_model, dtype="bfloat16")
        return kd.plan(build, distribution, batch, step="generate", progress=False)

    rows = plan(2**18).largest_batch
    assert plan(rows).fits
    assert not plan(rows + rows // 32).fits


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["memory", "time"])
def test_auto_chooses_for_generate_the_best_of_all_candidates(objective):
    """No expected time leaves out a candidate, since nobody knows the latencies of what is not compiled."""
    tokens = jax.ShapeDtypeStruct((4, LENGTH), "int32")
    batch = ({"token_ids": tokens, "padding_mask": tokens},)
    devices = jax.devices()[:4]
    choice = kd.auto(language_model, batch, devices, step="generate", objective=objective, progress=False)
    costs = {
        trial.candidate: trial.seconds if objective == "time" else trial.memory_bytes
        for trial in choice.trials
        if trial.plan is not None
    }
    assert {each.strategy for each in costs} >= ({"dp", "tp", "fsdp_tp"} if objective == "time" else {"tp"})
    assert costs[choice.trials[0].candidate] == min(costs.values())
    assert choice.plan.step == "generate"
    tokens = generated(choice.distribution, 4)
    np.testing.assert_array_equal(tokens, generated(None, 4))


def test_models_that_generate_nothing_are_refused():
    def build():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

    with pytest.raises(ValueError, match="generate"):
        kd.plan(build, STRATEGIES["DP"](), (8, 4), step="generate", progress=False)

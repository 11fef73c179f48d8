"""What the compilers for GPUs and TPUs make of each strategy: collectives, bytes sent per device, and stored state.

The lower bound of bytes sent follows from the shapes: in a ring all-reduce among n devices, each device sends
2 (n - 1) / n of the bytes of a tensor, in an all-gather or a reduce-scatter (n - 1) / n. `benchmarks/strategies.py`
compares a larger model with hand-written JAX.
"""

import math

import jax
import keras
import pytest
from keras import layers
from support.compilers import EIGHT_DEVICES, H100_FIRST, V5E_FIRST

import keras_dist as kd

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 512, 512, 4096
ITEM = 2  # bytes of an element in the dtype of compute
BLOCKS = 2  # of the models whose bytes grow with activations: those of weights need one

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.usefixtures("full_compilation", "half_precision"),
]


def gpt(vocabulary=VOCABULARY, blocks=1):
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(vocabulary, WIDTH, name="embedding")(tokens)
    for number in range(blocks):
        y = layers.LayerNormalization(name=f"block{number}_norm1")(x)
        y = layers.MultiHeadAttention(8, WIDTH // 8, name=f"block{number}_attention")(y, y, use_causal_mask=True)
        x = layers.Add(name=f"block{number}_add1")([x, y])
        y = layers.LayerNormalization(name=f"block{number}_norm2")(x)
        y = layers.Dense(4 * WIDTH, activation="relu", name=f"block{number}_up")(y)
        y = layers.Dense(WIDTH, name=f"block{number}_down")(y)
        x = layers.Add(name=f"block{number}_add2")([x, y])
    x = layers.LayerNormalization(name="norm")(x)
    model = keras.Model(tokens, layers.Dense(vocabulary, name="head")(x), name="gpt")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def deep_gpt():
    return gpt(blocks=BLOCKS)


def planned(distribution, build=gpt):
    tokens = jax.ShapeDtypeStruct((ROWS * distribution.num_model_replicas, LENGTH), "int32")
    return kd.plan(build, distribution, (tokens, tokens))


def mesh(target, axes):
    return kd.create_device_mesh(axes, devices=kd.target(target))


def elements(plan, large):
    """The number of elements of the large weights (over 64 KiB), or of the small ones."""
    sizes = [math.prod(v.shape) for v in plan.variables if v.part == "weights"]
    return sum(size for size in sizes if (4 * size > 2**16) == large)


def small_bytes(plan, devices=8):
    """An upper bound of the bytes that all-reduces of the gradients of small weights send."""
    return 2 * (devices - 1) / devices * 4 * elements(plan, large=False)


def kinds(plan):
    return {each.kind for each in plan.traffic}


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_zero_1(target):
    plan = planned(kd.DataParallel(mesh(target, "data:8"), shard_optimizer_state=True))
    large = elements(plan, large=True)
    floor = 7 / 8 * large * (ITEM + 4)  # reduce-scatter of gradients in bfloat16, all-gather of new weights in float32
    assert floor * 0.999 <= plan.wire_bytes <= 1.02 * floor + small_bytes(plan)
    assert plan.memory.weights == 4 * (large + elements(plan, large=False))
    assert plan.memory.optimizer <= 1.01 * 8 * large / 8 + 8 * elements(plan, large=False) + 64
    assert "all-to-all" not in kinds(plan)


def assert_fully_sharded(plan):
    large = elements(plan, large=True)
    floor = 2 * 7 / 8 * large * ITEM
    assert floor * 0.999 <= plan.wire_bytes <= 1.02 * floor + small_bytes(plan)
    assert plan.memory.state <= 12 * (large / 8 + elements(plan, large=False)) + 64
    assert "all-to-all" not in kinds(plan)


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_fully_sharded_without_and_with_reshard_after_forward(target):
    kept = planned(kd.FullyShardedDataParallel(mesh(target, "fsdp:8")))
    assert_fully_sharded(kept)
    plan = planned(kd.FullyShardedDataParallel(mesh(target, "fsdp:8"), reshard_after_forward=True))
    # The backward pass needs no embedding, and starts with the head, which is still gathered.
    again = elements(plan, large=True) - 2 * VOCABULARY * WIDTH
    floor = 7 / 8 * ITEM * (2 * elements(plan, large=True) + again)
    assert floor * 0.999 <= plan.wire_bytes <= 1.02 * floor + small_bytes(plan)
    assert plan.memory.state == kept.memory.state


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_fully_sharded_where_no_axis_divides_the_vocabulary(target):
    """The table is sharded along its columns, and devices send each other indices and rows."""
    plan = planned(kd.FullyShardedDataParallel(mesh(target, "fsdp:8")), lambda: gpt(4099))
    floor = 2 * 7 / 8 * (ITEM * (elements(plan, large=True) - 4099 * WIDTH) + ROWS * LENGTH * (ITEM * WIDTH + 8 * 4))
    assert floor * 0.999 <= plan.wire_bytes <= 1.02 * floor + small_bytes(plan)
    assert plan.memory.state <= 12 * (elements(plan, large=True) / 8 + elements(plan, large=False)) + 64


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)  # TPUs need a reduce-scatter of another form
def test_hybrid_sharded(target):
    plan = planned(kd.FullyShardedDataParallel(mesh(target, "replica:2,fsdp:4")))
    large, table = elements(plan, large=True), VOCABULARY * WIDTH
    # All-gather and reduce-scatter among four devices, and an all-reduce of a quarter between two. The table is not
    # gathered: four devices send each other the indices and the rows that they look up.
    floor = ITEM * ((large - table) * 2 * 3 / 4 + large * 2 * 1 / 2 / 4)
    floor += 2 * 3 / 4 * ROWS * LENGTH * (WIDTH * ITEM + 4 * 4)
    assert floor * 0.999 <= plan.wire_bytes <= 1.02 * floor + small_bytes(plan)
    assert plan.memory.state <= 12 * (large / 4 + elements(plan, large=False)) + 64


def activation_bytes(plan):
    return ROWS * LENGTH * WIDTH * ITEM


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_tensor_parallel(target):
    rules = kd.tensor_parallel_layout_map(deep_gpt, mesh(target, "data:1,model:8"))
    plan = planned(kd.ModelParallel(layout_map=rules), deep_gpt)
    # Four all-reduces per block, one of the gradient from the head, and an all-gather of the embedded tokens.
    floor = 7 / 8 * activation_bytes(plan) * (2 * (4 * BLOCKS + 1) + 1)
    loss = 3 * 2 * 7 / 8 * 4 * ROWS * LENGTH
    assert floor * 0.999 <= plan.wire_bytes <= 1.01 * floor + loss
    assert kinds(plan) == {"all-reduce", "all-gather"}
    assert plan.memory.state <= 12 * (elements(plan, large=True) / 8 + elements(plan, large=False)) + 64


@pytest.mark.parametrize("target", V5E_FIRST)
def test_tensor_and_sequence_parallel(target):
    rules = kd.tensor_parallel_layout_map(deep_gpt, mesh(target, "data:1,model:8"), sequence_parallel=True)
    plan = planned(kd.ModelParallel(layout_map=rules), deep_gpt)
    floor = 7 / 8 * activation_bytes(plan) * (2 * (4 * BLOCKS + 1) + 2 / 8)
    loss = 3 * 2 * 7 / 8 * 4 * ROWS * LENGTH
    assert floor * 0.999 <= plan.wire_bytes <= 1.02 * floor + loss + small_bytes(plan)
    counts = {each.kind: each.count for each in plan.traffic if each.bytes > activation_bytes(plan) / 16}
    assert counts["reduce-scatter"] == 4 * BLOCKS + 1
    assert counts.get("all-to-all", 0) <= 2  # from shards of the width to shards of the sequence, and back


@pytest.mark.parametrize("target", H100_FIRST)
def test_fully_sharded_and_tensor_parallel(target):
    rules = kd.tensor_parallel_layout_map(deep_gpt, mesh(target, "fsdp:4,model:2"))
    plan = planned(kd.FullyShardedDataParallel(layout_map=rules), deep_gpt)
    large = elements(plan, large=True)
    floor = 2 * 3 / 4 * large / 2 * ITEM + 1 / 2 * activation_bytes(plan) * (2 * (4 * BLOCKS + 1) + 1)
    loss = 3 * 2 * 1 / 2 * 4 * ROWS * LENGTH
    assert floor * 0.999 <= plan.wire_bytes <= 1.03 * floor + loss + small_bytes(plan)
    assert plan.memory.state <= 12 * (large / 8 + elements(plan, large=False)) + 64
    assert "all-to-all" not in kinds(plan)

"""What the compilers for GPUs and TPUs make of embedding tables: bytes sent per device."""

import math

import jax
import keras
import pytest
from keras import layers
from support.compilers import EIGHT_DEVICES

import keras_dist as kd

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.parametrize("target", EIGHT_DEVICES),
    pytest.mark.usefixtures("full_compilation"),
]

LENGTH, WIDTH, VOCABULARY = 64, 256, 4096


@pytest.fixture(params=["float32", "mixed_bfloat16"])
def policy(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


def language_model(is_tied):
    """A backbone, and the logits of what it returns."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedding = layers.ReversibleEmbedding(VOCABULARY, WIDTH, tie_weights=is_tied, name="embedding")
    x = embedding(tokens)
    for _ in range(2):
        x = layers.Add()([x, layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "relu")(x))])
    backbone = keras.Model(tokens, x, name="backbone")
    model = keras.Model(tokens, embedding(backbone(tokens), reverse=True))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def planned(target, strategy, is_tied):
    mesh, tokens = (
        kd.create_device_mesh("data:8", devices=kd.target(target)),
        jax.ShapeDtypeStruct((16, LENGTH), "int32"),
    )
    distribution = {
        "DP": lambda: kd.DataParallel(mesh),
        "ZeRO-1": lambda: kd.DataParallel(mesh, shard_optimizer_state=True),
        "FSDP": lambda: kd.FullyShardedDataParallel(mesh),
    }[strategy]()
    return kd.plan(lambda: language_model(is_tied), distribution, (tokens, tokens))


def floor(plan, policy, strategy):
    """The bytes that a device sends to reduce each gradient once, and under FSDP and ZeRO-1 to gather each weight."""
    item = {"float32": 4, "mixed_bfloat16": 2}[policy]
    elements = sum(math.prod(each.shape) for each in plan.variables if each.part == "weights")
    return 7 / 8 * elements * (item + {"DP": item, "ZeRO-1": 4, "FSDP": item}[strategy])


@pytest.mark.parametrize("strategy", ["DP", "ZeRO-1", "FSDP"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_tables_are_sent_once_in_the_dtype_of_the_rows(target, policy, strategy, is_tied):
    if policy == "float32" and not is_tied:
        pytest.skip("nothing is cast, and there is one gradient")
    plan = planned(target, strategy, is_tied)
    assert plan.wire_bytes <= 1.02 * floor(plan, policy, strategy)

"""What the compilers for GPUs and TPUs make of embedding tables: bytes sent per device."""

import math

import jax
import keras
import pytest
from keras import layers
from support.compilers import H100_FIRST, V5E_FIRST
from support.slow_cases import crossed, slow

import keras_dist as kd

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("full_compilation")]

LENGTH, WIDTH, VOCABULARY, ROWS = 64, 1024, 2048, 16

ITEM = {"float32": 4, "mixed_bfloat16": 2}  # bytes of an element in the dtype of compute


@pytest.fixture
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
        x = layers.Add()([x, layers.Dense(WIDTH)(layers.Dense(WIDTH, "relu")(x))])
    backbone = keras.Model(tokens, x, name="backbone")
    model = keras.Model(tokens, embedding(backbone(tokens), reverse=True))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def planned(target, strategy, is_tied):
    mesh, tokens = (
        kd.create_device_mesh("data:8", devices=kd.target(target)),
        jax.ShapeDtypeStruct((ROWS, LENGTH), "int32"),
    )
    distribution = {
        "DP": lambda: kd.DataParallel(mesh),
        "ZeRO-1": lambda: kd.DataParallel(mesh, shard_optimizer_state=True),
        "FSDP": lambda: kd.FullyShardedDataParallel(mesh),
    }[strategy]()
    return kd.plan(lambda: language_model(is_tied), distribution, (tokens, tokens))


def floor(plan, policy, strategy):
    """The bytes that a device sends to reduce each gradient once, and under FSDP and ZeRO-1 to gather each weight."""
    elements = sum(math.prod(each.shape) for each in plan.variables if each.part == "weights")
    return 7 / 8 * elements * (ITEM[policy] + {"DP": ITEM[policy], "ZeRO-1": 4, "FSDP": ITEM[policy]}[strategy])


@pytest.mark.parametrize("target", V5E_FIRST)
@pytest.mark.parametrize(
    ("policy", "strategy"),
    crossed(ITEM, ["DP", "ZeRO-1", "FSDP"], fast={("mixed_bfloat16", "FSDP")}),
    indirect=["policy"],
)
def test_tied_tables_are_sent_once_in_the_dtype_of_the_rows(target, policy, strategy):
    plan = planned(target, strategy, is_tied=True)
    assert plan.wire_bytes <= 1.02 * floor(plan, policy, strategy)
    assert "all-to-all" not in {each.kind for each in plan.traffic}


@pytest.mark.parametrize("target", H100_FIRST)
@pytest.mark.parametrize("policy", ["mixed_bfloat16"], indirect=True)
@pytest.mark.parametrize("strategy", [slow("DP"), "ZeRO-1"])
def test_tables_are_sent_in_the_dtype_of_the_rows(target, policy, strategy):
    plan = planned(target, strategy, is_tied=False)
    assert plan.wire_bytes <= 1.02 * floor(plan, policy, strategy)


@pytest.mark.parametrize("target", V5E_FIRST)
@pytest.mark.parametrize("policy", [slow("float32"), "mixed_bfloat16"], indirect=True)
def test_tables_that_are_only_looked_up_are_not_gathered(target, policy):
    """Devices exchange rows, and their gradients: a sixteenth of the table each."""
    plan = planned(target, "FSDP", is_tied=False)
    table = 2 * 7 / 8 * VOCABULARY * WIDTH * ITEM[policy]
    rows = ROWS * LENGTH / 8 / VOCABULARY * table
    indices = 7 / 8 * 4 * ROWS * LENGTH
    assert plan.wire_bytes <= 1.02 * (floor(plan, policy, "FSDP") - table + rows + 2 * indices)
    exchanged = [each.wire_bytes for each in plan.traffic if each.kind == "all-to-all"]
    assert sum(exchanged) == pytest.approx(rows)

"""What the compilers for GPUs and TPUs make of context parallelism: the bytes of the exchange, and nothing else.

`benchmarks/context_parallel.py` measures a larger model, at more lengths and under more strategies.
"""

import functools

import jax
import keras
import pytest
from keras import layers
from support.compilers import EIGHT_DEVICES, H100_FIRST, needs_libtpu

import keras_dist as kd

WIDTH, SIZE, LENGTH, DEVICES = 256, 128, 2048, 4
TENSOR = LENGTH * SIZE * 2  # bytes of one head of a row, in bfloat16

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("full_compilation", "half_precision")]


def decoder(heads, key_heads):
    inputs = keras.Input((LENGTH, WIDTH))
    x = layers.Dense(WIDTH, activation="gelu", name="into")(inputs)
    x = layers.GroupQueryAttention(SIZE, heads, key_heads, name="attention")(x, x, use_causal_mask=True)
    model = keras.Model(inputs, layers.Dense(WIDTH, name="out")(x), name="attention")
    model.compile("sgd", "mse")
    return model


def traffic(target, heads, key_heads, axes="data:2,context:4", **options):
    """Bytes that a device sends in a step of one row on each group of devices, by kind, and the implementation."""
    mesh = kd.create_device_mesh(axes, devices=kd.target(target))
    make = kd.FullyShardedDataParallel if "fsdp" in axes else kd.DataParallel
    distribution = make(mesh, sequence_dim_name="context", **options)
    rows = jax.ShapeDtypeStruct((distribution.num_model_replicas, LENGTH, WIDTH), "float32")
    plan = kd.plan(functools.partial(decoder, heads, key_heads), distribution, (rows, rows))
    [attention] = plan.attention
    sent = {}
    for each in plan.traffic:
        sent[each.kind, each.axes] = sent.get((each.kind, each.axes), 0) + each.wire_bytes
    return sent, attention


@pytest.mark.parametrize("target", H100_FIRST)
def test_all_to_all_sends_its_floor_and_the_step_only_gradients(target):
    sent, attention = traffic(target, 8, 4)
    assert (attention.implementation, attention.exchange) in (
        ("splash attention", "all-to-all over 'context'"),
        ("cuDNN", "all-to-all over 'context'"),
    )
    assert set(sent) == {("all-reduce", ("data", "context")), ("all-to-all", ("context",))}
    floor = (1 - 1 / DEVICES) * (2 * 8 + 2 * 4) * TENSOR / DEVICES
    assert sent["all-to-all", ("context",)] == pytest.approx(2 * floor, rel=0.02)


@needs_libtpu
def test_groups_send_their_floor():
    sent, attention = traffic("v5e:2x4", 6, 2)
    assert attention.implementation == "splash attention"
    assert attention.exchange == "all-to-all and all-gather over 'context', 2 x 2"
    assert sent.keys() == {("all-reduce", ("data", "context"))} | {
        (kind, ("context",)) for kind in ("all-to-all", "all-gather", "reduce-scatter")
    }
    of_attention = sum(bytes for (_, axes), bytes in sent.items() if axes == ("context",))
    queries, keys = 2 * 6 / 2 * TENSOR / DEVICES, (1 - 1 / DEVICES) * 2 * 2 / 2 * TENSOR
    assert of_attention == pytest.approx(2 * (queries + keys) + keys, rel=0.02)  # keys are gathered again


@pytest.mark.slow
@needs_libtpu
def test_all_gather_sends_its_floor_and_the_swap():
    sent, attention = traffic("v5e:2x4", 3, 3)
    assert (attention.implementation, attention.exchange) == ("splash attention", "all-gather over 'context'")
    keys = (1 - 1 / DEVICES) * 2 * 3 * TENSOR
    assert sent["all-gather", ("context",)] == pytest.approx(2 * keys, rel=0.02)
    assert sent["reduce-scatter", ("context",)] == pytest.approx(keys, rel=0.02)
    assert sent["collective-permute", ("context",)] == pytest.approx(2 * 3 * TENSOR / DEVICES, rel=0.02)
    assert len(sent) == 4


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_weights_are_sharded_over_sequences_too(target):
    sent, _ = traffic(target, 8, 4, "fsdp:2,context:4", min_shard_bytes=0)
    over_all = {kind for kind, axes in sent if axes == ("fsdp", "context")}
    assert {"all-gather", "reduce-scatter"} <= over_all
    assert {kind for kind, axes in sent if axes == ("context",)} == {"all-to-all"}
    assert not [axes for _, axes in sent if axes == ("fsdp",)]

"""What the compilers for GPUs and TPUs make of attention: no memory for logits, and no traffic of its own.

`benchmarks/attention.py` compares a larger model, at more lengths and under more strategies, with hand-written JAX.
"""

import functools

import jax
import keras
import pytest
from keras import layers
from support.compilers import EIGHT_DEVICES, needs_cuda, needs_libtpu
from support.slow_cases import slow

import keras_dist as kd

KERNELS = {"v5e:2x4": "splash attention", "h100:8": "cuDNN"}
WIDTH, HEADS, SIZE = 512, 8, 128
SHORT, LONG = 2048, 8192

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.usefixtures("full_compilation", "half_precision"),
]


@pytest.fixture(params=EIGHT_DEVICES)
def target(request):
    return request.param


def attention(length):
    inputs = keras.Input((length, WIDTH))
    x = layers.Dense(WIDTH, name="into")(inputs)
    x = layers.MultiHeadAttention(HEADS, SIZE, name="attention")(x, x, use_causal_mask=True)
    model = keras.Model(inputs, layers.Dense(WIDTH, name="out")(x), name="attention")
    model.compile("sgd", "mse")
    return model


def plan_of(make_distribution, target, axes, length):
    """The plan of one row on each device."""
    build = functools.partial(attention, length)
    distribution = make_distribution(kd.create_device_mesh(axes, devices=kd.target(target)), build)
    rows = jax.ShapeDtypeStruct((distribution.num_model_replicas, length, WIDTH), "float32")
    return kd.plan(build, distribution, (rows, rows))


def data_parallel(mesh, build):
    return kd.DataParallel(mesh)


def tensor_parallel(mesh, build):
    return kd.ModelParallel(layout_map=kd.tensor_parallel_layout_map(build, mesh))


def fully_sharded_and_tensor_parallel(mesh, build):
    return kd.FullyShardedDataParallel(layout_map=kd.tensor_parallel_layout_map(build, mesh))


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
@pytest.mark.parametrize(
    ("make_distribution", "axes", "heads"),
    [
        (data_parallel, "batch:8", HEADS),
        (tensor_parallel, "batch:1,model:8", HEADS // 8),
        (fully_sharded_and_tensor_parallel, "fsdp:4,model:2", HEADS // 2),
    ],
)
def test_memory_is_that_of_activations(target, make_distribution, axes, heads):
    plan = plan_of(make_distribution, target, axes, LONG)
    assert [(each.implementation, each.calls, each.logits_bytes) for each in plan.attention] == [
        (KERNELS[target], 1, 0)
    ]
    # Queries, keys, values and outputs, and what the other layers hold, with their gradients, in float32. XLA's logits
    # alone would be larger. (Ratios of two lengths tell little: TPUs keep short activations in another memory.)
    activations = 4 * LONG * 8 * (heads * SIZE + WIDTH)
    assert activations < 4 * heads * LONG**2
    assert plan.memory.temporaries <= activations + 2 * plan.memory.state


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_kernel_sends_nothing(target):
    arguments = fully_sharded_and_tensor_parallel, target, "fsdp:4,model:2", SHORT
    by_kernel = plan_of(*arguments)
    keras.config.disable_flash_attention()
    try:
        by_xla = plan_of(*arguments)
    finally:
        keras.config.enable_flash_attention()  # restores the default: where a kernel can compute it
    assert by_xla.attention[0].implementation == "XLA"
    assert by_kernel.wire_bytes <= 1.001 * by_xla.wire_bytes
    assert by_kernel.memory.temporaries < by_xla.memory.temporaries


@needs_cuda
def test_padding_costs_no_copies():
    """On the device is decided how a row is computed: XLA would give both forms the layouts that one of them likes."""

    def build(has_padding):
        inputs, valid = keras.Input((SHORT, WIDTH)), keras.Input((SHORT,), dtype="bool")
        x = layers.Dense(WIDTH, name="into")(inputs)
        mask = {"attention_mask": keras.ops.expand_dims(valid, 1)} if has_padding else {}
        x = layers.MultiHeadAttention(HEADS, SIZE, name="attention")(x, x, use_causal_mask=True, **mask)
        model = keras.Model([inputs, valid], layers.Dense(WIDTH, name="out")(x))
        model.compile("sgd", "mse")
        return model

    rows, valid = jax.ShapeDtypeStruct((4, SHORT, WIDTH), "float32"), jax.ShapeDtypeStruct((4, SHORT), "bool")
    distribution = kd.DataParallel(kd.create_device_mesh("batch:1", devices=kd.target("h100:1")))
    plans = [kd.plan(functools.partial(build, each), distribution, ((rows, valid), rows)) for each in (False, True)]
    assert [plan.attention[0].implementation for plan in plans] == ["cuDNN", "cuDNN"]
    without, padded = plans
    assert padded.memory_traffic <= 1.01 * without.memory_traffic


@needs_cuda
@pytest.mark.parametrize("is_causal", [slow(True), False])
def test_odd_lengths_need_no_logits(is_causal):
    """JAX refuses to differentiate cuDNN's attention of odd lengths, such as the 197 tokens of a ViT."""
    inputs = keras.Input((197, 64))
    outputs = layers.MultiHeadAttention(2, 32)(inputs, inputs, use_causal_mask=is_causal)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    distribution = kd.DataParallel(kd.create_device_mesh("batch:1", devices=kd.target("h100:1")))
    [attention] = kd.plan(model, distribution, 8).attention
    assert (attention.implementation, attention.logits_bytes) == ("cuDNN", 0)


@needs_libtpu
def test_attention_in_float16_on_tpus():
    """TPUs have no kernel for it, and none of the products that JAX's attention asks for."""
    inputs = keras.Input((SHORT, 64))
    outputs = layers.MultiHeadAttention(2, 32, dtype="mixed_float16")(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    distribution = kd.DataParallel(kd.create_device_mesh("batch:1", devices=kd.target("v5e:1")))
    with pytest.warns(UserWarning, match="splash attention has no float16"):
        [attention] = kd.plan(model, distribution, 1).attention
    assert attention.implementation == "XLA"

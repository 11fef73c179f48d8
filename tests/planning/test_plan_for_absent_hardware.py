"""The same models planned for TPUs and GPUs that are not attached: state, floors, collectives, memory that runs out."""

import importlib.util

import jax
import keras
import pytest
from keras import layers
from support.compilers import EIGHT_DEVICES, H100_FIRST, V5E_FIRST, needs_cuda, needs_libtpu
from support.planned_models import LargestDim, gpt, rules, tensor_parallel
from support.slow_cases import slow

import keras_dist as kd
from keras_dist.planning.compiling.abstract_step import prepared_step
from keras_dist.planning.notes import notes_on_attention

TWO_NETWORKS = [
    pytest.param("v5e:2x2", 2, marks=needs_libtpu),
    pytest.param("h100:2x4", 1, marks=[needs_cuda, pytest.mark.slow]),
]


pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("full_compilation")]


def mesh_of(target, axes, slices=1):
    return kd.create_device_mesh(axes, devices=kd.target(target, slices=slices))


@pytest.mark.parametrize("target", V5E_FIRST)
def test_data_parallel_reduces_the_gradients_and_nothing_else(target):
    planned = kd.plan(lambda: gpt(width=64), kd.DataParallel(mesh_of(target, "data:8")), 16)
    floor = 2 * planned.memory.weights * 7 / 8
    assert {(each.kind, each.axes) for each in planned.traffic} == {("all-reduce", ("data",))}
    assert floor <= planned.wire_bytes <= 1.01 * floor
    assert planned.fits
    assert planned.target == target.split(":")[0]
    assert planned.roofline.bound is not None
    assert 0 < planned.model_flops_utilization <= 1.0001
    assert planned.roofline.dcn_seconds == 0


@pytest.mark.parametrize("target", V5E_FIRST)
def test_tensor_parallel_has_four_all_reduces_of_an_activation_per_block(target):
    distribution = tensor_parallel(mesh_of(target, "data:2,model:4"))
    moved = []
    for depth in (1, 2):
        planned = kd.plan(lambda depth=depth: gpt(depth, width=128, length=64), distribution, 16)
        [reduced] = [t for t in planned.traffic if (t.kind, t.axes) == ("all-reduce", ("model",))]
        moved.append((reduced.count, reduced.bytes))
    activation = 8 * 64 * 128 * 4  # rows on a device, length, width, float32
    (fewer, less), (more, most) = moved
    assert more - fewer == 4
    assert (most - less) / activation == pytest.approx(4, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_state_equals_that_of_simulated_devices(target):
    here = kd.plan(gpt, LargestDim(kd.create_device_mesh("data:8"), ["data"], "data"), 16)
    there = kd.plan(gpt, LargestDim(mesh_of(target, "data:8"), ["data"], "data"), 16)
    assert there.memory.state == here.memory.state
    assert there.memory.batch == here.memory.batch
    assert [(v.shape, v.axes, v.bytes) for v in there.variables] == [(v.shape, v.axes, v.bytes) for v in here.variables]
    assert there.flops == pytest.approx(here.flops, rel=0.01)
    assert there.model_flops == here.model_flops


@pytest.mark.parametrize(("target", "slices"), TWO_NETWORKS)
def test_collectives_across_slices_or_hosts_are_distinguished(target, slices):
    mesh = mesh_of(target, "data:2,model:4", slices)
    planned = kd.plan(lambda: gpt(1, width=64), tensor_parallel(mesh), 16)
    crossing = {each.axes: each.crosses_network for each in planned.traffic if each.axes in (("data",), ("model",))}
    assert crossing == {("data",): True, ("model",): False}
    assert planned.roofline.dcn_seconds > 0
    assert planned.roofline.ici_seconds > 0
    link, network = ("ICI", "DCN") if target.startswith("v") else ("NVLink", "network")
    assert planned.roofline.bound in ("compute", "memory", link, network)
    assert f"({network})" in str(planned)
    assert {link, network} == {"ICI", "DCN", "NVLink", "network"} & {
        line.split(" ")[0] for line in str(planned).split("\n")
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*computes attention by XLA")  # cuDNN has no float32
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_extrapolation_equals_the_compiled_model(target):
    distribution = tensor_parallel(mesh_of(target, "data:2,model:4"))

    # Activations must leave the on-chip memory of a TPU. A GPU has none, but logits in float32.
    width, rows = (256, 128) if target == "v5e:2x4" else (64, 32)

    def build(depth):
        return gpt(depth, width=width, heads=4, length=1024, vocabulary=256)

    whole = kd.plan(lambda: build(4), distribution, rows)
    line = kd.plan(build, distribution, rows, depth=4, compile_depths=(1, 2))
    assert line.variables == whole.variables
    assert line.memory.state == whole.memory.state
    assert line.flops == pytest.approx(whole.flops, rel=0.01)
    assert line.wire_bytes == pytest.approx(whole.wire_bytes, rel=0.02)
    # libtpu 0.0.42 keeps a little less in fast memory the deeper the model is.
    assert line.memory.temporaries == pytest.approx(whole.memory.temporaries, rel=0.05)
    assert line.roofline.compute_seconds == pytest.approx(whole.roofline.compute_seconds, rel=0.01)
    assert line.roofline.forecast.seconds == pytest.approx(whole.roofline.forecast.seconds, rel=0.03)
    assert line.roofline.forecast.compute_seconds == pytest.approx(whole.roofline.forecast.compute_seconds, rel=0.01)


def wide():
    model = keras.Sequential([keras.Input((2**15,)), layers.Dense(2**16, name="up"), layers.Dense(8)], name="wide")
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("target", H100_FIRST)
def test_plan_that_does_not_fit(target):
    mesh = mesh_of(target, "data:8")
    kernel = 4 * 2**31  # bytes; Adam holds three of it, and its gradient comes besides
    replicated = kd.plan(wide, kd.DataParallel(mesh), 64)
    assert replicated.memory.total > 4 * kernel
    assert replicated.fits is (4 * kernel < replicated.memory.capacity)
    assert "wide/up/kernel (weights)" in dict(replicated.largest_holders())
    assert replicated.traffic or any("collectives, FLOP and time are unknown" in note for note in replicated.notes)
    if not replicated.fits:
        assert "does not fit" in str(replicated).lower()
        assert any("The compiler reports: " in note for note in replicated.notes)
    sharded = kd.plan(wide, LargestDim(mesh, ["data"], "data"), 64)
    assert sharded.fits
    assert sharded.memory.weights < replicated.memory.weights / 7


@pytest.mark.slow
@needs_libtpu
def test_model_larger_than_any_host_is_planned():
    def giant():
        model = keras.Sequential([keras.Input((2**16,)), *(layers.Dense(2**16) for _ in range(16))])
        model.compile("sgd", "mse")
        return model

    mesh = mesh_of("v5p:4x4x4", "data:64")
    planned = kd.plan(giant, LargestDim(mesh, ["data"], "data"), 64)
    assert planned.parameters > 68e9
    assert planned.memory.weights == pytest.approx(4 * 2**36 / 64, rel=0.01)
    assert planned.fits


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="pip install '.[hub]'")
@pytest.mark.parametrize("target", ["cpu:8", *EIGHT_DEVICES])
def test_keras_hub_task_that_compiles_itself(target):
    import keras_hub

    def build():
        backbone = keras_hub.models.Llama3Backbone(
            vocabulary_size=256,
            num_layers=1,
            num_query_heads=8,
            num_key_value_heads=2,
            hidden_dim=64,
            intermediate_dim=128,
            dtype="mixed_bfloat16",
        )
        return keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)

    mesh = mesh_of(target, "data:4,model:2")
    layout = {
        "token_embedding/embeddings": ("model", "data"),
        ".*(query|key|value)/kernel": ("data", "model", None),
        ".*attention_output/kernel": ("model", None, "data"),
        ".*feedforward_(gate|intermediate)_dense/kernel": ("data", "model"),
        ".*feedforward_output_dense/kernel": ("model", "data"),
    }
    tokens = jax.ShapeDtypeStruct((8, 32), "int32")
    batch = {"token_ids": tokens, "padding_mask": jax.ShapeDtypeStruct((8, 32), "bool")}, tokens
    planned = kd.plan(build, rules(mesh, layout), batch)
    weights = [v for v in planned.variables if v.part == "weights"]
    sharded = [v for v in weights if any(v.axes)]
    assert len(sharded) == 7 + 1
    assert planned.memory.optimizer == 2 * planned.memory.weights + 8
    assert {("model",), ("data",)} <= {each.axes for each in planned.traffic}


@needs_cuda
@pytest.mark.filterwarnings("ignore:.*computes attention by XLA")
@pytest.mark.parametrize(
    ("policy", "target", "kernel", "dtype"),
    [
        ("mixed_bfloat16", "h100:2", "cuDNN", "bfloat16"),
        slow("mixed_bfloat16", "GPU T4 x2", "XLA", "float32"),
        ("mixed_float16", "GPU T4 x2", "XLA", "float16"),
        slow("mixed_bfloat16", "b300:2", "cuDNN", "bfloat16"),
    ],
)
def test_kernels_and_peaks_follow_the_generation(policy, target, kernel, dtype):
    """Also where another target of the same process computes the same attention by cuDNN."""

    def build():
        inputs = keras.Input((128, 128))
        model = keras.Model(inputs, layers.MultiHeadAttention(2, 64)(inputs, inputs))
        model.compile("sgd", "mse")
        return model

    keras.config.set_dtype_policy(policy)
    devices = kd.target(target)
    planned = kd.plan(build, kd.DataParallel(kd.create_device_mesh("data:2", devices=devices)), 16)
    assert [each.implementation for each in planned.attention] == [kernel]
    assert planned.flops / planned.roofline.compute_seconds == pytest.approx(devices.hardware.flops_per_second[dtype])
    assert planned.roofline.link == ("NVLink" if devices.hardware.links else "PCIe")
    assert planned.roofline.forecast.seconds > planned.roofline.seconds


@needs_cuda
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*computes attention by XLA")  # cuDNN has no float32
def test_step_without_tile_sizes_is_compiled_without_triton():
    """The XLA of JAX 0.10 finds none for a product of this ViT, of 197 tokens, without a GPU; that of JAX 0.12 does."""
    keras_hub = pytest.importorskip("keras_hub", exc_type=ImportError)

    def build():
        backbone = keras_hub.models.ViTBackbone(
            image_shape=(224, 224, 3), patch_size=(16, 16), num_layers=1, num_heads=16, hidden_dim=1024, mlp_dim=4096
        )
        pooled = layers.GlobalAveragePooling1D()
        model = keras.Sequential([keras.Input((224, 224, 3)), backbone, pooled, layers.Dense(1000)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    mesh = mesh_of("h100:8", "data:2,model:4")
    distribution = kd.ModelParallel(layout_map=kd.tensor_parallel_layout_map(build, mesh), batch_dim_name="data")
    planned = kd.plan(build, distribution, 16)
    assert planned.fits
    assert planned.flops * 8 == pytest.approx(planned.model_flops, rel=0.1)


@needs_libtpu
@pytest.mark.parametrize(
    ("step", "rate", "is_noted"), [("train", 0.1, True), ("train", 0.0, False), ("test", 0.1, True)]
)
def test_dropout_of_attention_weights_is_noted(step, rate, is_noted):
    def build():
        inputs = keras.Input((128, 16))
        x = layers.MultiHeadAttention(2, 8, dropout=rate, name="first")(inputs, inputs)
        model = keras.Model(inputs, layers.GroupQueryAttention(8, 2, 1, dropout=rate)(x, x))
        model.compile("sgd", "mse")
        return model

    with prepared_step(build, kd.DataParallel(mesh_of("v5e:2x2", "data:4")), 8, step) as prepared:
        notes = notes_on_attention(prepared)
    assert ["'first' and 1 more layer" in note for note in notes] == [True] * is_noted

"""A step of Qwen3-MoE compiled for devices that are not attached: what its chosen experts need, and no bytes more."""

import functools
import importlib.util
from pathlib import Path

import jax
import pytest
from support.compilers import needs_cuda, needs_libtpu

import keras_dist as kd

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("full_compilation")]

PATH = Path(__file__).parents[2] / "benchmarks" / "experts.py"


@functools.cache
def planned(target, experts, reserved):
    specification = importlib.util.spec_from_file_location("experts_benchmark", PATH)
    benchmark = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(benchmark)
    return benchmark.planned(target, experts, reserved)


@pytest.mark.parametrize(
    ("target", "form", "temporaries"),
    [
        pytest.param("v5e:2x4", "megablox", 110, marks=[needs_libtpu, pytest.mark.slow]),
        pytest.param("h100:8", "mosaic", 190, marks=[needs_cuda, pytest.mark.slow]),
    ],
)
def test_a_step_computes_chosen_experts_and_sends_what_fsdp_sends(target, form, temporaries):
    plan = planned(target, "sparse", 0)
    (mixtures,) = plan.mixtures
    assert (mixtures.form, mixtures.calls, mixtures.rows, mixtures.reason) == (form, 2, 8192, None)
    assert mixtures.flops == 2 * 2 * 8192 * (512 * 512 + 256 * 512)  # two layers, gate and up in one
    assert plan.flops <= 85e9
    assert plan.wire_bytes <= 93 * 2**20  # the weights, gathered, and their gradients, reduced and scattered
    assert plan.memory.temporaries <= temporaries * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "form", "temporaries"),
    [
        pytest.param("v5e:2x4", "megablox", 185, marks=needs_libtpu),
        pytest.param("h100:8", "mosaic", 165, marks=needs_cuda),
    ],
)
def test_an_exchange_sends_fewer_bytes_than_the_weights_have(target, form, temporaries):
    plan = planned(target, "exchanged", 0)
    (mixtures,) = plan.mixtures
    assert (mixtures.form, mixtures.calls, mixtures.rows, mixtures.reason) == (form, 2, 8192, None)
    assert plan.flops <= 85e9
    assert plan.wire_bytes <= 66 * 2**20
    assert plan.memory.temporaries <= temporaries * 2**20


@pytest.mark.parametrize(
    ("target", "reserved"),
    [
        # XLA takes memory for speed as long as there is some, so little is left of the 16,128 MiB.
        pytest.param("v5e:2x4", 16_000, marks=[needs_libtpu, pytest.mark.slow]),
        pytest.param("h100:8", 0, marks=needs_cuda),
    ],
)
def test_an_exchange_needs_little_more_memory_than_gathered_weights(target, reserved):
    exchanged, gathered = (planned(target, form, reserved).memory.temporaries for form in ("exchanged", "sparse"))
    assert exchanged <= 1.5 * gathered


EXPERT_BYTES = 2 * 3 * 2048 * 1024  # of 256 experts, more than VMEM has room for; a token chooses 4


def planned_decoding(target, num_devices, rows):
    """A plan of `predict` for one token of each row."""

    def build():
        sizes = {"vocabulary_size": 256, "num_layers": 1, "hidden_dim": 2048, "intermediate_dim": 24, "head_dim": 64}
        own = {"moe_intermediate_dim": 1024, "num_experts": 256, "top_k": 4}
        heads = {"num_query_heads": 4, "num_key_value_heads": 2}
        model = keras_hub.models.Qwen3MoeBackbone(**sizes, **own, **heads, dtype="bfloat16")
        model.compile("sgd")
        return model

    mesh = kd.create_device_mesh(f"fsdp:{num_devices}", devices=kd.target(target).devices[:num_devices])
    tokens = jax.ShapeDtypeStruct((rows, 1), "int32")
    batch = ({"token_ids": tokens, "padding_mask": tokens},)
    return kd.plan(build, kd.FullyShardedDataParallel(mesh), batch, step="predict", progress=False)


@pytest.mark.parametrize(
    ("target", "num_devices", "rows", "num_experts"),
    [
        pytest.param("v5e:2x4", 1, 1, 4, marks=[needs_libtpu, pytest.mark.slow]),
        pytest.param("v5e:2x4", 1, 8, 32, marks=[needs_libtpu, pytest.mark.slow]),
        pytest.param("v5e:2x4", 8, 1, 4, marks=[needs_libtpu, pytest.mark.slow]),
        pytest.param("v5e:2x4", 8, 8, 8, marks=needs_libtpu),
        pytest.param("h100:8", 1, 1, 3 * 4, marks=needs_cuda),  # XLA:GPU copies what it looks up
        pytest.param("h100:8", 8, 1, 3 * 4, marks=[needs_cuda, pytest.mark.slow]),
    ],
)
def test_decoding_reads_the_weights_of_chosen_experts_where_they_are(target, num_devices, rows, num_experts):
    plan = planned_decoding(target, num_devices, rows)
    bandwidth = kd.target(target).hardware.memory_bytes_per_second
    assert plan.roofline.memory_seconds * bandwidth <= 1.1 * num_experts * EXPERT_BYTES
    assert plan.wire_bytes < EXPERT_BYTES  # those of attention's weights

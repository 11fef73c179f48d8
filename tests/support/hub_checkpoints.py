"""Checkpoints in the format of Hugging Face, with random values, that KerasHub's converters read."""

import json
import pathlib
import struct

import numpy as np

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
CODES |= {"uint8": "U8", "int8": "I8", "int64": "I64", "uint16": "U16", "bool": "BOOL", "complex64": "C64"}

HEADS, KEY_HEADS = 4, 2
ARCHITECTURES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "mixtral": "MixtralForCausalLM"}
FAMILIES = [*ARCHITECTURES]

# The config.json and the shapes of tensors of small models, as transformers 5.24 saves them. Changed to what KerasHub
# reads: `esm` (names of norms), `qwen3_5` and `qwen3_5_moe` (prefix of names, model type), `bart` and `qwen3_moe` (keys
# of the config), `vit` and `deit` (with labels; epsilon of `vit`), `gpt_oss` (experts of 4 bits, as those of its real
# checkpoints).
SAVED_BY_TRANSFORMERS = json.loads((pathlib.Path(__file__).parent / "hub_families.json").read_text())


def write_family(folder: pathlib.Path, family: str, scale: float = 1.0, dtype: str = "float32") -> pathlib.Path:
    """Writes a checkpoint of a family with random values."""
    saved, rng = SAVED_BY_TRANSFORMERS[family], np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(saved["config"]))
    tensors = {}
    for name, shape in saved["tensors"].items():
        if name.endswith(("_blocks", "_scales")):  # pairs of 4 bits, and exponents of 2 with an offset of 127
            tensors[name] = rng.integers(120, 130, shape, "uint8")
        else:
            tensors[name] = (rng.normal(size=shape) * scale).astype(np.dtype(dtype))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_safetensors(path: pathlib.Path, tensors: dict[str, np.ndarray], codes: dict[str, str] | None = None) -> None:
    """Writes a file of safetensors; `codes` names types other than those of the arrays."""
    header, end = {"__metadata__": {"format": "np"}}, 0
    for name, array in tensors.items():
        code = (codes or {}).get(name, CODES[array.dtype.name])
        start, end = end, end + array.nbytes
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(array.tobytes())


def write_checkpoint(
    folder, family, dtype="float32", files=1, hidden=64, intermediate=128, vocabulary=256, experts=4, layers=2
):
    """Writes config.json, and weights in one file, or in several with an index."""
    config = {
        **{"model_type": family, "architectures": [ARCHITECTURES[family]], "vocab_size": vocabulary},
        **{"tie_word_embeddings": family == "gpt2", "rope_theta": 10000.0},
        **{"num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS},
        **{"hidden_size": hidden, "intermediate_size": intermediate, "rms_norm_eps": 1e-6, "sliding_window": None},
        **{"num_local_experts": experts, "num_experts_per_tok": 2, "output_router_logits": False},
        **{"n_layer": layers, "n_head": HEADS, "n_embd": hidden, "n_positions": 32, "resid_pdrop": 0.0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = _gpt2(hidden, vocabulary, layers)
    if family != "gpt2":
        shapes = _llama(hidden, intermediate, vocabulary, layers)
    if family == "mixtral":
        shapes = dict(_with_experts(shapes, hidden, experts))
    numbers = {name: rng.random(shape, "float32").astype(np.dtype(dtype)) for name, shape in shapes.items()}
    if files == 1:
        write_safetensors(folder / "model.safetensors", numbers)
        return
    weight_map = {name: f"model-{number % files + 1:05d}.safetensors" for number, name in enumerate(numbers)}
    for file in set(weight_map.values()):
        write_safetensors(folder / file, {name: numbers[name] for name in numbers if weight_map[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _llama(hidden, intermediate, vocabulary, layers):
    keys = hidden // HEADS * KEY_HEADS
    block = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
    block |= {f"self_attn.{name}_proj": (keys, hidden) for name in "kv"}
    block |= {"mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden)}
    block |= {"mlp.down_proj": (hidden, intermediate), "input_layernorm": (hidden,)}
    block |= {"post_attention_layernorm": (hidden,)}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in block.items()}
    tables = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    return shapes | tables | {"model.norm.weight": (hidden,)}


def _with_experts(shapes, hidden, experts):
    """A Llama with a mixture of experts in the place of each MLP."""
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name, shape in shapes.items():
        block, _, rest = name.partition(".mlp.")
        if not rest:
            yield name, shape
            continue
        kernel = names[rest.removesuffix(".weight")]
        yield from ((f"{block}.block_sparse_moe.experts.{i}.{kernel}.weight", shape) for i in range(experts))
        yield f"{block}.block_sparse_moe.gate.weight", (experts, hidden)


def _gpt2(hidden, vocabulary, layers):
    block = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden), "ln_1": (hidden,), "ln_2": (hidden,)}
    block |= {"mlp.c_fc": (hidden, 4 * hidden), "mlp.c_proj": (4 * hidden, hidden)}
    modules = {f"h.{i}.{name}": shape for i in range(layers) for name, shape in block.items()} | {"ln_f": (hidden,)}
    shapes = {f"transformer.{name}.weight": shape for name, shape in modules.items()}
    shapes |= {f"transformer.{name}.bias": shape[-1:] for name, shape in modules.items()}
    return shapes | {"transformer.wte.weight": (vocabulary, hidden), "transformer.wpe.weight": (32, hidden)}

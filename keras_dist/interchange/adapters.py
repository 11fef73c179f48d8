"""Adapters of LoRA in the format of PEFT: those of a model are written, and those of a file are added to weights.

Keras adds `lora_alpha / lora_rank * A @ B` to a kernel, where the last dim of A and the first of B is the rank. PEFT
adds `lora_alpha / r * lora_B @ lora_A` to a matrix of a shape (outputs, inputs), or its transpose to one of a shape
(inputs, outputs). Which element of the matrix each element of the kernel is, the converter of KerasHub says.

Where a kernel has several dims of outputs, as that of a query has heads, B is the same for all of them but the last.
As a matrix it is block-diagonal, so its rank is that of Keras times the other dims. Example, a query of 4 heads and
rank 8: A has the shape (inputs, 4, 8), B (8, head_dim); lora_A has (32, inputs), lora_B (4 * head_dim, 32).
"""

import collections
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_dist._keras import internals
from keras_dist._report.units import counted
from keras_dist.interchange.converter import Elements, TensorType
from keras_dist.interchange.hub_source import Source
from keras_dist.interchange.model_parts import Conversion, Part, require_model_of_kerashub, source_of
from keras_dist.interchange.output_files import FileWriter, OutputFile, new_folder, write_json
from keras_dist.variables.gather import gather
from keras_dist.variables.host_to_device import place, reshard
from keras_dist.variables.lazy_tensor import slices_of
from keras_dist.variables.safetensors_files import SafetensorsFile

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NOT_LORA_ALONE = ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "modules_to_save")
_NOT_LORA_ALONE += ("alora_invocation_tokens", "trainable_token_indices")
_CHANGE_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # `init_lora_weights` that change those they adapt
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")


class _Factors(NamedTuple):
    """What an adapter adds to a matrix: `up @ down`, of a shape (outputs, inputs)."""

    down: np.ndarray  # (rank, inputs)
    up: np.ndarray  # (outputs, rank), with the scale
    is_transposed: bool  # the matrix in the file has the shape (inputs, outputs)
    is_embedding: bool


def export_adapter(model: keras.Model, directory: str | os.PathLike, like: str | os.PathLike | None = None) -> None:
    """Writes the adapters of LoRA of a model of KerasHub as PEFT, vLLM and others load them for the model without them.

    What an adapter adds is exact. Kernels of query, key and value have a rank of their own in the file, that of Keras
    times the number of heads, since Keras and PEFT factorize them in different ways.

    All processes of a multi-process program must call it, with a directory that all can write to.

    Args:
        model: A task or a backbone with adapters, from `enable_lora`. Its other weights are not written.
        directory: A folder that does not exist yet, or that is empty.
        like: As for `export_safetensors`.

    Raises:
        TypeError: `model` is not one of KerasHub.
        ValueError: It has no adapters, or one that PEFT has no form for; otherwise as `export_safetensors`.
        FileExistsError: `directory` is not empty.
        OSError: It cannot be written. Nothing is left of it.

    Example:

    >>> import keras_hub, os, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> backbone = keras_hub.models.GemmaBackbone(64, 2, 2, 1, hidden_dim=16, intermediate_dim=32, head_dim=8)
    >>> backbone.enable_lora(4)
    >>> export_adapter(backbone, folder)
    >>> sorted(os.listdir(folder))
    ['adapter_config.json', 'adapter_model.safetensors']
    """
    require_model_of_kerashub("export_adapter", model)
    with new_folder(directory) as folder, source_of(model, like) as source:
        conversion = Conversion(model, source)
        all_parts = conversion.parts(source.types)
        conversion.require_all_weights(model)
        parts = [part for part in all_parts if part.is_adapted]
        if not parts:
            raise ValueError(
                f"{model.name!r} has no adapters. Call model.enable_lora(rank), or export_safetensors for its weights."
            )
        _require_others_as_before(all_parts, source)
        _require_untied(parts)
        by_tensor: dict[str, list[_Factors]] = collections.defaultdict(list)
        for part in parts:
            for each in part.elements:
                by_tensor[each.tensor].append(_factors(part, each, source.types[each.tensor]))
        tensors: dict[str, np.ndarray] = {}
        ranks = {}
        for name, factors in by_tensor.items():
            module = name.removesuffix(".weight")
            down = np.concatenate([each.down for each in factors])
            up = np.concatenate([each.up for each in factors], axis=1)
            kind, suffix = ("lora_embedding_", "") if factors[0].is_embedding else ("lora_", ".weight")
            tensors |= {f"base_model.model.{module}.{kind}A{suffix}": down}
            tensors |= {f"base_model.model.{module}.{kind}B{suffix}": up}
            ranks[module] = len(down)
        every = itertools.chain(*by_tensor.values())
        rank = max(ranks.values())  # where alpha and rank are equal, nothing is scaled
        others = {module: each for module, each in ranks.items() if each != rank}
        config = {
            **{"peft_type": "LORA", "base_model_name_or_path": None if like is None else os.fspath(like)},
            **{"r": rank, "lora_alpha": rank, "rank_pattern": others, "alpha_pattern": others},
            **{"target_modules": _targets(ranks, source.types), "lora_dropout": 0.0, "bias": "none"},
            **{"fan_in_fan_out": any(each.is_transposed and not each.is_embedding for each in every)},
            **{"inference_mode": True, "task_type": "CAUSAL_LM" if hasattr(model, "generate") else None},
        }
        types = {name: TensorType("F32", each.shape) for name, each in tensors.items()}

        def write() -> None:
            writer = FileWriter(folder.path, OutputFile(_WEIGHTS, types, 0))
            for name, values in tensors.items():
                writer.write(name, values)
            writer.close()
            write_json(folder.path, _CONFIG, config)

        folder.create()
        folder.complete(write)


def merge_adapter(model: keras.Model, directory: str | os.PathLike, like: str | os.PathLike | None = None) -> None:
    """Adds what an adapter of PEFT adds to the weights of a model of KerasHub, in every layout.

    The model has no new variables: it computes what the adapted model computes, and can train on, with new adapters of
    `enable_lora`, too. All processes of a multi-process program must call it.

    Args:
        model: A task or a backbone with the weights that the adapter was trained for.
        directory: A folder with adapter_config.json and adapter_model.safetensors, such as PEFT or `export_adapter`
            writes.
        like: As for `export_safetensors`: where the names of tensors are from. Their values are not read.

    Raises:
        TypeError: `model` is not one of KerasHub.
        ValueError: Files are missing, the adapter is not LoRA alone, or it is for layers that the model does not have,
            or that have other shapes. No weight has changed.

    Example:

    >>> import keras_hub, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> backbone = keras_hub.models.GemmaBackbone(64, 2, 2, 1, hidden_dim=16, intermediate_dim=32, head_dim=8)
    >>> backbone.enable_lora(4)
    >>> export_adapter(backbone, folder)
    >>> other = keras_hub.models.GemmaBackbone(64, 2, 2, 1, hidden_dim=16, intermediate_dim=32, head_dim=8)
    >>> merge_adapter(other, folder)
    """
    require_model_of_kerashub("merge_adapter", model)
    folder = os.fspath(directory)
    with source_of(model, like) as source:
        parts = Conversion(model, source).parts(source.types)
        factors = _read(folder, source.types)
    _require_untied([part for part in parts if any(each.tensor in factors for each in part.elements)])
    read = {each.tensor for part in parts for each in part.elements}
    unread = sorted(factors.keys() - read)
    if unread:
        raise ValueError(
            f"{folder} adapts {unread[0]!r} ({counted(len(unread), 'tensor')} like it), which {model.name!r} has no "
            "variable for. Merge it in PEFT, or pass a model of the adapter's task."
        )
    for part in parts:
        adapted = [each for each in part.elements if each.tensor in factors]
        if adapted:
            value: Any = internals.variable_value(part.variable)
            added = np.zeros(value.shape, "float32")
            for each in adapted:
                added[slices_of(each.bounds)] = _product(factors[each.tensor], each, source.types[each.tensor])
            part.variable.assign(reshard(value.astype("float32") + place(added, value.sharding), value.sharding))


def _read(folder: str, types: Mapping[str, TensorType]) -> dict[str, _Factors]:
    """Returns the factors for each tensor that an adapter of PEFT adapts."""
    for name in (_CONFIG, _WEIGHTS):
        if not os.path.exists(os.path.join(folder, name)):
            raise ValueError(f"{folder} is no adapter of PEFT: it has no {name}. Pass the folder that PEFT wrote.")
    config = _read_config(os.path.join(folder, _CONFIG))
    path = os.path.join(folder, _WEIGHTS)
    file = SafetensorsFile(path)
    tensors: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for key in file.header:
        match = _KEY.fullmatch(key)
        if key.endswith(".base_layer.weight"):  # an embedding's, which PEFT saves beside its adapter
            continue
        if match is None:
            raise ValueError(f"{path} has {key!r}, which is no factor of LoRA. Merge the adapter in PEFT.")
        module, embedding, factor = match.groups()
        tensors[module] |= {factor: np.asarray(file.get_tensor(key), "float32"), "is_embedding": bool(embedding)}
    if not tensors:
        raise ValueError(f"{path} has no tensors. Pass the folder that PEFT wrote.")
    factors = {}
    for module, each in tensors.items():
        name, down, up = _tensor_of(module, types, folder), each.get("A"), each.get("B")
        if down is None or up is None or (down.ndim, up.ndim) != (2, 2) or not 0 < len(down) == up.shape[1]:
            shapes = (None if factor is None else factor.shape for factor in (down, up))
            raise ValueError(
                f"{path}: the factors of {module!r} have the shapes {' and '.join(map(str, shapes))}, and not (rank, "
                "inputs) and (outputs, rank). Copy or download the file again."
            )
        alpha = _of_module(module, config.get("alpha_pattern"), config["lora_alpha"])
        scale = alpha / (math.sqrt(len(down)) if config.get("use_rslora") else len(down))
        shape, wanted = (up.shape[0], down.shape[1]), types[name].shape
        if wanted not in (shape, shape[::-1]):
            raise ValueError(
                f"{folder} adapts {name!r} as a matrix of shape {shape}, but it has the shape {wanted}. Pass the model "
                "that the adapter was trained for."
            )
        is_square = shape == shape[::-1]
        is_transposed = (each["is_embedding"] or config.get("fan_in_fan_out", False)) if is_square else wanted != shape
        factors[name] = _Factors(down, scale * up, is_transposed, each["is_embedding"])
    return factors


def _read_config(path: str) -> dict:
    """Returns the config of an adapter of PEFT, with an alpha; raises ValueError unless it is LoRA alone."""
    try:
        with open(path, encoding="utf-8") as file:
            config = {"lora_alpha": 8, **json.load(file)}  # PEFT's default
    except (ValueError, TypeError) as error:  # no JSON, or no object
        raise ValueError(f"{path} is no config of PEFT ({error}). Pass the folder that PEFT wrote.") from None
    unknown = [name for name in _NOT_LORA_ALONE if config.get(name)]
    initialized = str(config.get("init_lora_weights"))
    unknown += [f"init_lora_weights={initialized!r}"] if initialized.lower().startswith(_CHANGE_WEIGHTS) else []
    if config.get("peft_type") != "LORA" or unknown:
        what = unknown[0] if unknown else f"peft_type={config.get('peft_type')!r}"
        raise ValueError(f"{path} is of an adapter with {what}, and only plain LoRA can be merged. Merge it in PEFT.")
    alphas = [config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()]
    wrong = [each for each in alphas if not isinstance(each, (int, float))]
    if wrong:
        raise ValueError(f"{path}: lora_alpha is {wrong[0]!r}, which is no number. Pass the folder that PEFT wrote.")
    return config


def _tensor_of(module: str, types: Mapping[str, TensorType], folder: str) -> str:
    """Returns the tensor of a module's weight. A task's modules and a backbone's may differ in a prefix."""
    name = f"{module}.weight"
    names = [f".{each}" for each in types]
    found = [each[1:] for each in names if each.endswith(f".{name}") or f".{name}".endswith(each)]
    found = [name] if name in types else found
    if len(found) != 1:
        raise ValueError(
            f"{folder} adapts {module!r}, but there is no {name!r} among the tensors of the model, such as "
            f"{next(iter(types))!r}. Pass the model that the adapter was trained for."
        )
    return found[0]


def _of_module(module: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """Returns what a config of PEFT says of a module: patterns are regular expressions of the end of its name."""
    fitting = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(fitting, default)


def _product(factors: _Factors, elements: Elements, tensor: TensorType) -> np.ndarray:
    """Returns what is added to elements of a tensor."""
    product = factors.up @ factors.down
    product = np.ascontiguousarray(product.T if factors.is_transposed else product)
    offset, *strides = (4 * each // tensor.dtype.itemsize for each in (elements.offset, *elements.strides))
    return np.ndarray(elements.shape, "float32", product, offset, strides)


def _require_others_as_before(parts: list[Part], source: Source) -> None:
    """Raises ValueError if other variables than those of adapters were trained, such as biases of the same layers."""
    for part in parts:
        if part.variable.trainable and not (part.is_adapted or _has_values_of(source, part)):
            before = "" if source.tensors is None else f" and differs from {source.name!r}"
            raise ValueError(
                f"{part.variable.path!r} is trainable{before}, but an adapter has no place for it. Set "
                "variable.trainable = False before you train, or write merged weights with export_safetensors."
            )


def _require_untied(adapted: list[Part]) -> None:
    """Raises ValueError for embeddings that also compute logits: Keras adapts both uses, and PEFT only the lookup."""
    for part in adapted:
        if part.variable.name == "embeddings" and getattr(part.layer, "tie_weights", False):
            raise ValueError(
                f"The embeddings of {part.layer.path!r} also compute logits. Keras adapts both, and PEFT only the "
                "lookup, so an adapter of one has no form in the other. Leave the layer out of the adapter, or merge "
                "it: keras_dist.export_safetensors writes merged weights, and so does merge_and_unload() of PEFT."
            )


def _has_values_of(source: Source, part: Part) -> bool:
    if source.tensors is None:
        return False
    values = _gathered(part.variable)
    for each in part.elements:
        tensor = source.tensors[each.tensor]
        found = np.ndarray(each.shape, tensor.dtype, tensor.view("uint8"), each.offset, each.strides)
        if not np.array_equal(found.astype(values.dtype), values[slices_of(each.bounds)]):
            return False
    return True


def _targets(modules: Mapping[str, Any], types: Mapping[str, TensorType]) -> list[str]:
    """Returns the last names of modules if they name no others, as vLLM expects, else the full names."""
    names = {module.rpartition(".")[2] for module in modules}
    named = {name.removesuffix(".weight") for name in types if name.removesuffix(".weight").rpartition(".")[2] in names}
    return sorted(names if named == set(modules) else modules)


def _factors(part: Part, elements: Elements, tensor: TensorType) -> _Factors:
    """Returns the adapter of a kernel for the matrix that its elements are in."""
    layer, (*variables, scale) = part.layer, part.factors()
    a, b = map(_gathered, variables)
    rank, inputs = len(b), _input_dims(layer, a.ndim)
    shape: tuple[int, ...] = tuple(part.variable.shape)
    is_matrix = len(tensor.shape) == 2 and elements.shape == shape
    width = tensor.shape[1] if is_matrix else 1
    steps = [step // tensor.dtype.itemsize for step in elements.strides]
    in_rows = [step % width == 0 for step in steps]
    is_transposed = is_matrix and all(in_rows[dim] for dim in inputs)
    is_mixed = any(in_rows[dim] != (is_transposed == (dim in inputs)) for dim, n in enumerate(shape) if n > 1)
    if not is_matrix or is_mixed or a.ndim - 1 in inputs:
        raise ValueError(
            f"The kernel of {layer.path!r}, of shape {shape}, is no matrix of inputs and outputs in "
            f"{elements.tensor!r}, of shape {tensor.shape}, so its adapter has no form in PEFT. Leave the layer out of "
            "enable_lora, or write merged weights with export_safetensors."
        )
    outputs = [dim for dim in range(a.ndim) if dim not in inputs]
    row, column = divmod(elements.offset // tensor.dtype.itemsize, width)

    def positions(dims: list[int], are_rows: bool) -> np.ndarray:
        offsets = [np.arange(shape[dim]) * steps[dim] // (width if are_rows else 1) for dim in dims]
        return sum(np.ix_(*offsets), start=np.asarray(row if are_rows else column)).reshape(-1)

    blocks = math.prod(shape[dim] for dim in outputs[:-1])
    ordered = a.transpose([*outputs[:-1], a.ndim - 1, *inputs]).reshape(blocks * rank, -1)
    down = np.zeros((blocks * rank, tensor.shape[not is_transposed]), "float32")
    down[:, positions(inputs, is_transposed)] = ordered
    up = np.zeros((tensor.shape[is_transposed], blocks * rank), "float32")
    rows = positions(outputs, not is_transposed).reshape(blocks, -1)
    for block in range(blocks):
        up[rows[block], block * rank : (block + 1) * rank] = scale * b.T
    return _Factors(down, up, is_transposed, part.variable.name == "embeddings")


def _gathered(variable: Any) -> np.ndarray:
    array = gather(internals.variable_value(variable))
    assert array is not None
    return array


def _input_dims(layer: Any, rank: int) -> list[int]:
    """Returns the dims of a kernel that are those of the layer's inputs: of an embedding, that of its rows."""
    equation = getattr(layer, "equation", None)
    if equation is None:
        return [*range(rank - 1)]
    inputs, kernel = re.split("[,-]", equation)[:2]
    return [dim for dim, letter in enumerate(kernel) if letter in inputs]

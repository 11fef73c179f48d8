"""Writes models of KerasHub in the format of Hugging Face, from the shards of their variables."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import keras

from keras_dist._keras import internals
from keras_dist._keras.deferred_variables import deferred_initializer
from keras_dist._keras.model_structure import all_layers, direct_variables
from keras_dist._report.units import counted
from keras_dist.interchange.converter import Elements, elements_of_variables
from keras_dist.interchange.hub_source import CODES, Source, exporter_source, folder_source, preset_loader
from keras_dist.interchange.output_files import INDEX, FileWriter, OutputFile, index_of, planned_files
from keras_dist.multihost import messaging
from keras_dist.variables.gather import gather
from keras_dist.variables.global_reads import require_same_call, run_on_every_process
from keras_dist.variables.host_to_device import reshard
from keras_dist.variables.lazy_tensor import slices_of


def export_safetensors(
    model: keras.Model,
    directory: str | os.PathLike,
    like: str | os.PathLike | None = None,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a model of KerasHub as a folder that `transformers`, vLLM and others load: config, safetensors, tokenizer.

    Every model that KerasHub reads from Hugging Face can be written: its converter says which elements of which tensors
    each variable has. Names and dtypes of tensors, the config and all other files come from `like`. What KerasHub does
    not read, such as heads of other tasks, is copied from there. The layout of the model does not matter, and each
    process writes files of its own: one variable at a time is gathered on the host of a process that writes it.
    Adapters of LoRA are merged into the weights that are written.

    All processes of a multi-process program must call it, with a directory that all can write to. It appears when it is
    complete.

    Args:
        model: A task, such as `keras_hub.models.CausalLM`, or a backbone.
        directory: A folder that does not exist yet, or that is empty.
        like: A folder in the format of Hugging Face for the same config, usually the one that the model was loaded
            from. Without it, KerasHub writes config and tokenizer, as it can for Gemma, GPT-2, Llama, Mistral and Qwen.
        dtype: That of all floating-point tensors; those of `like`, or of the model's variables, by default. Values are
            rounded to it.
        max_shard_bytes: The largest size of a file; a larger tensor has a file of its own.

    Raises:
        TypeError: `model` is not one of KerasHub.
        ValueError: KerasHub cannot convert the family, or computes new values from its tensors; `like` describes
            another model; the model is quantized, or has weights that Hugging Face's format has no place for.
        FileExistsError: `directory` is not empty.
        OSError: It cannot be written, or there is not enough space. Nothing is left of it.

    Example:

    >>> import keras_hub
    >>> backbone = keras_hub.models.GPT2Backbone(64, num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=32)
    >>> export_safetensors(keras_hub.models.GPT2CausalLM(backbone), "exported")
    >>> sorted(os.listdir("exported"))
    ['config.json', 'model.safetensors']
    """
    target = os.path.realpath(_checked_directory(directory))
    backbone = _checked_backbone(model)
    if dtype is not None and (dtype not in CODES or not jnp.issubdtype(jnp.dtype(dtype), jnp.floating)):
        raise ValueError(f"dtype={dtype!r} is no floating-point dtype. Pass 'bfloat16', 'float16' or 'float32'.")
    if max_shard_bytes < 1:
        raise ValueError(
            f"max_shard_bytes={max_shard_bytes!r} is not positive. Pass a number of bytes, such as 2 * 10**9."
        )
    folder = None if like is None else os.fspath(like)
    source = exporter_source(model, backbone) if folder is None else folder_source(folder, backbone)
    with source as found:
        export = _planned(model, found, dtype, max_shard_bytes)
        require_same_call(
            "export",
            f"{target} ({counted(len(export.files), 'file')}, {counted(len(export.parts), 'part')})",
            "All processes must export the same model.",
        )
        _write(target, export, found)


def _checked_directory(directory: Any) -> str:
    path = os.fspath(directory)
    if internals.file_utils.is_remote_path(path):
        raise ValueError(
            f"{path!r} is not on a file system of this machine, and files are mapped to be written. Pass a local "
            "directory, which all processes share, and copy it."
        )
    if (os.path.isdir(path) and os.listdir(path)) or os.path.isfile(path):
        raise FileExistsError(f"{path!r} is not empty. Delete it, or pass another directory.")
    return path


def _checked_backbone(model: Any) -> Any:
    try:
        import keras_hub
    except ImportError:
        keras_hub = None
    kinds = (keras_hub.models.Task, keras_hub.models.Backbone) if keras_hub else ()
    if not isinstance(model, kinds):
        raise TypeError(
            f"export_safetensors takes a task or a backbone of KerasHub (pip install 'keras_dist[hub]'), got "
            f"{type(model).__name__}. model.save(path) and model.export(path) write other models."
        )
    quantized = next((layer for layer in all_layers(model) if getattr(layer, "quantization_mode", None)), None)
    if quantized is not None:
        raise ValueError(
            f"Layer {quantized.path!r} is quantized ({quantized.quantization_mode}), and Hugging Face's format has no "
            "place for Keras's scales. Export the model before you quantize it."
        )
    empty = next((each for each in model.variables if deferred_initializer(each) is not None), None)
    if empty is not None:
        raise ValueError(
            f"{empty.path!r} has no value: it was created inside keras_dist.deferred(). Call "
            "keras_dist.materialize(model), or load weights, before you export it."
        )
    return getattr(model, "backbone", model)


class _Part(NamedTuple):
    """A variable with what is written of it."""

    layer: Any
    variable: Any
    elements: list[Elements]


class _Export(NamedTuple):
    files: list[OutputFile]
    parts: list[_Part]
    copied: list[str]  # tensors that begin with the values of `like`
    config: dict


def _planned(model: Any, source: Source, dtype: str | None, max_bytes: int) -> _Export:
    """Runs the converter on tensors without values, and checks that everything has a place and a value."""
    types, config = source.types, dict(source.config)
    if dtype is not None:
        types = {
            name: each._replace(code=CODES[dtype]) if jnp.issubdtype(each.dtype, jnp.floating) else each
            for name, each in types.items()
        }
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    converter = preset_loader(source.name, source.config).converter
    backbone = getattr(model, "backbone", model)
    pairs = list(_pairs(backbone, source.twin))
    has_head = hasattr(converter, "convert_head")
    task = _task_with(source.twin, model) if has_head and model is not backbone else None
    if task is not None:
        pairs += _pairs(model, task)

    def convert(loader):
        converter.convert_weights(source.twin, loader, source.config)
        if task is not None:
            loader.prefix = ""
            converter.convert_head(task, loader, source.config)

    try:
        elements = elements_of_variables(convert, (twin for *_, twin in pairs), types)
    except KeyError as error:
        raise ValueError(
            f"{source.name!r} lacks {error.args[0]!r}, which KerasHub reads for {type(backbone).__name__}. Pass "
            "like=folder with the complete checkpoint that the model was loaded from."
        ) from error
    except AttributeError as error:  # KerasHub reads fewer variants of a backbone than it builds
        raise ValueError(
            f"KerasHub's {_name(converter)} reads no {type(backbone).__name__} like this one from Hugging Face "
            f"({error}), so it has no form there. Use model.save_to_preset(directory)."
        ) from error
    parts = [_Part(layer, variable, elements.get(id(twin), [])) for layer, variable, twin in pairs]
    _require_places(model, pairs, elements, converter)
    covered = dict.fromkeys(types, 0)
    for part in parts:
        for each in part.elements:
            covered[each.tensor] += math.prod(each.shape)
    shared = next((name for name, each in types.items() if covered[name] > math.prod(each.shape)), None)
    if shared is not None:
        raise ValueError(
            f"KerasHub's {_name(converter)} reads {shared!r} into several variables, which may differ by now, so they "
            "cannot be written back. Use model.save_to_preset(directory)."
        )
    missing = [name for name, each in types.items() if covered[name] < math.prod(each.shape)]
    if source.tensor is None:
        types = {name: each for name, each in types.items() if name not in missing or name != "lm_head.weight"}  # tied
        missing = [name for name in missing if name in types]
        if missing:
            raise ValueError(
                f"{source.name} writes {missing[0]!r}, which KerasHub's converter does not read for this model. Pass "
                "like=folder with the config.json and the safetensors that the model was loaded from."
            )
    files = planned_files(types, max_bytes, messaging.process_count())
    return _Export(files, [part for part in parts if part.elements], missing, config)


def _pairs(model: Any, twin: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the layers of a model, each variable, and that of the same model without values; not those of LoRA.

    Both are compared layer by layer: names of layers may be numbered on, and LoRA changes the order of variables.
    """
    for layer, other in zip(_layers(model), _layers(twin), strict=True):
        named = {variable.name: variable for variable in direct_variables(other)}
        for variable in direct_variables(layer):
            if variable.name in named:
                yield layer, variable, named[variable.name]


def _layers(model: Any) -> list[Any]:
    """Returns the layers with variables of a backbone, or those of a task that are not of its backbone."""
    backbone = getattr(model, "backbone", None)
    known = set() if backbone is None else {id(each) for each in all_layers(backbone)}
    return [each for each in all_layers(model) if id(each) not in known and direct_variables(each)]


def _task_with(backbone: Any, model: Any) -> Any:
    """Returns a task like that of the model around another backbone, without a preprocessor."""
    config = {key: value for key, value in model.get_config().items() if key not in ("name", "trainable", "dtype")}
    return type(model)(**config | {"backbone": backbone, "preprocessor": None})


def _require_places(model: Any, pairs: list, elements: Mapping[int, list], converter: Any) -> None:
    paired = {id(variable) for _, variable, _ in pairs}
    odd = [each for each in model.trainable_variables if id(each) not in paired and "lora_" not in each.name]
    if odd:
        raise ValueError(
            f"KerasHub reads the backbone of {model.name!r} from Hugging Face, but not {odd[0].path!r} "
            f"({counted(len(odd), 'weight')}), so the format has no place for it. Export the backbone: model.backbone."
        )
    for _, variable, twin in pairs:
        if twin.trainable and not elements.get(id(twin)):
            raise ValueError(
                f"KerasHub's {_name(converter)} computes the values of {variable.path!r} from several tensors, or from "
                "none, so they cannot be written back. Use model.save_to_preset(directory)."
            )


def _name(converter: Any) -> str:
    return converter.__name__.rpartition(".")[2]


def _write(target: str, export: _Export, source: Source) -> None:
    """Writes files into a hidden folder next to the target, which takes its place when all are complete."""
    is_first, me = messaging.process_index() == 0, messaging.process_index()
    parent = os.path.dirname(target)
    folder = os.path.join(parent, f".{os.path.basename(target)}.part")

    def create() -> None:
        os.makedirs(parent, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)

    def complete() -> None:
        source.write_others(folder)
        _write_json(folder, "config.json", export.config)
        if len(export.files) > 1:
            _write_json(folder, INDEX, index_of(export.files))
        os.rename(folder, target)  # replaces an empty folder

    task = f"write {target!r}"
    try:
        run_on_every_process(task, create if is_first else lambda: None)
        own = [file for file in export.files if file.process == me]
        writers: dict[str, FileWriter] = {}

        def open_files() -> None:
            for file in own:
                writer = FileWriter(folder, file)
                writers.update(dict.fromkeys(file.types, writer))
            for name in export.copied:
                if name in writers:
                    assert source.tensor is not None
                    writers[name].write(name, source.tensor(name))

        run_on_every_process(task, open_files)
        run_on_every_process(task, lambda: _write_values(export.parts, writers))
        run_on_every_process(task, complete if is_first else lambda: None)
    except BaseException:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_values(parts: list[_Part], writers: Mapping[str, FileWriter]) -> None:
    """Gathers one variable after the other, and writes what files of this process have of it."""
    for layer, variable, elements in parts:
        own = [each for each in elements if each.tensor in writers]
        values = gather(_value(layer, variable), keep=bool(own))
        for each in own:
            assert values is not None
            writers[each.tensor].write(each.tensor, values[slices_of(each.bounds)], each)
        del values  # before the next one takes memory
    for writer in set(writers.values()):
        writer.close()


def _value(layer: Any, variable: Any) -> Any:
    """The value of a variable, to which adapters are added."""
    value: Any = internals.variable_value(variable)
    if getattr(layer, "lora_enabled", False) and variable.name in ("kernel", "embeddings"):
        return reshard(keras.ops.convert_to_tensor(getattr(layer, variable.name)), value.sharding)
    return value


def _write_json(folder: str, name: str, content: Any) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)

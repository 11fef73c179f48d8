"""Writes models of KerasHub in the format of Hugging Face, from the shards of their variables."""

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import keras
import numpy as np

from keras_dist._report.units import counted
from keras_dist.interchange.hub_source import CODES, Source
from keras_dist.interchange.model_parts import (
    Conversion,
    Part,
    require_model_of_kerashub,
    source_of,
)
from keras_dist.interchange.output_files import (
    INDEX,
    FileWriter,
    OutputFile,
    index_of,
    new_folder,
    planned_files,
    write_json,
)
from keras_dist.multihost import messaging
from keras_dist.variables.gather import gather
from keras_dist.variables.global_reads import require_same_call
from keras_dist.variables.lazy_tensor import slices_of
from keras_dist.variables.safetensors_files import SafetensorsFile, views_of

_FLOATS = [dtype for dtype in CODES if jnp.issubdtype(jnp.dtype(dtype), jnp.floating)]


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

    >>> import keras_hub, os, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> backbone = keras_hub.models.GPT2Backbone(64, num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=32)
    >>> export_safetensors(keras_hub.models.GPT2CausalLM(backbone), folder)
    >>> sorted(os.listdir(folder))
    ['config.json', 'model.safetensors']
    """
    require_model_of_kerashub("export_safetensors", model)
    if dtype is not None and dtype not in _FLOATS:
        raise ValueError(f"dtype={dtype!r} is no floating-point dtype. Pass 'bfloat16', 'float16' or 'float32'.")
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(
            f"max_shard_bytes={max_shard_bytes!r} is no positive integer. Pass a number of bytes, such as 2 * 10**9."
        )
    with new_folder(directory) as folder, source_of(model, like) as source:
        conversion = Conversion(model, source)
        export = _planned(model, source, conversion, dtype, max_shard_bytes)
        require_same_call(
            "export",
            f"{folder.target} ({counted(len(export.files), 'file')}, {counted(len(export.parts), 'variable')})",
            "All processes must export the same model.",
        )
        folder.create()
        writers: dict[str, FileWriter] = {}
        folder.run(lambda: _open_files(folder.path, export, source, writers))
        folder.run(lambda: _write_values(export.parts, writers))
        _require_computed_values(folder.path, export, conversion)
        folder.complete(lambda: _write_others(folder.path, export, source))


class _Export(NamedTuple):
    files: list[OutputFile]
    parts: list[Part]
    computed: list[Part]  # trainable, but KerasHub computes their values from tensors
    copied: list[str]  # tensors that begin with the values of `like`
    config: dict


# The epsilon of norms in configs of Hugging Face.
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")


def _planned(model: Any, source: Source, conversion: Conversion, dtype: str | None, max_bytes: int) -> _Export:
    """Finds the place of each variable, and checks that every tensor has values."""
    types, config = source.types, dict(source.config)
    if dtype is not None:
        types = {
            name: each._replace(code=CODES[dtype]) if jnp.issubdtype(each.dtype, jnp.floating) else each
            for name, each in types.items()
        }
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    config |= _epsilon_of(model, source)
    parts = conversion.parts(types)
    conversion.require_all_weights(model)
    covered = dict.fromkeys(types, 0)
    for part in parts:
        for each in part.elements:
            covered[each.tensor] += math.prod(each.shape)
    shared = next((name for name, each in types.items() if covered[name] > math.prod(each.shape)), None)
    if shared is not None:
        raise ValueError(
            f"KerasHub's {conversion.name} reads {shared!r} into several variables, which may differ by now, so they "
            "cannot be written back. Use model.save_to_preset(directory)."
        )
    missing = [name for name, each in types.items() if covered[name] < math.prod(each.shape)]
    if source.tensors is None:
        if getattr(getattr(source.twin, "token_embedding", None), "tie_weights", False):
            types = {name: each for name, each in types.items() if name not in missing or name != "lm_head.weight"}
            missing = [name for name in missing if name in types]
        if missing:
            raise ValueError(
                f"{source.name} writes {missing[0]!r}, which KerasHub's converter does not read for this model. Pass "
                "like=folder with the config.json and the safetensors that the model was loaded from."
            )
    files = planned_files(types, max_bytes, messaging.process_count())
    computed = [part for part in parts if part.twin.trainable and not part.elements]
    return _Export(files, [part for part in parts if part.elements], computed, missing, config)


def _epsilon_of(model: Any, source: Source) -> dict:
    """Returns what a config must say of the norms of a model otherwise than its source."""
    own = getattr(model, "backbone", model).get_config().get("layer_norm_epsilon")
    given = {name: source.config[name] for name in _EPSILONS if own is not None and name in source.config}
    changed = {name: own for name, value in given.items() if value != own}
    for name in changed:
        warnings.warn(
            f"The norms of {model.name!r} have an epsilon of {own}, but {source.name!r} says {name}={given[name]}, "
            f"which KerasHub's converter did not read. The export says {own}, as the model computes. To train with the "
            f"other one, pass from_preset(folder, layer_norm_epsilon={given[name]}) of the backbone.",
            stacklevel=4,
        )
    return changed


def _require_computed_values(folder: str, export: _Export, conversion: Conversion) -> None:
    """Raises ValueError unless KerasHub computes the values that variables have from the tensors that were written.

    Examples: the position table of DINOv2 for another size of images, and the experts of GPT-OSS, which have 4 bits.
    """
    if not export.computed:
        return
    unread = {id(part.twin): part for part in export.computed}

    def compare(twin: Any, value: Any) -> None:
        part = unread.get(id(twin))
        own = None if part is None else gather(part.value())
        if own is not None and np.array_equal(np.asarray(value).astype(own.dtype), own):
            del unread[id(twin)]

    written = views_of(SafetensorsFile(os.path.join(folder, file.name)) for file in export.files)
    conversion.read(written, compare)
    for part in unread.values():
        raise ValueError(
            f"KerasHub's {conversion.name} computes the values of {part.variable.path!r} from several tensors, which "
            "say something else: it was trained, and cannot be written back. Freeze it before you train, or use "
            "model.save_to_preset(directory)."
        )


def _open_files(folder: str, export: _Export, source: Source, writers: dict[str, FileWriter]) -> None:
    """Creates the files of this process, and adds them to `writers` by the names of their tensors."""
    for file in export.files:
        if file.process == messaging.process_index():
            writers.update(dict.fromkeys(file.types, FileWriter(folder, file)))
    for name in export.copied:
        if name in writers:
            assert source.tensors is not None
            writers[name].write(name, source.tensors[name])


def _write_others(folder: str, export: _Export, source: Source) -> None:
    source.write_others(folder)
    write_json(folder, "config.json", export.config)
    if len(export.files) > 1:
        write_json(folder, INDEX, index_of(export.files))


def _write_values(parts: list[Part], writers: Mapping[str, FileWriter]) -> None:
    """Gathers one variable after the other, and writes what files of this process have of it."""
    failure: Exception | None = None
    for part in parts:
        own = [each for each in part.elements if each.tensor in writers and failure is None]
        values = gather(part.value(), keep=bool(own))
        try:
            for each in own:
                assert values is not None
                writers[each.tensor].write(each.tensor, values[slices_of(each.bounds)], each)
        except Exception as error:  # the others cannot gather without this process
            failure = error
        del values  # before the next one takes memory
    if failure is not None:
        raise failure
    for writer in set(writers.values()):
        writer.close()

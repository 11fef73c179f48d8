"""Where the names of an export come from: a folder in the format of Hugging Face, or the exporters of KerasHub.

What KerasHub reads from a config is not enough to write one, so a model of another family needs a folder.
"""

import contextlib
import copy
import importlib.metadata
import inspect
import json
import os
import pkgutil
import reprlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from keras_dist.interchange.converter import TensorType
from keras_dist.interchange.output_files import INDEX
from keras_dist.interchange.presets import missing_keys_explained
from keras_dist.variables.deferred import built
from keras_dist.variables.safetensors_files import DTYPES, SafetensorsFile, views_of

CODES = {dtype: code for code, dtype in DTYPES.items()}
_WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".index.json")
_MODULES = "modules.json"  # of sentence-transformers: the modules that run one after the other, with their subfolders


class Source(NamedTuple):
    """What an export consists of besides the values of variables."""

    name: str
    config: dict
    types: dict[str, TensorType]
    twin: Any  # a backbone like that of the model, without values
    tensors: Mapping[str, np.ndarray] | None  # those of a folder, as views of its files
    write_others: Callable[[str], None]  # writes the tokenizer and other files, but not the config, into a folder


@contextlib.contextmanager
def folder_source(folder: str, backbone: Any) -> Iterator[Source]:
    """Provides what is in a folder of Hugging Face.

    Raises ValueError if files are missing or damaged, or if KerasHub builds another model from the config. Only the
    epsilon of its norms may differ: some converters of KerasHub do not read it.
    """
    if os.path.isfile(folder):
        raise ValueError(f"like={folder!r} is a file. Pass the folder that it is in.")
    config, modules = _read_json(folder, "config.json"), _module_folders(folder)
    files = [None]
    if os.path.exists(os.path.join(folder, INDEX)):
        files = _indexed_files(folder)
    elif os.path.exists(os.path.join(folder, "model.safetensors")):
        files = ["model.safetensors"]
    paths = [os.path.join(folder, name or INDEX) for name in files]
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise ValueError(
            f"like={folder!r} has neither model.safetensors nor all files of {INDEX}: {missing[0]!r} is missing. Pass "
            "a folder with safetensors; transformers writes one with model.save_pretrained(folder)."
        )
    opened = [SafetensorsFile(path) for path in paths]
    entries = [each for file in opened for each in file.header.items()]
    types = {name: TensorType(entry["dtype"], tuple(entry["shape"])) for name, entry in entries}
    unknown = next((name for name, each in types.items() if each.code not in DTYPES), None)
    if unknown is not None:
        raise ValueError(f"like={folder!r}: {unknown!r} has the type {types[unknown].code}, which NumPy does not have.")

    def write_others(target: str) -> None:
        _copy_others(folder, target, modules)

    loader = preset_loader(folder, config)
    if loader.check_backbone_class() is not type(backbone):
        raise ValueError(
            f"like={folder!r} is a {config['model_type']!r}, which KerasHub reads as "
            f"{loader.check_backbone_class().__name__}, but the model has a {type(backbone).__name__}. Pass the folder "
            "of a model of the same family."
        )

    def build() -> Any:
        with missing_keys_explained(folder):
            return loader.load_backbone(type(backbone), load_weights=False)

    with built(build) as twin:
        _require_same_config(folder, backbone.get_config(), twin.get_config())
        yield Source(folder, config, types, twin, views_of(opened), write_others)


def _indexed_files(folder: str) -> list[str]:
    weight_map = _read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(each, str) for each in weight_map.values()):
        raise ValueError(
            f"like={folder!r}: {INDEX} has no 'weight_map' from names of tensors to names of files, but "
            f"{reprlib.repr(weight_map)}. Copy or download it again."
        )
    return sorted(set(weight_map.values()))


def _module_folders(folder: str) -> set[str]:
    """Returns the subfolders that a model of sentence-transformers consists of, besides that of KerasHub's model."""
    modules = _read_json(folder, _MODULES, list) if os.path.exists(os.path.join(folder, _MODULES)) else []
    return {os.path.normpath(str(each.get("path"))) for each in modules if isinstance(each, dict)}


def _copy_others(folder: str, target: str, modules: Collection[str]) -> None:
    """Copies what is in a folder, except its config and weights, hidden subfolders, and those with other weights.

    These are the same weights in another form, for example in `onnx/` and `original/`, except those of `modules`.
    """
    for directory, subfolders, names in os.walk(folder):
        inside = os.path.relpath(directory, folder)
        if inside == os.curdir:
            names = [name for name in names if not name.endswith(_WEIGHTS) and name != "config.json"]
        elif inside not in modules and any(name.endswith(_WEIGHTS) for name in names):
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]  # which `os.walk` goes into
        for path in (os.path.join(directory, name) for name in names):
            if os.path.isfile(path):
                os.makedirs(os.path.join(target, inside), exist_ok=True)
                shutil.copy(path, os.path.join(target, inside))


def _read_json(folder: str, name: str, kind: type = dict) -> Any:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise ValueError(
            f"like={folder!r} has no {name}. Pass a folder in the format of Hugging Face, with config.json and "
            "safetensors. That of a model on its hub is huggingface_hub.snapshot_download('organization/model')."
        ) from None
    except ValueError as error:  # also of the encoding
        raise ValueError(f"like={folder!r}: {name} is not JSON: {error}. Copy or download it again.") from None
    if not isinstance(content, kind):
        raise ValueError(
            f"like={folder!r}: {name} is no JSON {'object' if kind is dict else 'array'}, but {reprlib.repr(content)}. "
            "Copy or download it again."
        )
    return content


def _require_same_config(folder: str, ours: dict, theirs: dict) -> None:
    differences = list(_differences("", ours | {"layer_norm_epsilon": theirs.get("layer_norm_epsilon")}, theirs))
    if differences:
        path, value, other = differences[0]
        more = f" ({len(differences) - 1} more: {', '.join(each[0] for each in differences[1:5])})"
        raise ValueError(
            f"like={folder!r} describes another model: its {path} is {other!r}, and that of the model is {value!r}"
            f"{more if len(differences) > 1 else ''}. Pass the folder that the model was loaded from, or one whose "
            "config.json says the same."
        )


def _differences(path: str, ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields where the configs of two layers differ, but for names, dtypes and dropout."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            if key not in ("name", "trainable", "dtype", "build_config") and "dropout" not in key:
                yield from _differences(f"{path}.{key}".lstrip("."), ours.get(key), theirs.get(key))
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{path}[{index}]", *pair)
    elif ours != theirs:
        yield path, ours, theirs


def preset_loader(folder: str, config: dict) -> Any:
    """Returns KerasHub's loader for a config of Hugging Face, which has the converter of its family."""
    from keras_hub.src.utils import transformers
    from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader

    try:
        return TransformersPresetLoader(folder, copy.deepcopy(config))  # some converters change what they are given
    except (KeyError, ValueError):
        modules = (module.name for module in pkgutil.iter_modules(transformers.__path__))
        known = sorted(name.removeprefix("convert_") for name in modules if name.startswith("convert_"))
        raise ValueError(
            f"KerasHub {importlib.metadata.version('keras-hub')} cannot convert the model type "
            f"{config.get('model_type')!r} of {os.path.join(folder, 'config.json')!r}. It converts {', '.join(known)}."
        ) from None


@contextlib.contextmanager
def exporter_source(model: Any, backbone: Any) -> Iterator[Source]:
    """Provides what KerasHub's exporters would write, computing nothing; raises ValueError for other families."""
    from keras_hub.src.utils.transformers.export import hf_exporter

    family, families = type(backbone).__name__, sorted(hf_exporter.MODEL_EXPORTERS)
    if family not in families:
        raise ValueError(
            f"KerasHub writes the config of Hugging Face for {', '.join(families)}, but not for {family}. Pass "
            "like=folder with the config.json and the safetensors that the model was loaded from. The folder of a "
            "model on the hub is huggingface_hub.snapshot_download('organization/model')."
        )
    preprocessor: Any = getattr(model, "preprocessor", None)
    tokenizer: Any = getattr(preprocessor, "tokenizer", None)
    own_config = backbone.get_config()
    if "tie_word_embeddings" in inspect.signature(type(backbone)).parameters:  # Llama's config does not say it
        own_config["tie_word_embeddings"] = backbone.token_embedding.tie_weights
    with built(lambda: type(backbone).from_config(own_config)) as twin:
        config: Any = hf_exporter.MODEL_CONFIGS[family](twin)
        config = config if isinstance(config, dict) else config.to_dict()
        for name, role in (("bos", "start"), ("eos", "end")):
            token = getattr(tokenizer, f"{role}_token", None)
            if token is not None:
                config[f"{name}_token_id"] = tokenizer.token_to_id(token)

        def tensors(values):
            with keras.StatelessScope(state_mapping=list(zip(twin.variables, values, strict=True))):
                exported = hf_exporter.MODEL_EXPORTERS[family](twin, include_lm_head=True)
                return {name: keras.ops.convert_to_tensor(each) for name, each in exported.items()}

        values = [jax.ShapeDtypeStruct(tuple(each.shape), each.dtype) for each in twin.variables]
        shapes = jax.eval_shape(tensors, values)
        types = {name: TensorType(CODES[each.dtype.name], each.shape) for name, each in shapes.items()}

        def write_others(target: str) -> None:
            hf_exporter.export_image_converter(backbone, target)
            hf_exporter.export_processor_config(backbone, target)
            hf_exporter.export_generation_config(backbone, target)
            if tokenizer is not None:
                hf_exporter.export_tokenizer(tokenizer, target)

        yield Source(f"KerasHub's exporter of {family}", config, types, twin, None, write_others)

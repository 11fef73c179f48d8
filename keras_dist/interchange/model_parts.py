"""The variables of a model of KerasHub with their elements in the tensors of Hugging Face."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from keras_dist._keras import internals
from keras_dist._keras.deferred_variables import deferred_initializer
from keras_dist._keras.model_structure import all_layers, direct_variables
from keras_dist._report.install_advice import install_command
from keras_dist._report.units import counted
from keras_dist.interchange.converter import Elements, TensorType, elements_of_variables, read_values
from keras_dist.interchange.hub_source import Source, exporter_source, folder_source, preset_loader
from keras_dist.variables.host_to_device import reshard


class Part(NamedTuple):
    """A variable of a model.

    Attributes:
        layer: The layer that has it.
        variable: The variable.
        elements: Its elements in tensors; empty if KerasHub computes its values.
        twin: The variable of the same model without values.
    """

    layer: Any
    variable: Any
    elements: list[Elements]
    twin: Any

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of LoRA adds to it."""
        return getattr(self.layer, "lora_enabled", False) and self.variable.name in ("kernel", "embeddings")

    def factors(self) -> tuple[Any, Any, float]:
        """Returns the variables A and B of its adapter, and what their product is multiplied by."""
        a, b = (getattr(self.layer, f"lora_{self.variable.name}_{each}") for each in "ab")
        return a, b, self.layer.lora_alpha / self.layer.lora_rank

    def value(self) -> Any:
        """Returns its value, with what its adapter adds to it: in float32, whatever dtype the layer computes in."""
        value: Any = internals.variable_value(self.variable)
        if not self.is_adapted:
            return value
        a, b, scale = self.factors()
        a, b = (jnp.asarray(internals.variable_value(each), "float32") for each in (a, b))
        return reshard((value + scale * jnp.matmul(a, b)).astype(value.dtype), value.sharding)


def source_of(model: Any, like: str | os.PathLike | None) -> contextlib.AbstractContextManager[Source]:
    """Provides what Hugging Face's form of a model consists of besides values, from a folder or from KerasHub."""
    backbone = getattr(model, "backbone", model)
    return exporter_source(model, backbone) if like is None else folder_source(os.fspath(like), backbone)


def require_model_of_kerashub(function: str, model: Any) -> None:
    """Raises an error unless a model has values that Hugging Face's format has a place for."""
    try:
        import keras_hub
    except ImportError:
        keras_hub = None
    kinds = (keras_hub.models.Task, keras_hub.models.Backbone) if keras_hub else ()
    if not isinstance(model, kinds):
        advice = "" if keras_hub else f" ({install_command('hub')})"
        raise TypeError(
            f"{function} takes a task or a backbone of KerasHub{advice}, got {type(model).__name__}. model.save(path) "
            "and model.export(path) write other models."
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


class Conversion:
    """KerasHub's converter from a source to the variables of a model.

    Attributes:
        name: That of its module, such as "convert_gpt2".
    """

    def __init__(self, model: Any, source: Source):
        loader = preset_loader(source.name, source.config)
        self._converter, self._config = loader.converter, loader.config
        self._source, self._backbone = source, getattr(model, "backbone", model)
        self.name = self._converter.__name__.rpartition(".")[2]
        has_head = hasattr(self._converter, "convert_head") and model is not self._backbone
        self._task = _task_with(source.twin, model) if has_head else None
        self._pairs = [*_pairs(self._backbone, source.twin, source.name)]
        self._pairs += _pairs(model, self._task, source.name) if has_head else ()

    def parts(self, types: Mapping[str, TensorType]) -> list[Part]:
        """Runs the converter on tensors without values; raises ValueError if they do not fit the model."""
        kind = type(self._backbone).__name__
        try:
            elements = elements_of_variables(self._convert, (twin for *_, twin in self._pairs), types)
        except KeyError as error:
            raise ValueError(
                f"{self._source.name!r} lacks {error.args[0]!r}, which KerasHub reads for {kind}. Pass like=folder "
                "with the complete checkpoint that the model was loaded from."
            ) from error
        except AttributeError as error:  # KerasHub reads fewer variants of a backbone than it builds
            raise ValueError(
                f"KerasHub's {self.name} reads no {kind} like this one from Hugging Face ({error}), so it has no form "
                "there. Use model.save_to_preset(directory)."
            ) from error
        except ValueError as error:
            if self._source.tensors is not None:
                raise
            raise ValueError(
                f"{self._source.name} writes tensors that KerasHub's {self.name} cannot read ({error}). Pass "
                "like=folder with the config.json and the safetensors that the model was loaded from."
            ) from error
        return [Part(layer, variable, elements.get(id(twin), []), twin) for layer, variable, twin in self._pairs]

    def require_all_weights(self, model: Any) -> None:
        """Raises ValueError if a model has weights that KerasHub does not read, such as heads of most tasks."""
        known = {id(each) for layer, *_ in self._pairs for each in direct_variables(layer)}
        odd = [each for each in model.weights if id(each) not in known]
        if odd:
            raise ValueError(
                f"KerasHub reads the backbone of {model.name!r} from Hugging Face, but not {odd[0].path!r} "
                f"({counted(len(odd), 'weight')}), so the format has no place for it. Export the backbone: "
                "model.backbone."
            )

    def read(self, tensors: Mapping[str, np.ndarray], use: Callable[[Any, Any], None]) -> None:
        """Calls a function with the twin of each variable and the value that it has in tensors."""
        read_values(self._convert, (twin for *_, twin in self._pairs), tensors, use)

    def _convert(self, loader: Any) -> None:
        self._converter.convert_weights(self._source.twin, loader, self._config)
        if self._task is not None:
            loader.prefix = ""
            self._converter.convert_head(self._task, loader, self._config)


def _pairs(model: Any, twin: Any, source: str) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the layers of a model, each variable, and that of the same model without values; not those of LoRA.

    Both are compared layer by layer: names of layers may be numbered on, and LoRA changes the order of variables.
    Raises ValueError if layers have other variables: configs of KerasHub do not say all that their constructors take.
    """
    for layer, other in zip(_layers(model), _layers(twin), strict=True):
        own = {each.name: each for each in direct_variables(layer) if "lora_" not in each.name}
        twins = {each.name: each for each in direct_variables(other)}
        if own.keys() != twins.keys():
            raise ValueError(
                f"Layer {layer.path!r} has the variables {', '.join(own)}, but KerasHub builds one with "
                f"{', '.join(twins)} for {source!r}. Pass like=folder with the config.json and the safetensors of a "
                "model that is like it, also in tie_word_embeddings."
            )
        yield from ((layer, own[name], twins[name]) for name in twins)


def _layers(model: Any) -> list[Any]:
    """Returns the layers with variables of a backbone, or those of a task that are not of its backbone."""
    backbone = getattr(model, "backbone", None)
    known = set() if backbone is None else {id(each) for each in all_layers(backbone)}
    return [each for each in all_layers(model) if id(each) not in known and direct_variables(each)]


def _task_with(backbone: Any, model: Any) -> Any:
    """Returns a task like that of the model around another backbone, without a preprocessor."""
    config = {key: value for key, value in model.get_config().items() if key not in ("name", "trainable", "dtype")}
    return type(model)(**config | {"backbone": backbone, "preprocessor": None})

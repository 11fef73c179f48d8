"""Models of KerasHub's presets, without their weights."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dist._report.argument_errors import did_you_mean
from keras_dist._report.install_advice import install_command


def preset_builder(preset: str) -> Callable[[], keras.Model]:
    """Returns a function that builds the model of a preset of KerasHub from its configuration, and reads no weights.

    The model is the task that was saved; else the language model of the family, if it has one; else the backbone.
    Raises ValueError if KerasHub is not installed, or cannot read the preset.
    """
    try:
        import keras_hub
    except ImportError:
        raise ValueError(f"The preset {preset!r} needs KerasHub. Run: {install_command('hub')}") from None
    known: Any = keras_hub.models.Backbone.presets
    is_folder = os.path.isdir(preset)
    if not is_folder and "://" not in preset and preset not in known:
        raise ValueError(
            f"Unknown preset {preset!r}: it is neither a folder nor a preset of KerasHub."
            f"{did_you_mean(preset, list(known))} Pass one of keras_hub.models.Backbone.presets, a handle such as "
            "'hf://organization/model', a folder with a config.json, or the function that builds the model, as "
            "'path/to/file.py:function'."
        )
    if is_folder and not os.path.exists(os.path.join(preset, "config.json")):
        raise ValueError(
            f"Folder {preset!r} has no config.json. Pass a folder that save_to_preset of KerasHub or save_pretrained "
            "of Hugging Face wrote."
        )
    try:
        kind = _model_class(keras_hub, preset)
    except (ValueError, TypeError, OSError) as error:  # also of the network
        raise ValueError(f"KerasHub cannot read the preset {preset!r}: {error}") from error
    options = {} if issubclass(kind, keras_hub.models.Backbone) else {"preprocessor": None}

    def build() -> keras.Model:
        with missing_keys_explained(preset):
            return kind.from_preset(preset, load_weights=False, **options)

    return build


@contextlib.contextmanager
def missing_keys_explained(source: str) -> Iterator[None]:
    """Raises a ValueError with the fix where KerasHub builds a model from a config that lacks a key."""
    try:
        yield
    except KeyError as error:
        raise ValueError(
            f"KerasHub cannot build a model from the config.json of {source!r}: it has no {error.args[0]!r}. Add it, "
            "or copy or download the file again."
        ) from error


def _model_class(keras_hub: Any, preset: str) -> Any:
    from keras_hub.src.utils import preset_utils

    backbone = preset_utils.get_preset_loader(preset).check_backbone_class()
    if preset_utils.check_file_exists(preset, preset_utils.TASK_CONFIG_FILE):
        return preset_utils.check_config_class(preset_utils.load_json(preset, preset_utils.TASK_CONFIG_FILE))
    for kind in (keras_hub.models.CausalLM, keras_hub.models.Seq2SeqLM):
        found = [each for each in preset_utils.list_subclasses(kind) if each.backbone_cls is backbone]
        usual = backbone.__name__.removesuffix("Backbone") + kind.__name__  # some families have several
        if found:
            return min(found, key=lambda each: (each.__name__ != usual, each.__name__))
    return keras_hub.models.Backbone

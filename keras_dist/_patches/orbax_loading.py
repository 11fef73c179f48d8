"""Patches that restore Orbax checkpoints completely, or raise an error, and save them without copies on devices."""

import os
import sys

import jax
import keras

from keras_dist._keras.active_distribution import ALWAYS, INSTALLED, active_distribution
from keras_dist._keras.internals import file_utils, saving_api, saving_lib
from keras_dist._keras.training_state import lent
from keras_dist._report.user_warnings import warn
from keras_dist.checkpoint import model_description, restore
from keras_dist.checkpoint.checkpoint_files import PROGRESS


@ALWAYS.patch(saving_api, "load_weights", issue="keras#23251")
@ALWAYS.patch(keras.saving, "load_weights", issue="keras#23251")
def _load_weights(original, model, filepath, skip_mismatch=False, **kwargs):
    """Without it, checkpoints of `TrainingCheckpoint` cannot be read on other devices; while a distribution of
    keras_dist is active: nothing, or only a part, of a checkpoint is restored silently.
    """
    _require_step(str(filepath))
    found = _checkpoints(str(filepath))
    if found is None:
        return original(model, filepath, skip_mismatch=skip_mismatch, **kwargs)
    if kwargs:
        raise ValueError(
            f"load_weights takes no {', '.join(map(repr, kwargs))} for an Orbax checkpoint: {filepath}. Leave it out."
        )
    _restore(model, *found, skip_mismatch)


@ALWAYS.patch(saving_api, "_load_model_from_orbax_checkpoint", issue="keras#23251")
def _load_model(original, filepath, custom_objects=None, compile=True, safe_mode=True):
    """Without it, checkpoints of `TrainingCheckpoint` cannot be read; while a distribution of keras_dist is active:
    nothing, or only a part, of a checkpoint is restored silently.
    """
    options = {"custom_objects": custom_objects, "compile": compile, "safe_mode": safe_mode}
    found = _checkpoints(str(filepath))
    if found is None:
        return original(filepath, **options)
    directory, steps = found
    descriptions = (model_description.read(os.path.join(directory, step), PROGRESS) for step in steps)
    if (description := next(filter(None, descriptions), None)) is None:
        path = os.path.join(directory, steps[0])
        raise ValueError(
            f"Cannot load a model from {path}: it contains no config of a model. Either only weights were saved, or "
            f"the model's get_config() raised an error. Create the model, and call model.load_weights({path!r})."
        )
    config, assets = description
    model = saving_lib._model_from_config(config, **options)
    _restore(model, directory, steps)
    saving_lib._load_assets_from_dict(model, assets)
    return model


def _restore(model: keras.Model, directory: str, steps: list[str], skip_mismatch: bool = False) -> None:
    restored = restore.restore(model, directory, steps, skip_mismatch)
    if restored.damaged:
        warn(
            f"{restore.damage_text(directory, restored.damaged)}. {os.path.join(directory, restored.step)} is loaded "
            "instead."
        )


@INSTALLED.patch(sys.modules[keras.callbacks.OrbaxCheckpoint.__module__], "_get_state_tree")
def _get_state_tree(original, distribution, model):
    """Without it, arrays are kept until they are written, and a step copies arrays that something else refers to."""
    return jax.tree.map(lent, original(model))


def _checkpoints(path: str) -> tuple[str, list[str]] | None:
    """Returns directory and steps of Orbax checkpoints that Keras must not read; None for others.

    Without a distribution, Keras reads what its own callback saved.
    """
    is_other_format = path.endswith((".keras", ".h5", ".hdf5", ".weights.json"))
    if is_other_format or not (saving_api.is_orbax_checkpoint(path) or _is_step(path)):
        return None
    directory, steps = _steps(path)
    is_of_training = any(file_utils.exists(file_utils.join(directory, step, PROGRESS)) for step in steps)
    return (directory, steps) if active_distribution() is not None or is_of_training else None


def _require_step(path: str) -> None:
    """Raises ValueError for a step without a checkpoint in a directory that has others."""
    directory, step = os.path.split(path.rstrip("/"))
    if step.isdecimal() and not file_utils.exists(path) and saving_api.is_orbax_checkpoint(directory):
        saved = ", ".join(restore.steps(directory)) or "none that is complete"
        raise ValueError(f"{directory} contains no checkpoint {step}. It contains {saved}. Check the path.")


def _is_step(path: str) -> bool:
    """Returns whether a path is the checkpoint of one step, which Keras does not recognize in new Orbax formats."""
    names = (file_utils.join(path, name) for name in ("_CHECKPOINT_METADATA", restore.ARRAYS))
    return file_utils.isdir(path) and any(map(file_utils.exists, names))


def _steps(path: str) -> tuple[str, list[str]]:
    """Returns the directory of checkpoints of a path, and their names: that of one step, or all, the newest first."""
    if "://" not in path:
        path = os.path.abspath(path)  # Orbax needs that
    if not any(name.isdigit() and file_utils.isdir(file_utils.join(path, name)) for name in file_utils.listdir(path)):
        directory, step = os.path.split(path.rstrip("/"))
        return directory, [step]
    steps = restore.steps(path)
    if not steps:
        raise ValueError(f"{path} contains no complete checkpoint. Check the path, or save one first.")
    return path, steps

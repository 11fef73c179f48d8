"""Patches that restore Orbax checkpoints completely, or raise an error."""

import keras

from keras_dist._keras.active_distribution import INSTALLED
from keras_dist._keras.internals import file_utils, saving_api, saving_lib
from keras_dist.checkpoint import restore

_REASON, _ISSUE = "nothing, or only a part, of a checkpoint is restored silently", "keras#23251"


def _load_weights(original, distribution, model, filepath, skip_mismatch=False, **kwargs):
    path = str(filepath)
    is_other_format = path.endswith((".keras", ".h5", ".hdf5", ".weights.json"))
    if is_other_format or not (saving_api.is_orbax_checkpoint(path) or _is_step(path)):
        return original(model, filepath, skip_mismatch=skip_mismatch, **kwargs)
    if kwargs:
        raise ValueError(
            f"load_weights takes no {', '.join(map(repr, kwargs))} for an Orbax checkpoint: {path}. Leave it out."
        )
    return restore.restore(model, _step(path), skip_mismatch)


for _owner in (saving_api, keras.saving):
    INSTALLED.patch(_owner, "load_weights", reason=_REASON, issue=_ISSUE)(_load_weights)


@INSTALLED.patch(saving_api, "_load_model_from_orbax_checkpoint", reason=_REASON, issue=_ISSUE)
def _load_model(original, distribution, filepath, custom_objects=None, compile=True, safe_mode=True):
    path, ocp = _step(str(filepath)), restore.orbax()
    parts = set(ocp.checkpointables_metadata(path).metadata)
    if "model_config" not in parts:
        raise ValueError(
            f"Cannot load a model from {path}: it contains {', '.join(sorted(parts))}, but no model_config. Create the "
            f"model, and call model.load_weights({path!r})."
        )
    loaded = ocp.load_checkpointables(path, dict.fromkeys(parts & {"model_config", "assets"}))
    model = saving_lib._model_from_config(
        loaded["model_config"]["config"], custom_objects=custom_objects, compile=compile, safe_mode=safe_mode
    )
    restore.restore(model, path)
    saving_lib._load_assets_from_dict(model, loaded.get("assets"))
    return model


def _is_step(path: str) -> bool:
    """Returns whether a path is the checkpoint of one step, which Keras does not recognize in new Orbax formats."""
    return file_utils.isdir(path) and file_utils.exists(file_utils.join(path, "_CHECKPOINT_METADATA"))


def _step(path: str) -> str:
    """Returns the checkpoint of one step: the path itself, or the newest in a directory of steps."""
    if not any(name.isdigit() and file_utils.isdir(file_utils.join(path, name)) for name in file_utils.listdir(path)):
        return path
    newest = restore.newest(path)
    if newest is None:
        raise ValueError(f"{path} contains no complete checkpoint. Check the path, or save one first.")
    return newest

"""What stands in the place of Keras's own loading of Orbax's checkpoints while a distribution of ours is installed."""

import keras

from keras_dist._keras.internals import saving_api, saving_lib
from keras_dist._keras.patch_registry import keras_own, ours_here, replaces
from keras_dist.checkpoint import restore

_PARTIAL = "checkpoints of which nothing or a part is restored, in silence (keras#23251)"


def _load_weights(model, filepath, skip_mismatch=False, **kwargs):
    path = str(filepath)
    ours = ours_here() is not None and not path.endswith((".keras", ".h5", ".hdf5", ".weights.json"))
    if not ours or not (saving_api.is_orbax_checkpoint(path) or _is_step(path)):
        return keras_own(saving_api, "load_weights")(model, filepath, skip_mismatch=skip_mismatch, **kwargs)
    if kwargs:
        raise ValueError(f"Weights of a checkpoint of Orbax are loaded as a whole. Received: {kwargs}. Leave it out.")
    return restore.restore(model, _step(path), skip_mismatch)


for _owner in (saving_api, keras.saving):
    replaces(_owner, "load_weights", ("model", "filepath", "skip_mismatch", "kwargs"), _PARTIAL)(_load_weights)


@replaces(
    saving_api,
    "_load_model_from_orbax_checkpoint",
    ("filepath", "custom_objects", "compile", "safe_mode"),
    _PARTIAL,
)
def _load_model(filepath, custom_objects=None, compile=True, safe_mode=True):
    if ours_here() is None:
        original = keras_own(saving_api, "_load_model_from_orbax_checkpoint")
        return original(filepath, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode)
    path, ocp = _step(str(filepath)), restore.orbax()
    parts = set(ocp.checkpointables_metadata(path).metadata)
    if "model_config" not in parts:
        raise ValueError(
            f"A model is loaded from a checkpoint that holds its configuration. Received: {path}, which holds "
            f"{', '.join(sorted(parts))}. Make the model, and call model.load_weights({path!r})."
        )
    loaded = ocp.load_checkpointables(path, dict.fromkeys(parts & {"model_config", "assets"}))
    model = saving_lib._model_from_config(
        loaded["model_config"]["config"], custom_objects=custom_objects, compile=compile, safe_mode=safe_mode
    )
    restore.restore(model, path)
    saving_lib._load_assets_from_dict(model, loaded.get("assets"))
    return model


def _is_step(path: str) -> bool:
    """Whether a path is the checkpoint of one step, which Keras does not see in those of today's Orbax."""
    files = saving_api.file_utils
    return files.isdir(path) and files.exists(files.join(path, "_CHECKPOINT_METADATA"))


def _step(path: str) -> str:
    """Returns the checkpoint of one step: the path itself, or the newest in a directory of steps."""
    files = saving_api.file_utils
    if not any(name.isdigit() and files.isdir(files.join(path, name)) for name in files.listdir(path)):
        return path
    newest = restore.newest(path)
    if newest is None:
        raise ValueError(f"A directory of checkpoints must hold a complete one. Received: {path}, which holds none.")
    return newest

"""What `load_model` creates a model from: its config and its assets, such as the vocabulary of a tokenizer."""

import base64
import json
import os
import warnings

import jax
import keras
import numpy as np

from keras_dist._keras import internals
from keras_dist.checkpoint import restore

# Plain Keras would read a `model_config`, create a model whose weights have other paths, and restore none of them.
FILE = "model.json"


def describe(model: keras.Model) -> str | None:
    """Returns the description of a model as JSON; None if it cannot be serialized, which training does not need."""
    try:
        with warnings.catch_warnings(action="ignore"):  # such as that lambdas are unsafe
            config, assets = internals.config_and_files(model)
    except Exception:  # of a layer's `get_config`, which may raise any
        return None
    return json.dumps({"config": config, "assets": jax.tree.map(lambda file: base64.b64encode(file).decode(), assets)})


def read(checkpoint: str, folder: str) -> tuple[str, dict | None] | None:
    """Returns the config and the assets in a checkpoint: those in a file in a folder of it, or those of Keras."""
    file = restore.etils_path(os.path.join(checkpoint, folder, FILE))
    if file.exists():
        try:
            content = json.loads(file.read_text())
        except ValueError:  # it is damaged
            return None
        return content["config"], jax.tree.map(_file_content, content["assets"])
    ocp = restore.orbax()
    parts = set(ocp.checkpointables_metadata(checkpoint).metadata)
    if "model_config" not in parts:
        return None
    loaded = ocp.load_checkpointables(checkpoint, dict.fromkeys(parts & {"model_config", "assets"}))
    return loaded["model_config"]["config"], loaded.get("assets")


def _file_content(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8)

"""A program that exports a model, as several processes."""

import errno
import os

import keras_hub

import keras_dist as kd
from keras_dist.interchange import output_files


def write(like: str, out: str) -> dict:
    """Returns the files that this process wrote, and the error of an export for which one process has no space."""
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        model = keras_hub.models.Backbone.from_preset(like)
    created, writer = [], output_files.FileWriter.__init__

    def create(self, folder, file):
        created.append(file.name)
        writer(self, folder, file)

    output_files.FileWriter.__init__ = create
    kd.export_safetensors(model, out, like)
    written = list(created)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    model.weights[0].assign(model.weights[0] + 1e6)
    try:
        kd.export_safetensors(model, f"{out}_rounded", like, dtype="float16")
    except ValueError as error:
        rounded = str(error)

    if kd.process_id() == 1:
        output_files.os.posix_fallocate = refuse
    try:
        kd.export_safetensors(model, f"{out}_full", like)
    except OSError as error:
        return {"created": written, "error": str(error), "left": os.path.exists(f"{out}_full"), "rounded": rounded}
    return {}

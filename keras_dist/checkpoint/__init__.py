"""Saving and restoring training.

* `training_checkpoint.py`: `TrainingCheckpoint`, the callback.
* `checkpoint_files.py`: the checkpoints of a `fit` in a directory.
* `model_description.py`: the config and the files of a model in a checkpoint, for `load_model`.
* `preemption.py`: signals that announce the end of the program.
* `directory.py`: whether a directory can be written, is large enough, and is free.
* `restore.py`: restores the variables of a model from the newest undamaged checkpoint.
* `checksums.py`: checksums of files, to find damaged checkpoints.
* `path_matching.py`: which entry of a checkpoint belongs to which variable.
* `atomic_write.py`: files are written completely or not at all.
"""

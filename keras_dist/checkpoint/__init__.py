"""Saving and restoring training.

* `training_checkpoint.py`: `TrainingCheckpoint`, the callback.
* `restore.py`: the variables of a model in a checkpoint.
* `path_matching.py`: which entry of a checkpoint belongs to which variable.
* `atomic_write.py`: a file is written whole, or not at all.
"""

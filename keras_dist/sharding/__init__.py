"""Places values on the mesh inside of a step.

* `sequences.py`: sequences, sharded in a step or gathered where they cannot be split.
* `activations.py`: inputs and outputs of layers.
* `resharding.py`: the layouts of weights that are stored, computed with and updated, and moves from one to the other.
* `lookups.py`: rows of embedding tables.
* `per_device.py`: runs a function of shards on each device, with its gradient.
* `shard_dim.py`: which dim of a tensor to shard, if any dim would do.
"""

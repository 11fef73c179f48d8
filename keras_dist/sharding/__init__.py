"""Places values on the mesh inside of a step.

* `sequences.py`: sequences, sharded in a step or gathered where they cannot be split.
* `activations.py`: inputs and outputs of layers.
* `weight_layouts.py`: the layouts of a weight: stored, computed with, and updated in.
* `resharding.py`: weights in the layout that layers compute with, and their gradients.
* `lookups.py`: rows of embedding tables.
* `per_device.py`: runs a function of shards on each device, with its gradient.
* `shard_dim.py`: which dim of a tensor to shard, if any dim would do.
"""

"""Distributions: where variables, gradients, optimizer state, batches and activations are placed.

* `base.py`: `Distribution`, the base of all.
* `current.py`: the distribution that is installed.
* `data_parallel.py`: `DataParallel`, with ZeRO-1.
* `model_parallel.py`: `ModelParallel`, sharded by the rules of a layout map.
* `fsdp.py`: `FullyShardedDataParallel`, with HSDP.
* `shard_dim.py`: which dim of a tensor to shard.
* `resharding.py`: weights where layers compute with them, and their gradients.
* `activations.py`: the inputs and outputs of layers.
* `tensor_parallel.py`: rules for tensor and sequence parallelism, derived from what a model computes.
* `jaxpr_dims.py`: which dims of a traced program are sharded together.
* `dim_graph.py`: those dims as nodes, and what each communicates.
"""

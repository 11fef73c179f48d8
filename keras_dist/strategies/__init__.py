"""Distributions: where variables, gradients, optimizer state, batches and activations are placed.

* `base.py`: `Distribution`, the base of all.
* `current.py`: the distribution that is installed.
* `data_parallel.py`: `DataParallel`, with ZeRO-1.
* `model_parallel.py`: `ModelParallel`, sharded by the rules of a layout map.
* `fsdp.py`: `FullyShardedDataParallel`, with HSDP.
* `derived/`: rules for tensor and sequence parallelism, derived from what a model computes.
"""

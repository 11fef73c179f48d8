"""Rules for tensor and sequence parallelism, derived from what a model computes.

* `tensor_parallel.py`: `tensor_parallel_layout_map`, which chooses what to shard and writes the rules.
* `expert_weights.py`: what to shard of mixtures of experts.
* `merged_rules.py`: one rule for weights that are alike.
* `model_trace.py`: the traced program of a model, without values.
* `input_shapes.py`: the shapes to trace it with, of a batch or tried in turn.
"""

"""Tensor layouts: which dim of a tensor is sharded over which mesh axis, and rules that map variable paths to layouts.

* `tensor_layout.py`: `TensorLayout`, the layout of one tensor, and the check that a layout fits a shape.
* `layout_map.py`: `LayoutMap`, a mapping from regexes over variable paths to layouts.
* `rule_matching.py`: which patterns match a path.
* `derived_weights.py`: layouts of LoRA factors and quantization scales, derived from the layout of their weight.
"""

"""Which dim of a tensor is sharded over which mesh axis, and the rules that say so for variable paths.

* `tensor_layout.py`: `TensorLayout`, the axes of one tensor.
* `layout_map.py`: `LayoutMap`, rules from regexes over variable paths to layouts.
* `rule_matching.py`: what a rule need not spell, and which rule wins.
* `regex_index.py`: finds the regexes that match a path, among many.
* `derived_weights.py`: variables whose layout follows that of another one (LoRA, quantization).
"""

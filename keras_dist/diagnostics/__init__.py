"""Which rule shards which variable, likely mistakes in layout maps, and pictures of sharded tensors.

* `explain.py`: `explain`, which determines the layout of each variable, and why.
* `coverage.py`: `Coverage`, the report that `explain` returns.
* `findings.py`: likely mistakes, each with its fix.
* `experts.py`: the weights of experts in a mixture, and their router, by their shapes.
* `suggestions.py`: the rules that a fix suggests.
* `layout_warning.py`: `LayoutMapWarning`, given before the first step.
* `visualize.py`: `visualize`, a picture of which device holds which shard of a tensor.
"""

"""Which rule shards which variable, likely mistakes, and pictures.

* `explain.py`: `explain`.
* `coverage.py`: `Coverage`, what `explain` returns. `coverage_report.py`: how it prints.
* `findings.py`: likely mistakes in a layout map.
* `suggestions.py`, `nearest.py`: rules that would do what was meant.
* `layout_warning.py`: the warning before the first step.
* `visualize.py`: `visualize`, which device holds which shard of a tensor.
"""

"""The hardware that targets can name.

* `registry.py`: `hardware`, which has them by name, with figures and sources from `gpus.toml` and `tpus.toml`.
* `figures.py`: memory, compute and bandwidths of one chip.
* `interconnect.py`: the links between chips, and the time of collectives on them.
* `compiler_options.py`: options of XLA; `compiler_options.toml`: those that others recommend.
"""

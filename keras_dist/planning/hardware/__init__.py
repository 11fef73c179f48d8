"""The hardware that targets can name.

* `registry.py`: `hardware`, which has them by name.
* `figures.py`: memory, compute and bandwidths of one chip; `known.py`: those of known chips, from `gpus.toml` and
  `tpus.toml`, with sources.
* `interconnect.py`: the links between chips, and the time of collectives on them.
* `compiler_options.py`: options of XLA that others recommend.
"""

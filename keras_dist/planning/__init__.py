"""Planning: compiles the real step for hardware that need not be attached, and reports what it needs.

* `plan.py`: `plan`, which puts the parts below together.
* `notes.py`: what a plan notes beside its figures.
* `fitting_options.py`: step options that make a step fit, and `remat="auto"`.
* `generated_rows.py`: how many rows `generate()` has memory for.
* `search/`: `auto`, which chooses among distributions.
* `reports/`: `Plan` and `compare`, as data and as printed reports.
* `compiling/`: the step of a model, traced and compiled for a target.
* `costs/`: how long a step takes: a lower bound and a forecast.
* `targets/`: `target("v5e:4x4")`, devices to compile for.
* `hardware/`: memory, compute and links of chips.
* `hlo/`: reads compiled modules.
* `frozen_mapping.py`: a mapping that does not change, of values in reports.
"""

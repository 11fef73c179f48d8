"""Planning: compiles the real step for hardware that need not be attached, and reports what it needs.

* `plan.py`: `plan`, which puts the parts below together.
* `report.py`: `Plan`, as data and as a printed report. `compare.py`: several plans in one table.
* `target_names.py`, `compile_target.py`: `target("v5e:4x4")`, devices to compile for.
* `hardware.py`: memory, compute and bandwidths of chips, with their sources.
* `abstract_step.py`: the step of a model, with shapes in place of arrays.
* `target_platform.py`: what the model is told about its platform while it is traced.
* `compilation.py`: what the compiled step holds, computes and sends.
* `hlo/`: reads compiled modules.
* `model_flops.py`: the FLOP that a model requires.
* `roofline.py`, `interconnect.py`: a lower bound on step time.
"""

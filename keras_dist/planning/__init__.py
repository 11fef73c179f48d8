"""Planning: compiles the real step for hardware that need not be attached, and reports what it needs.

* `plan.py`: `plan`, which puts the parts below together.
* `report.py`: `Plan`, as data and as a printed report; `plan_figure.py`: its figure. `compare.py`: several plans in one
  table.
* `fitting_options.py`: step options that make a step fit, and `remat="auto"`.
* `auto.py`: `auto`, which chooses among distributions; `choosing.py` does it for one batch on some devices, and
  `choice.py` is the result. `places.py`: devices; `candidates.py`: meshes and strategies; `search_space.py`: those
  for a model; `closed_forms.py`: what is known of them before compilation; `estimates.py`: what is expected;
  `search.py`: which to compile; `compilation_cache.py`: what compilations found, on disk.
* `target_names.py`, `cloud_machines.py`, `compile_target.py`: `target("v5e:4x4")`, devices to compile for.
* `hardware.py`: the hardware that targets can name; `hardware_figures.py`: memory, compute and bandwidths of one chip;
  `known_tpus.py`, `known_gpus.py`: these figures with their sources; `compiler_options.py`: options of XLA that others
  recommend.
* `abstract_step.py`: the step of a model, with shapes in place of arrays; `lowering.py`: what a compiler gets of it.
* `target_platform.py`: what code that is traced learns about its platform.
* `compilation.py`: what the compiled step holds, computes and sends; `extrapolation.py`: that of a deeper model.
* `hlo/`: reads compiled modules.
* `model_flops.py`: the FLOP that a model requires.
* `roofline.py`, `compute_time.py`, `interconnect.py`: a lower bound on step time.
* `forecast.py`: the probable time of a step; `forecast_section.py` prints it.
"""

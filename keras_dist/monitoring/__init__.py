"""Monitoring: how fast training is while it runs, and whether a machine is set up for it.

* `step_monitor.py`: `StepMonitor`, the callback. `run.py`: one `fit` as it is measured.
* `observed_step.py`: when the host hands a step to the devices, and for which steps it compiles.
* `step_times.py`: how long steps take; `batches.py`: rows and tokens; `utilization.py`: FLOP and MFU.
* `summary.py`: the figures as logs and as a line.
* `plan_comparison.py`: the figures against a plan.
* `process_lines.py`: the figures of several processes; `profile.py`: a trace of some steps.
* `doctor.py`: what is wrong with how a machine is set up, from `system_facts.py`.
"""

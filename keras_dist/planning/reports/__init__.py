"""Reports of plans.

* `plan_report.py`: `Plan`, as data and as a printed report.
* `step_memory.py`: its parts about the memory of a device.
* `step_time.py`: its parts about the time of a step, and its figure.
* `compare.py`: several plans in one table.
* `state_estimate.py`: weights, gradients and optimizer state, and how many devices hold them.
"""

"""Devices to compile for, attached or not.

* `target.py`: `target("v5e:4x4")`.
* `target_names.py`, `cloud_machines.py`: the names that it takes.
* `target_platform.py`: what code that is traced learns about its platform.
"""

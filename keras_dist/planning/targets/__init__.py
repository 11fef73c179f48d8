"""Devices to compile for, attached or not.

* `target.py`: `target("v5e:4x4")`.
* `target_names.py`: the names that it takes; `machines.toml`: those of machines of clouds and notebook services.
* `target_platform.py`: what code that is traced learns about its platform.
"""

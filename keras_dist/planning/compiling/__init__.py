"""Compiles the step of a model for a target, and reads what the compiled step needs.

* `abstract_step.py`: the step of a model, with shapes in place of arrays.
* `compilation.py`: what the compiled step holds, computes and sends.
* `compilation_cache.py`: the same on disk, from earlier compilations.
* `extrapolation.py`: the same of a deeper model.
"""

"""Passes: rewritings of the program of a step.

* `xla_workarounds.py`: operations in a form that XLA can compile.
"""

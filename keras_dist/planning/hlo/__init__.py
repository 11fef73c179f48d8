"""Compiled modules: what they compute, move, and send.

* `parser.py`: the text of a module as data.
* `replica_groups.py`: which devices take part in a collective, and along which mesh axes.
* `megascale.py`: transfers between slices of TPUs.
* `trip_counts.py`: how often loops run.
* `instruction_costs.py`: FLOP and bytes of one instruction.
* `module_costs.py`: what a whole module does.
"""

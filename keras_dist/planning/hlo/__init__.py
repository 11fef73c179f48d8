"""Costs of compiled XLA modules: FLOP, memory traffic and collectives, from their text.

* `shapes.py`: shapes of values, with layouts and memory spaces.
* `parser.py`: computations, instructions and attributes.
* `replica_groups.py`: groups of devices that communicate, and the mesh axes that they follow.
* `megascale.py`: transfers between TPU slices.
* `collectives.py`: kind, payload, bytes sent and groups of a collective.
* `trip_counts.py`: trip counts of while loops.
* `instruction_costs.py`: FLOP and memory traffic of one instruction; `kernel_costs.py`: those of kernels of attention.
* `module_costs.py`: costs of a module.
* `op_names.py`: the layers that instructions come from.
"""

"""What a traced program says: its operations, its dims, and where its values come from.

* `primitives.py`: the names of operations, by what they do.
* `jaxpr_evaluation.py`: evaluates programs, in whole, in parts, or with other operations in them.
* `traced_values.py`: which operations made the values of a function, while JAX traces it; which of them are weights.
* `kept_dims.py`: which dims of an operand an operation keeps.
* `linearity.py`: which operations are linear in their operands.
* `dim_axes.py`: over which axes of the mesh a dim of a value is sharded.
* `jaxpr_dims.py`: which dims of a program are sharded together; start reading here, with its worked example.
* `dim_graph.py`: those dims as nodes of a graph, and the bytes that each communicates.
"""

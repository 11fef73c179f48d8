"""Every private name of Keras that this package uses, and which distribution is active.

* `internals.py`: small functions around Keras's private names.
* `patch_registry.py`: how functions of Keras are replaced, and which distribution is active.
* `training_state.py`: the state of a model that runs: from its variables into steps, and back.
* `deferred_variables.py`: variables without values.
"""

"""Private names of Keras, how its functions are patched, and which distribution is active.

* `internals.py`: small functions around Keras's private names.
* `model_structure.py`: the layers of a model, their weights, the graphs of functional models, and why a model is not
  compiled.
* `data_adapters.py`: those of data adapters.
* `global_state.py`: automatic names, and the seeds and generators of random numbers.
* `patch_registry.py`: declares, installs and removes patches of Keras's functions.
* `active_distribution.py`: which distribution is active in which thread, and which one chose a variable's layout.
* `running_fit.py`: what is done at the end of `fit`.
* `train_step.py`: the parts of Keras's train step.
* `training_state.py`: moves the state of a running model between its variables and the steps.
* `compiled_functions.py`: the compiled functions of a model, kept for each distribution that it moves between.
* `thread_value.py`: values that each thread has for itself.
* `quantized_weights.py`: the float weights that variables of quantized layers were computed from.
* `deferred_variables.py`: variables without values.
* `tracing_errors.py`: what went wrong while a model was traced.
"""

"""How steps are computed: in parts, with less memory, and on which rows.

* `options.py`: `StepOptions`.
* `model_steps.py`: the steps of a model as its distribution computes them, for Keras to compile.
* `traced_step.py`: a step traced to a program, and computed on rows that are split over all devices.
* `train_steps.py`: how train steps are computed; start reading here.
* `step_gradients.py`: the gradients of a step before they are reduced.
* `microbatches.py`: those of parts of a batch; `gradient_accumulation.py`: those of several batches.
* `unreduced_gradients.py`: gradients that devices add up later, with a worked example.
* `rematerialization.py`: what the backward pass computes again; `repeated_blocks.py`: which blocks a model has.
* `activation_offload.py`, `host_offload.py`: activations and optimizer state in host memory.
* `step_order.py`: what a step computes first, to hold less.
* `optimizer_state.py`: which state of an optimizer may have less precision.
"""

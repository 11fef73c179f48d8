"""How steps are computed: in parts, with less memory, and on which rows.

* `options.py`: `StepOptions`.
* `step_state.py`: what is alive while a step is traced.
* `steps.py`: a step traced to a program, and computed on rows that are split over all devices; start reading here.
* `effect_checks.py`: errors of options and axes that have no effect on a step.
* `looped_steps.py`: several steps in a compiled loop.
* `layer_calls.py`: the weights that layers read, and which layers are computed again.
* `train_steps.py`: how gradients are computed and weights updated, and which optimizer state has less precision.
* `step_gradients.py`: the gradients of a step before they are reduced.
* `microbatches.py`: those of parts of a batch, whose losses are in `loss_parts.py`.
* `gradient_accumulation.py`: those of several batches.
* `unreduced_gradients.py`: gradients that devices add up later, with a worked example.
* `rematerialization.py`: what the backward pass computes again; `repeated_blocks.py`: which blocks a model has.
* `host_offload.py`: activations and optimizer state in host memory.
* `step_order.py`: what a step computes first, to hold less.
"""

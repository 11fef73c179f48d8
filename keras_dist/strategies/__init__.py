"""Distributions: where variables, gradients, optimizer state, batches and activations are placed.

* `base.py`: `Distribution`, the base of all.
* `current.py`: the distribution that is installed.
* `data_parallel.py`: `DataParallel`, with ZeRO-1.
* `model_parallel.py`: `ModelParallel`, sharded by the rules of a layout map.
* `fsdp.py`: `FullyShardedDataParallel`, with HSDP.
* `shard_dim.py`: which dim of a tensor to shard, if any dim would do.
* `resharding.py`: weights in the layout that layers compute with, and their gradients.
* `lookups.py`: rows of embedding tables.
* `activations.py`: inputs and outputs of layers.
* `rows.py`: the rows of a batch, split over all devices in a step.
* `xla_workarounds.py`: operations of a step in a form that XLA can compile.
* `sequences.py`: sequences, sharded in a step or gathered where they cannot be split.
* `convolution.py`: convolutions, each device computing its rows where XLA would be wrong.
* `tensor_parallel.py`: rules for tensor and sequence parallelism, derived from what a model computes.
* `model_trace.py`: the traced program of a model, without values.
* `input_shapes.py`: the shapes to trace it with, of a batch or tried in turn.
* `jaxpr_dims.py`: which dims of a traced program are sharded together; start reading here, with its worked example.
* `dim_graph.py`: those dims as nodes of a graph, and the bytes that each communicates.
* `traced_values.py`: which operations made the values of a function, while JAX traces it.
* `attention_mask.py`: which keys each query of attention sees.
* `mask_recognition.py`: the same, recognized from the operations that made a mask; start reading here, with its worked
  example.
* `mask_reader.py`: which elements of other values a mask reads, and which are positions.
* `step_options.py`: `StepOptions`; `train_steps.py`: how train steps are computed with them.
* `step_gradients.py`: the gradients of a step before they are reduced; `microbatches.py`: those of parts of a batch;
  `unreduced_gradients.py`: gradients that devices add up later, with a worked example.
* `rematerialization.py`: what the backward pass computes again; `activation_offload.py` and `host_offload.py`:
  activations and optimizer state in host memory; `step_order.py`: what a step computes first, to hold less.
* `dim_axes.py`: over which mesh axes a dim of a traced value is sharded.
"""

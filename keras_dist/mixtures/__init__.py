"""Mixtures of experts: found in traced programs, and computed for the experts that tokens choose.

* `experts.py`: `keras_dist.experts`, a mixture for authors of layers.
* `choices.py`: which values are known to be zero for experts that a token has not chosen; start reading here.
* `recognition.py`: finds sums over experts of such values, and what leads to them.
* `partial_sums.py`: which products may be partial sums until the sum over experts, if their weights are sharded.
* `gates.py`: which products with weights are multiplied by gates, so that no backward pass keeps them.
* `shards.py`: which shards of weights a device computes with, and what becomes of their sums.
* `computation.py`: computes mixtures on a device: for all experts, for its own, or by an exchange of rows.
* `rows.py`: evaluates their equations for the chosen pairs of a token and an expert.
* `routing.py`: puts these pairs into rows, sorted by expert, and adds up the rows of each token.
* `rounds.py`: sums over rounds, for devices whose number of rows depends on the routing.
* `exchange.py`: sends rows to the devices that have their experts, and results back.
* `figures.py`: figures that a step logs, such as the load of experts.
* `grouped_products.py`: multiplies rows with the weights of their experts, and chooses the form that suits a device.
* `kernels.py`: forms that are kernels, megablox on TPUs and Mosaic on Hopper GPUs.
* `blocks.py`: a form in plain XLA, a loop over blocks of rows.
* `batched.py`: another one, for GPUs and TPUs, with one batched product of all experts.
"""

"""Mixtures of experts: matrix products of rows, sorted by expert, with the weights of their experts.

* `grouped_products.py`: the product with its derivatives, and which form of it suits a device; start reading here.
* `kernels.py`: the forms that are kernels, megablox on TPUs and Mosaic on Hopper GPUs.
* `blocks.py`: a form in plain XLA, a loop over blocks of rows.
* `batched.py`: another one, for GPUs and TPUs, with one batched product of all experts.
"""

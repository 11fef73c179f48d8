"""Mixtures of experts: found in traced programs, and computed for the experts that tokens choose.

* `choices.py`: which values are known to be zero for experts that a token has not chosen; start reading here.
* `recognition.py`: finds sums over experts of such values, and what leads to them.
* `rows.py`: computes them for chosen pairs of a token and an expert.
* `routing.py`: puts these pairs into rows, sorted by expert, and adds up the rows of each token.
* `grouped_products.py`: multiplies rows with the weights of their experts, and chooses the form that suits a device.
* `kernels.py`: the forms that are kernels, megablox on TPUs and Mosaic on Hopper GPUs.
* `blocks.py`: the form in plain XLA.
"""

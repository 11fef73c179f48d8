"""Passes: rewritings of the program of a step.

* `rewriting.py`: how a pass changes a program; start reading here.
* `step_program.py`: the program, and which axes of the mesh shard the dims of its values.
* `registry.py`: the passes, in order.
* `windows.py`: convolutions, and gradients of maxima over windows.
* `scatters.py`: sums and assignments by index, such as the gradients of lookups.
* `decoding_loops.py`: loops that generate tokens.
* `fourier.py`: Fourier transforms.
* `gates.py`: gradients of products of two activations.
* `activations.py`: values inside of activation functions, which the backward pass computes again.
* `experts.py`: mixtures of experts, in programs before they are differentiated.
* `sparse_mixture.py`: what one of them becomes.
* `weight_reads.py`: what is between its weights, as they are stored, and the products that read them.
* `chunked_loss.py`: losses of a large dim such as logits, computed for some tokens at a time.
* `token_part.py`: where such a loss begins and ends; `token_chunks.py`: what it computes for some tokens.
* `flattened_tokens.py`: the tokens of mixtures, where batch and positions are sharded and flattened.
"""

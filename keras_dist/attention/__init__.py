"""Attention: which kernel computes it, on which shards, and what devices exchange for it.

* `attention.py`: `keras.ops.dot_product_attention` under a distribution; start reading here.
* `kernels.py`: the kernels, and when each can be used; `splash_blocks.py`: the tables that splash attention reads.
* `mask.py`: which keys each query sees.
* `mask_recognition.py`: the same, recognized from the operations that made a mask, with a worked example.
* `mask_reader.py`: which elements of other values a mask reads, and which are positions.
* `sharded.py`: a call on the shards of each device.
* `exchange.py`: what devices exchange that share sequences.
"""

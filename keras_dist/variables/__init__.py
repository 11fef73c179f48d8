"""Values of variables: initialized, resharded, gathered and loaded.

* `variable_layouts.py`: the layouts that the variables of a model have, and should have; `redistribute` moves them.
* `inference_layout.py`: a second layout of a model, for a block of code.
* `host_to_device.py`: places host values on devices, shard by shard.
* `layout_change.py`: changes the layout of an array on the devices that hold it.
* `piece_exchange.py`: does so for layouts that no chain of collectives connects.
* `gather.py`: gathers a global array to the host, in pieces.
* `lazy_tensor.py`: arrays in files that are read shard by shard; `lazy_hdf5.py`: those in HDF5 files.
* `safetensors_files.py`: tensors of checkpoints of Hugging Face as views of their files.
* `global_reads.py`: variables whose shards are on several processes: read by all together, or by process 0 for all.
* `deferred.py`: `deferred` and `materialize`, for models without values, and `built`, which accepts their builders.
"""

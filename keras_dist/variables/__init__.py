"""Values of variables: initialized, resharded, gathered and loaded.

* `variable_layouts.py`: the layouts that the variables of a model have, and should have.
* `redistribute.py`: `redistribute`, which moves a built model.
* `host_to_device.py`: places host values on devices, shard by shard.
* `gather.py`: gathers a global array to the host, in pieces.
* `lazy_hdf5.py`: tensors in HDF5 files that are read shard by shard.
* `process_zero.py`: work that process 0 does for all.
* `global_reads.py`: reading variables whose shards are on several processes.
* `model_or_builder.py`: accepts a built model, or a function that builds one.
* `deferred.py`: `deferred` and `materialize`, for models without values.
"""

"""Values of variables: initialized, resharded, gathered and loaded.

* `variable_layouts.py`: the layouts that the variables of a model have, and should have.
* `redistribute.py`: `redistribute`, which moves a built model.
* `host_to_device.py`: places host values on devices, shard by shard.
* `gather.py`: gathers a global array to the host, in pieces.
* `lazy_hdf5.py`: tensors in HDF5 files that are read shard by shard.
* `global_reads.py`: variables whose shards are on several processes: read by all together, or by process 0 for all.
* `model_or_builder.py`: accepts a built model, or a function that builds one.
* `deferred.py`: `deferred` and `materialize`, for models without values.
"""

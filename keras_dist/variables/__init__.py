"""Values of variables: initialized, resharded, gathered and loaded.

* `variable_layouts.py`: the layouts that the variables of a model have, and should have; `redistribute` moves them.
* `host_to_device.py`: places host values on devices, shard by shard.
* `gather.py`: gathers a global array to the host, in pieces.
* `lazy_hdf5.py`: tensors in HDF5 files that are read shard by shard.
* `global_reads.py`: variables whose shards are on several processes: read by all together, or by process 0 for all.
* `deferred.py`: `deferred` and `materialize`, for models without values, and `built`, which accepts their builders.
"""

"""Values of variables: created, moved, gathered and loaded.

* `variable_layouts.py`: the layouts that the variables of a model have, and should have.
* `redistribute.py`: `redistribute`, which moves a built model.
* `host_to_device.py`: a host value becomes shards.
* `gather.py`: a global array becomes a host array.
* `lazy_hdf5.py`: a tensor in a file, of which parts are read.
* `process_zero.py`: work that process 0 does for all.
* `global_reads.py`: reading variables whose shards are on several processes.
* `model_or_builder.py`: a model, or a function that builds one, as a model.
* `deferred.py`: `deferred` and `materialize`.
* `fused_threefry.py`: JAX's random bits, compiled into loops that vectorize.
"""

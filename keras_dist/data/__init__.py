"""How host batches become global arrays.

* `batches.py`: how a distribution gets batches onto the mesh: those of `fit` are prepared while earlier steps run.
* `batch_placement.py`: places one batch, of any number of rows, on the mesh.
* `consistency.py`: compares data and models among processes before devices wait for one another.
* `executions.py`: the batches of one execution of several steps, stacked for a compiled loop.
* `position.py`: where training is in its data, so that it can resume there.
* `prefetch.py`: an iterator that runs ahead of its consumer in a thread.
"""

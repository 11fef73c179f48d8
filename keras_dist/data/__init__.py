"""How host batches become global arrays.

* `batch_placement.py`: one batch onto the mesh, any number of rows.
* `consistency.py`: checks that all processes were given data that fit together.
* `input_pipeline.py`: batches on their way from a source to the steps.
* `prefetch.py`: an iterator that a thread runs ahead.
"""

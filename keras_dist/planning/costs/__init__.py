"""How long a step takes.

* `roofline.py`, `compute_time.py`: a lower bound.
* `forecast.py`: the probable time.
* `model_flops.py`: the FLOP that a model requires.
"""

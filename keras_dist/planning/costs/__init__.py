"""How long a step takes.

* `roofline.py`: a lower bound.
* `forecast.py`: the probable time, and that of matrix multiplications at peak rates.
* `model_flops.py`: the FLOP that a model requires.
"""

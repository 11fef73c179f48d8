"""How long a step takes.

* `roofline.py`: a lower bound.
* `forecast.py`: the probable time, and that of the parts of a step on some hardware.
* `schedule.py`: adds up these parts, in the order of the compiled program.
* `model_flops.py`: the FLOP that a model requires.
"""

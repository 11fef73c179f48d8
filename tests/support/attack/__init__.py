"""Random attacks: a model, data, an optimizer, a distribution, step options and calls, compared with one device.

* `models.py`: the models, each a function whose source is part of the script of a draw.
* `functions.py`: the operations that one of the models computes.
* `draws.py`: `draw`, which chooses everything by the seed and the number of a draw.
* `script.py`: `render`, which writes a draw as a program. What is printed is what ran.
* `verdicts.py`: `judge` runs a script in this process, `judge_all` many in a process of their own.
* `__main__.py`: `python -m support.attack`, in the folder `tests`.
"""

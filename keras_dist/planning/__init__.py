"""Foresight: the real step compiled for hardware that need not be attached, and what it costs.

* `plan.py`: `plan`. `report.py`: how a `Plan` prints. `compare.py`: `compare`.
* `abstract_step.py`: the step of a model, with shapes in place of arrays.
* `compilation.py`: what the compiler makes of a step.
* `model_flops.py`: the FLOP that a step asks for.
* `roofline.py`: a lower bound on step time.
* `interconnect.py`: how long collectives occupy links and network.
* `hardware.py`: figures of chips, with their sources.
* `compile_target.py`: devices of hardware that is not attached.
* `hlo/`: reads compiled modules.
"""

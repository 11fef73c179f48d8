"""Foresight: models without values, the real step compiled for hardware that is not attached, and what it costs.

Which file does what; each imports only from those above it:

* `fused_random.py`: JAX's random bits, drawn sooner. `deferred.py`: `deferred`, `materialize`.
* `hardware.py`: figures of chips and their sources. `target.py`: devices of hardware that is not attached.
* `hlo_text.py`: compiled modules as data. `hlo_groups.py`, `hlo_slices.py`, `hlo_loops.py`, `hlo_work.py`: who takes
  part in a collective, also between slices, how often a loop runs, what an instruction computes and moves. `hlo.py`:
  what a whole module does.
* `roofline.py`: how long that takes at least.
* `step.py`: the step of a model, with shapes in place of arrays. `flops.py`: the FLOP that it asks for.
* `compilation.py`: what a compiler makes of a step. `progress.py`: what long work is doing.
* `plan.py`: `plan` and `Plan`. `plan_report.py`: a plan as text, HTML and pictures. `compare.py`: `compare`.
"""

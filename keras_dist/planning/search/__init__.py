"""Chooses a distribution: makes candidates, compiles some of them, and compares.

* `auto.py`: `auto`, the public function; `choosing.py` does it for one batch on some devices.
* `by_strategy.py`: plans of some strategies, without a choice.
* `choice.py`: `Choice`, the result.
* `places.py`: devices to choose for; `candidates.py`: meshes and strategies.
* `search_space.py`: those for a model, and what is known of them before compilation; `expert_rows.py`: of mixtures.
* `search.py`: which to compile next; `estimates.py`: what is expected of those that are not compiled.
"""

"""CPU time of `explain` and of its report, in seconds, for a deferred model of 10,000 variables and 300 rules.

Two cases: all rules match, or none does, so that `explain` searches for the path that each was probably meant for. With
an optimizer the model has 30,000 variables. Building the model is not timed.

Run: python benchmarks/explain.py
"""

import statistics
import time

import keras_dist as kd

kd.simulate_devices(8)

import keras  # noqa: E402

VARIABLES, RULES, TURNS = 10_000, 300, 5
NAMES = ("query", "key", "value", "output", "gate", "up", "down", "router", "norm", "scale")


class Block(keras.layers.Layer):
    """A layer with ten kernels."""

    def build(self, shape=None):
        for name in NAMES:
            self.add_weight(shape=(64, 64), name=f"{name}_kernel")


def build(optimizer: bool) -> keras.Model:
    """Returns a model of 30 stages with about 34 blocks each, 10 variables per block."""
    model = keras.Model(name="model")
    model.stages = []
    with kd.deferred():
        for number in range(VARIABLES // len(NAMES)):
            block = Block(name=f"stage_{number // 34}_block_{number % 34}")
            block.build()
            model.stages.append(block)
        model.built = True
        if optimizer:
            model.compile("adam")
            model.optimizer.build(model.trainable_variables)
    return model


def distribution(matches: bool) -> kd.ModelParallel:
    """Returns a distribution with 300 rules, of which all match or none does."""
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:2,model:4"))
    for number in range(RULES):
        name = NAMES[number % len(NAMES)] if matches else NAMES[number % len(NAMES)][::-1]
        layout_map[f".*stage_{number // len(NAMES)}_block_[0-9]+/{name}_kernel"] = (None, "model")
    return kd.ModelParallel(layout_map=layout_map)


def seconds(model: keras.Model, matches: bool) -> tuple[float, float]:
    """Returns the CPU time of `explain` and of its report, in seconds."""
    chosen = distribution(matches)
    begin = time.process_time()
    coverage = kd.explain(model, chosen)
    found = len(coverage.findings)
    middle = time.process_time()
    assert len(str(coverage)) > 1000
    assert found >= (0 if matches else 100)
    return middle - begin, time.process_time() - middle


def main() -> None:
    """Prints the medians."""
    models = {"10,000 variables": build(optimizer=False), "30,000 with an optimizer": build(optimizer=True)}
    print(f"{RULES} rules, medians of {TURNS} turns, CPU seconds")
    for name, model in models.items():
        for matches in (True, False):
            times = [seconds(model, matches) for _ in range(TURNS)]
            explaining, printing = (statistics.median(column) for column in zip(*times, strict=True))
            case = "all rules match" if matches else "no rule matches"
            print(f"{name:26} {case:16} explain and findings {explaining:5.2f} s, report {printing:5.2f} s")


if __name__ == "__main__":
    main()

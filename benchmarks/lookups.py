"""Time per lookup in a layout map with 200 rules, against `keras.distribution.LayoutMap`.

Two cases: all paths differ (a large model is built once), and each path is looked up 100 times (the outputs of layers,
in every trace). Keras looks up a sample only, because all lookups would take minutes.

Run: python benchmarks/lookups.py
"""

import statistics
import time

import keras_dist as kd

kd.simulate_devices(8)

import keras  # noqa: E402

RULES, LOOKUPS, SAMPLE, TURNS = 200, 100_000, 1_000, 7
NAMES = ("query", "key", "value", "output", "gate", "up", "down", "norm")


def rules() -> list[tuple[str, tuple]]:
    """Returns 200 rules, of which at most one matches a path."""
    return [
        (f".*/stage_{i // len(NAMES)}/block_[0-9]+/.*{NAMES[i % len(NAMES)]}/kernel", (None, "model"))
        if i % 2
        else (f"model/stage_{i // len(NAMES)}/.*/{NAMES[i % len(NAMES)]}/kernel", ("model", None))
        for i in range(RULES)
    ]


def paths(count: int) -> list[str]:
    """Returns `count` different paths. A rule matches most of them."""
    stages = RULES // len(NAMES)
    return [
        f"model/stage_{i % stages}/block_{i // stages}/attention/{NAMES[i % len(NAMES)]}/"
        f"{'kernel' if i % 5 else 'bias'}"
        for i in range(count)
    ]


def seconds_per_lookup(layout_map, requested: list[str]) -> float:
    """Returns the time per lookup, in seconds."""
    begin = time.perf_counter()
    for path in requested:
        layout_map[path]
    return (time.perf_counter() - begin) / len(requested)


def main() -> None:
    """Prints the ratios."""
    mesh = kd.DeviceMesh((2, 4), ["data", "model"])

    def filled(cls, cls_mesh):
        layout_map = cls(cls_mesh)
        for pattern, axes in rules():
            layout_map[pattern] = axes
        return layout_map

    cases = {"all different": paths(LOOKUPS), "each 100 times": paths(LOOKUPS // 100) * 100}
    ratios: dict[str, list[float]] = {case: [] for case in cases}
    ours_times: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(TURNS):
        for case, requested in cases.items():
            ours = seconds_per_lookup(filled(kd.LayoutMap, mesh), requested)
            plain_mesh = keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names, mesh.devices)
            theirs = seconds_per_lookup(filled(keras.distribution.LayoutMap, plain_mesh), requested[:SAMPLE])
            ratios[case].append(theirs / ours)
            ours_times[case].append(ours)
    print(f"{LOOKUPS} lookups in {RULES} rules, {TURNS} turns, medians")
    for case in cases:
        print(
            f"{case:15} ours {statistics.median(ours_times[case]) * 1e6:6.2f} us per lookup, "
            f"{statistics.median(ratios[case]):6.1f} times as fast as Keras"
        )


if __name__ == "__main__":
    main()

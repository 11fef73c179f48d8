"""Ends training with SIGTERM and SIGKILL at random moments, continues it, and compares every loss.

    python benchmarks/preemption.py --count 50
    python benchmarks/preemption.py --count 10 --attached

For each of 12 cases (1 and 2 processes, three data sources, DP and FSDP) one training runs undisturbed. Another one is
ended by SIGTERM or SIGKILL at a random moment, in a random process or in all, and started again, over and over, and
must reach the same losses. Printed are the number of starts that failed, batches that were lost, the largest difference
of a loss, and the time from SIGTERM until the step is saved and the program leaves, also as a ratio to one step and one
save: the longest step since that start, and the longest save of the undisturbed run, which writes its checkpoints in
the foreground. The first step after a start restores a checkpoint and loads compiled programs. With `--attached`, one
process trains on the accelerators of this machine, in place of 1 and 2 with two simulated devices each.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from keras_dist.multihost.launcher import launch

SIMULATED, ATTACHED = [(1, 2), (2, 2)], [(1, None)]  # processes, and the devices that are simulated for each
SOURCES, STRATEGIES = ("arrays", "PyDataset", "generator"), ("DP", "FSDP")
EPOCHS, BATCHES, BATCH = 5, 16, 12
STEP = 0.02  # seconds that a step takes at least
WINDOW = 3.0  # seconds of training in which a signal comes


def train(directory: str, source: str, strategy: str, number: int, who: str, moment: float) -> None:
    """Trains a model, as the program that is launched; sends itself a signal if it is meant."""
    import keras
    import numpy as np

    import keras_dist as kd

    kd.initialize()
    keras.utils.set_random_seed(1)
    kd.set_distribution(kd.DataParallel() if strategy == "DP" else kd.FullyShardedDataParallel(min_shard_bytes=0))
    x = np.sin(np.arange(BATCHES * BATCH * 4, dtype="float32").reshape(-1, 4))
    y = x.sum(1, keepdims=True)

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return BATCHES

        def __getitem__(self, index):
            rows = slice(index * BATCH, (index + 1) * BATCH)
            return x[rows], y[rows]

    def generate():
        for index in itertools.count():
            yield Rows()[index % BATCHES]

    class Steps(keras.callbacks.Callback):
        epoch, longest = 0, 0.0

        def on_train_begin(self, logs=None):
            self.ended = time.perf_counter()  # the step before
            self.timer = threading.Timer(moment, self.send)
            if number and who in (str(kd.process_id()), "all"):
                self.timer.start()

        def on_train_end(self, logs=None):
            self.timer.cancel()

        def send(self):
            Path(directory, f"signal-{kd.process_id()}").write_text(str(time.time()))
            os.kill(os.getpid(), number)

        def end_step(self):
            now = time.perf_counter() - checkpoint.waiting_time
            self.longest, self.ended = max(self.longest, now - self.ended), now

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch
            self.end_step()

        def on_test_batch_begin(self, batch, logs=None):
            self.end_step()

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(STEP)
            self.end_step()
            if kd.process_id() == 0:
                with open(os.path.join(directory, "losses"), "a") as file:
                    file.write(json.dumps([f"{self.epoch} {batch}", float(logs["loss"])]) + "\n")

    class TimedCheckpoint(kd.TrainingCheckpoint):
        longest = 0.0

        def _save(self, *arguments):
            before = self.waiting_time
            super()._save(*arguments)
            self.longest = max(self.longest, self.waiting_time - before)

    layers = [keras.layers.Dense(256, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    data = {
        "arrays": {"x": x, "y": y, "batch_size": BATCH},
        "PyDataset": {"x": Rows(workers=2)},
        "generator": {"x": generate(), "steps_per_epoch": BATCHES, "shuffle": False},
    }[source]
    # Without signals, checkpoints are not written in the background, which tells how long one takes.
    steps = Steps()
    checkpoint = TimedCheckpoint(os.path.join(directory, "checkpoints"), save_freq=7, save_on_background=number != 0)
    try:
        model.fit(**data, epochs=EPOCHS, callbacks=[steps, checkpoint], verbose=0, validation_data=(x, y))
    except SystemExit:
        Path(directory, f"stopped-{kd.process_id()}").write_text(json.dumps([time.time(), steps.longest]))
        raise
    Path(directory, "done").write_text(str(checkpoint.longest))


def run(
    directory: Path,
    processes: int,
    devices: int | None,
    source: str,
    strategy: str,
    number: int = 0,
    who: str = "",
    moment: float = 0.0,
):
    """Starts the program, and returns its output of errors if it did not end as it had to."""
    lines: list[str] = []
    call = [sys.executable, __file__, "train", str(directory), source, strategy, str(int(number)), who, str(moment)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled")}
    outcome = launch(
        call,
        processes,
        devices_per_process=devices,
        show=lambda rank, stream, line: lines.append(line),
        environment=os.environ | cache | {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"},
        grace=2,
    )
    is_expected = outcome.status == 0 or number == signal.SIGKILL
    return None if is_expected else "\n".join([str(outcome), *lines])


def losses_in(directory: Path) -> list[tuple[str, float]]:
    file = directory / "losses"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


class Results:
    """What happened in all runs."""

    def __init__(self):
        self.sent = {signal.SIGTERM: 0, signal.SIGKILL: 0}
        self.failures: list[str] = []
        self.missing, self.difference = 0, 0.0
        self.waits: list[tuple[float, float]] = []  # seconds from SIGTERM to leaving, and those of a step and a save

    def end_at_random(self, directory: Path, case: tuple, count: int, longest_save: float) -> None:
        """Trains until the end, with interruptions."""
        while not (directory / "done").exists() and not self.failures:
            number = random.choice([number for number in self.sent if self.sent[number] < count] or [0])
            who = random.choice([*map(str, range(case[0])), "all"])
            for file in [*directory.glob("signal-*"), *directory.glob("stopped-*")]:
                file.unlink()
            failure = run(directory, *case, number, who, random.uniform(0, WINDOW))
            self.failures += filter(None, [failure])
            signals = [float(file.read_text()) for file in directory.glob("signal-*")]
            if not signals:
                continue
            self.sent[number] += 1
            stopped = [json.loads(file.read_text()) for file in directory.glob("stopped-*")]
            if stopped:
                left, longest_step = map(max, zip(*stopped, strict=True))
                self.waits.append((left - min(signals), longest_step + longest_save))
            print(*case, signal.Signals(number).name, who, len(losses_in(directory)), flush=True)

    def compare(self, case: tuple, found: list[tuple[str, float]], expected: dict[str, float]) -> None:
        missing = len(expected.keys() - dict(found).keys())
        difference = max(abs(loss - expected[key]) / abs(expected[key]) for key, loss in found)
        print(*case, f"ended: {missing} batches without a loss, largest difference {difference:.1e}", flush=True)
        self.missing, self.difference = self.missing + missing, max(self.difference, difference)

    def print(self) -> None:
        print(f"sent: {self.sent[signal.SIGTERM]} SIGTERM, {self.sent[signal.SIGKILL]} SIGKILL")
        print(f"starts that failed: {len(self.failures)}", *self.failures, sep="\n")
        print(f"batches without a loss: {self.missing}; largest relative difference of a loss: {self.difference:.1e}")
        seconds, ratios = [wait for wait, _ in self.waits], [wait / limit for wait, limit in self.waits]
        print(f"from SIGTERM to leaving: {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (most)")
        print(f"over longest step + longest save: {statistics.median(ratios):.2f} (median), {max(ratios):.2f} (most)")


def main(count: int, seed: int, started: list[tuple]) -> None:
    """Runs all cases until each signal was sent `count` times, and prints the results."""
    random.seed(seed)
    results, expected = Results(), {}
    cases = [(*each, *rest) for each, *rest in itertools.product(started, SOURCES, STRATEGIES)]
    with tempfile.TemporaryDirectory() as root:
        for number, case in enumerate(itertools.cycle(cases)):
            if results.failures or min(results.sent.values()) >= count:
                break
            if case not in expected:
                (undisturbed := Path(root, f"undisturbed {number}")).mkdir()
                results.failures += filter(None, [run(undisturbed, *case)])
                expected[case] = dict(losses_in(undisturbed)), float((undisturbed / "done").read_text())
            losses, longest_save = expected[case]
            (directory := Path(root, str(number))).mkdir()
            results.end_at_random(directory, case, count, longest_save)
            results.compare(case, losses_in(directory), losses)
    results.print()


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        directory, source, strategy, number, who, moment = sys.argv[2:]
        train(directory, source, strategy, int(number), who, float(moment))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--count", type=int, default=50, help="how often each signal is sent")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--attached", action="store_true", help="train on the accelerators of this machine")
        options = parser.parse_args()
        main(options.count, options.seed, ATTACHED if options.attached else SIMULATED)

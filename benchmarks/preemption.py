"""Ends a program that trains with SIGTERM and SIGKILL at random moments, continues it, and compares every loss.

    python benchmarks/preemption.py --count 50
    python benchmarks/preemption.py --count 10 --attached

For each of 12 cases (1 and 2 processes, three data sources, DP and FSDP) one program runs undisturbed. Another one is
ended by SIGTERM or SIGKILL, in a random process or in all, and started again, over and over, and must reach the same
losses. Moments are drawn from the start of the program, before it imports anything, to its end: imports, `initialize`,
compilation, training, validation, the exit of the interpreter. In `fit`, SIGTERM must stop training with a checkpoint;
elsewhere it must end the process at once. Printed are the number of starts that failed, signals that were ignored,
batches that were lost, the largest difference of a loss, and the time from SIGTERM until the step is saved and the
program leaves, also as a ratio to one step and one save: the longest step since that start, and the longest save of the
undisturbed run, which writes its checkpoints in the foreground. The first step after a start restores a checkpoint and
loads compiled programs. With `--attached`, one process trains on the accelerators of this machine, in place of 1 and 2
with two simulated devices each.
"""

import argparse
import contextlib
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
from collections.abc import Sequence
from pathlib import Path

from keras_dist.multihost.launcher import launch

SIMULATED, ATTACHED = [(1, 2), (2, 2)], [(1, None)]  # processes, and the devices that are simulated for each
SOURCES, STRATEGIES = ("arrays", "PyDataset", "generator"), ("DP", "FSDP")
EPOCHS, BATCHES, BATCH = 5, 16, 12
STEP = 0.02  # seconds that a step takes at least
IGNORED = 2.0  # seconds after SIGTERM for which a process lives that has ignored it


def train(directory: str, source: str, strategy: str, is_disturbed: bool) -> None:
    """Trains a model, as the program that is launched."""
    rank = os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]
    started = Path(directory, f"starting-{rank}")
    started.write_text(str(os.getpid()))
    started.rename(Path(directory, f"started-{rank}"))
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
    # Undisturbed, checkpoints are not written in the background, which tells how long one takes.
    steps = Steps()
    checkpoint = TimedCheckpoint(os.path.join(directory, "checkpoints"), save_freq=7, save_on_background=is_disturbed)
    try:
        model.fit(**data, epochs=EPOCHS, callbacks=[steps, checkpoint], verbose=0, validation_data=(x, y))
    except SystemExit:
        Path(directory, f"stopped-{kd.process_id()}").write_text(json.dumps([time.time(), steps.longest]))
        raise
    Path(directory, "done").write_text(str(checkpoint.longest))


class Run:
    """A start of the program, of which some processes receive a signal `moment` seconds after they have begun.

    Attributes:
        begin, end: when the first process had begun, and when all had ended.
        signals: when each signal was sent, by process.
        failure: the output of all processes, if they did not end as they had to.
        is_ignored: whether SIGTERM had no effect.
    """

    def __init__(
        self,
        directory: Path,
        processes: int,
        devices: int | None,
        source: str,
        strategy: str,
        number: int = 0,
        ranks: Sequence[int] = (),
        moment: float = 0.0,
    ):
        for file in [*directory.glob("started-*"), *directory.glob("stopped-*")]:
            file.unlink()
        self._directory, self._number, self._moment = directory, number, moment
        self.begin, self.signals, self._has_ended = 0.0, {}, threading.Event()
        lines: list[str] = []
        senders = [threading.Thread(target=self._watch, args=(rank, rank in ranks)) for rank in range(processes)]
        for sender in senders:
            sender.start()
        try:
            outcome = launch(
                [sys.executable, __file__, "train", str(directory), source, strategy, str(int(number != 0))],
                processes,
                devices_per_process=devices,
                show=lambda rank, stream, line: lines.append(line),
                environment=os.environ
                | {"JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled")}
                | {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"},
                grace=2,
            )
        finally:
            self._has_ended.set()
        self.end = time.time()
        for sender in senders:
            sender.join()
        has_died = any(outcome.statuses[rank] == -signal.SIGTERM for rank in self.signals)
        is_expected = outcome.status == 0 or has_died or (number == signal.SIGKILL and bool(self.signals))
        self.failure = None if is_expected else "\n".join([str(outcome), *lines])
        self.stopped = [json.loads(file.read_text()) for file in directory.glob("stopped-*")]
        lived = self.end - min(self.signals.values(), default=self.end)
        self.is_ignored = number == signal.SIGTERM and not (has_died or self.stopped) and lived > IGNORED

    def _watch(self, rank: int, is_meant: bool) -> None:
        """Sends a signal from outside, since no thread of a program runs until its end."""
        file = self._directory / f"started-{rank}"
        while not file.exists() and not self._has_ended.wait(0.005):
            pass
        self.begin = self.begin or time.time()
        if is_meant and not self._has_ended.wait(self._moment):
            with contextlib.suppress(OSError):
                pid = int(file.read_text())
                if str(self._directory) in Path(f"/proc/{pid}/cmdline").read_text():  # else it has ended
                    now = time.time()
                    os.kill(pid, self._number)
                    self.signals[rank] = now


def losses_in(directory: Path) -> list[tuple[str, float]]:
    file = directory / "losses"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


class Results:
    """What happened in all runs."""

    def __init__(self):
        self.sent = {signal.SIGTERM: 0, signal.SIGKILL: 0}
        self.failures: list[str] = []
        self.missing, self.difference, self.ignored = 0, 0.0, 0
        self.waits: list[tuple[float, float]] = []  # seconds from SIGTERM to leaving, and those of a step and a save

    def end_at_random(self, directory: Path, case: tuple, count: int, longest_save: float, duration: float) -> None:
        """Runs the program until its end, with interruptions."""
        while not (directory / "done").exists() and not self.failures:
            left = [number for number in self.sent if self.sent[number] < count]
            number = random.choice(left) if left else 0
            ranks = random.choice([*([rank] for rank in range(case[0])), range(case[0])]) if left else []
            moment = random.uniform(0, duration)
            done = Run(directory, *case, number, ranks, moment)
            self.failures += filter(None, [done.failure])
            if not done.signals:
                continue
            self.sent[number] += 1
            self.ignored += done.is_ignored
            if done.stopped:
                left, longest_step = map(max, zip(*done.stopped, strict=True))
                self.waits.append((left - min(done.signals.values()), longest_step + longest_save))
            how = "ignored" if done.is_ignored else "stopped" if done.stopped else "ended"
            progress = len(losses_in(directory))
            print(*case, signal.Signals(number).name, [*ranks], f"after {moment:.1f} s: {how},", progress, flush=True)

    def compare(self, case: tuple, found: list[tuple[str, float]], expected: dict[str, float]) -> None:
        missing = len(expected.keys() - dict(found).keys())
        difference = max(abs(loss - expected[key]) / abs(expected[key]) for key, loss in found)
        print(*case, f"ended: {missing} batches without a loss, largest difference {difference:.1e}", flush=True)
        self.missing, self.difference = self.missing + missing, max(self.difference, difference)

    def print(self) -> None:
        print(f"sent: {self.sent[signal.SIGTERM]} SIGTERM, {self.sent[signal.SIGKILL]} SIGKILL")
        print(f"starts that failed: {len(self.failures)}", *self.failures, sep="\n")
        print(f"SIGTERM that was ignored: {self.ignored}; that stopped training with a checkpoint: {len(self.waits)}")
        print(f"batches without a loss: {self.missing}; largest relative difference of a loss: {self.difference:.1e}")
        if not self.waits:
            return
        seconds, ratios = [wait for wait, _ in self.waits], [wait / limit for wait, limit in self.waits]
        print(f"from SIGTERM to leaving: {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (most)")
        print(f"over longest step + longest save: {statistics.median(ratios):.2f} (median), {max(ratios):.2f} (most)")


def main(count: int, seed: int, started: list[tuple]) -> int:
    """Runs all cases until each signal was sent `count` times, prints the results, and returns the exit status."""
    random.seed(seed)
    results, expected = Results(), {}
    cases = [(*each, *rest) for each, *rest in itertools.product(started, SOURCES, STRATEGIES)]
    with tempfile.TemporaryDirectory() as root:
        for number, case in enumerate(itertools.cycle(cases)):
            if results.failures or min(results.sent.values()) >= count:
                break
            if case not in expected:
                (undisturbed := Path(root, f"undisturbed {number}")).mkdir()
                done = Run(undisturbed, *case)
                results.failures += filter(None, [done.failure])
                if results.failures:
                    break
                longest_save = float((undisturbed / "done").read_text())
                expected[case] = dict(losses_in(undisturbed)), longest_save, done.end - done.begin
            losses, *times = expected[case]
            (directory := Path(root, str(number))).mkdir()
            results.end_at_random(directory, case, count, *times)
            if not results.failures:
                results.compare(case, losses_in(directory), losses)
    results.print()
    return int(bool(results.failures or results.missing or results.ignored))


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        directory, source, strategy, is_disturbed = sys.argv[2:]
        train(directory, source, strategy, is_disturbed == "1")
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--count", type=int, default=50, help="how often each signal is sent")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--attached", action="store_true", help="train on the accelerators of this machine")
        options = parser.parse_args()
        sys.exit(main(options.count, options.seed, ATTACHED if options.attached else SIMULATED))

"""`python -m support.attack`, in the folder `tests`: runs draws, and prints the scripts of those that show a fault."""

import argparse
import concurrent.futures
import os
import tempfile
import time
from collections import Counter
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(prog="python -m support.attack", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="number of draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--only", type=int, help="the number of one draw, whose script is printed in any case")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes that run draws")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one draw")
    parser.add_argument("--folder", type=Path, help="where to write scripts, in place of printing")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True) as compiled:
        os.environ |= {
            "KERAS_BACKEND": "jax",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", compiled)
        return run(arguments)


def run(arguments):
    from support.attack import draws, script, verdicts

    numbers = range(arguments.first, arguments.first + arguments.count)
    if arguments.only is not None:
        numbers = [arguments.only]
    # Those with 64 bits need a process of their own, so they come last.
    drawn = {number: draws.draw(arguments.seed, number) for number in numbers}
    numbers = sorted(numbers, key=lambda number: drawn[number].is_x64)
    sources = {number: script.render(drawn[number]) for number in numbers}
    kinds, begin = Counter(), time.monotonic()

    def judge(numbers):
        for number, verdict in verdicts.judge_all({n: sources[n] for n in numbers}, arguments.time_limit):
            kinds[verdict.kind] += 1
            combination = f"{drawn[number].model}, {drawn[number].strategy}"
            line = f"{number}: {verdict.kind}, {combination}. {verdict.place} {verdict.text}"
            print(line[:1000], flush=True)
            if verdict.is_fault and arguments.folder:
                arguments.folder.mkdir(parents=True, exist_ok=True)
                (arguments.folder / f"{arguments.seed}_{number}.py").write_text(sources[number])
            elif verdict.is_fault or arguments.only is not None:
                print(f"\n{sources[number]}\n", flush=True)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for _ in pool.map(judge, [numbers[job :: arguments.jobs] for job in range(arguments.jobs)]):
            pass
    print(f"{dict(kinds)} in {time.monotonic() - begin:.0f} s")
    is_broken = len(numbers) >= 10 and kinds["equal"] < len(numbers) / 2
    if is_broken:
        print("Fewer than half of the draws ran to their end, so they show nothing. Read what is invalid.")
    return int(is_broken or any(kinds[kind] for kind in verdicts.FAULTS))


if __name__ == "__main__":
    raise SystemExit(main())

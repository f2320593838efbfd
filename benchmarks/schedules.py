"""The swarm's protocol under seeded schedules of faults, on a network in memory and a virtual clock.

    python benchmarks/schedules.py --seeds 1000
    python benchmarks/schedules.py --seeds 1000 --lies 1
    python benchmarks/schedules.py --seeds 1000 --lies 2
    python benchmarks/schedules.py --first 17 --seeds 1 --shrink

What each schedule must end with is in src/diloco/swarm/simulator/schedules.py. A seed that fails is printed with its
faults; `--shrink` leaves out faults as long as it still fails. A hundred seeds or more leave results/schedules-*.json.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from diloco.swarm.simulator import schedules
from measuring import write_results

IN_MEMORY = Path("/dev/shm")
"""Run folders are small, and written with fsync: on a disk a schedule would mostly wait for that."""
_REPORT_EVERY = 100


def shrink(seed: int, lies: tuple[str, ...]) -> schedules.ScheduleResult:
    """Leave out one fault after another while the schedule still fails."""
    workers, faults = schedules.draw(seed)
    workers += len(lies)
    ended = schedules.run(seed, lies=lies)
    for fault in list(faults):
        fewer = [kept_fault for kept_fault in faults if kept_fault is not fault]
        retried = schedules.run(seed, workers, fewer, lies)
        if retried.problems():
            faults = fewer
            ended = retried
    return ended


def begin(folder: str) -> None:
    """Set up a process: no log, one thread, and run folders in `folder`."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    tempfile.tempdir = folder


def run_schedule(seed: int, count: int, shrinking: bool) -> schedules.ScheduleResult:
    lies = schedules.lies_of(seed, count)
    result = schedules.run(seed, lies=lies)
    return shrink(seed, lies) if result.problems() and shrinking else result


def show(result: schedules.ScheduleResult) -> None:
    liar = f" (lies: {', '.join(result.lies)})" if result.lies else ""
    print(f"seed {result.seed}, {result.workers} workers{liar}:", *result.problems(), sep="\n  ")
    print(*result.faults, sep="\n  ", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--shrink", action="store_true", help="leave out faults of a schedule that fails")
    parser.add_argument("--lies", type=int, default=0, help="so many workers lie, in other ways for each seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many run at once (one a core)")
    options = parser.parse_args()
    started = time.monotonic()
    failed: list[int] = []
    settled: list[float] = []
    rounds_after: list[int] = []
    outside = 0
    unsettled: list[int] = []
    seeds = range(options.first, options.first + options.seeds)
    with (
        tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder,
        multiprocessing.Pool(options.processes, begin, (folder,), maxtasksperchild=_REPORT_EVERY) as pool,
    ):
        runs = pool.imap_unordered(partial(run_schedule, count=options.lies, shrinking=options.shrink), seeds)
        for number, result in enumerate(runs, 1):
            settled.append(result.settled_seconds)
            rounds_after.append(result.rounds_after)
            outside += result.outside
            unsettled += [result.seed] if result.outside and result.problem else []
            if result.problems():
                failed.append(result.seed)
                show(result)
            if number % _REPORT_EVERY == 0:
                print(f"{number} of {options.seeds}, {len(failed)} failed", flush=True)
    seconds = time.monotonic() - started
    median = sorted(rounds_after)[len(rounds_after) // 2]
    num_soon = sum(rounds <= 2 for rounds in rounds_after)
    print(
        f"{options.seeds} schedules, {len(failed)} failed; all workers were in a round {max(settled):.1f} s after the "
        f"last fault at the latest, in {num_soon} cases within two rounds of a second, in most after {median} (at most "
        f"{max(rounds_after)}); {seconds:.0f} s"
    )
    if options.lies:
        print(f"{outside} had a round of which half or more lied; of these, {len(unsettled)} did not settle")
    if options.seeds < _REPORT_EVERY:
        return 1 if failed else 0
    facts = {"first": options.first, "seeds": options.seeds, "lies": options.lies, "failed": sorted(failed)}
    facts |= {"outside": outside, "unsettled": sorted(unsettled)} if options.lies else {}
    settling = {
        "latest_seconds": max(settled),
        "within_two_rounds": num_soon,
        "median_rounds": median,
        "most_rounds": max(rounds_after),
    }
    name = {0: "schedules", 1: "schedules-lies"}.get(options.lies, f"schedules-lies-{options.lies}")
    print(f"written: {write_results(name, facts | settling | {'seconds': seconds}).name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The swarm's protocol under seeded schedules of faults, on a network in memory and a virtual clock.

    python benchmarks/schedules.py --seeds 1000
    python benchmarks/schedules.py --seeds 1000 --lies
    python benchmarks/schedules.py --first 17 --seeds 1 --shrink

What each schedule must end with is in tests/support/swarm/schedules.py. A seed that fails is printed with its faults;
`--shrink` leaves out faults as long as it still fails.
"""

import argparse
import logging
import sys
import time

import search_path  # noqa: F401  `support` of the tests
from support.swarm import schedules


def shrink(seed: int, lie: str) -> schedules.Ended:
    """Leave out one fault after another while the schedule still fails."""
    workers, faults = schedules.draw(seed)
    ended = schedules.run(seed, lie=lie)
    for fault in list(faults):
        fewer = [one for one in faults if one is not fault]
        again = schedules.run(seed, workers, fewer, lie)
        if again.problems():
            faults, ended = fewer, again
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--shrink", action="store_true", help="leave out faults of a schedule that fails")
    parser.add_argument("--lies", action="store_true", help="one worker lies, another way for each seed")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    started, failed, settled, after = time.monotonic(), 0, list[float](), list[int]()
    for seed in range(given.first, given.first + given.seeds):
        lie = schedules.LIES[seed % len(schedules.LIES)] if given.lies else ""
        ended = schedules.run(seed, lie=lie)
        settled.append(ended.settled_seconds)
        after.append(ended.rounds_after)
        if ended.problems():
            failed += 1
            ended = shrink(seed, lie) if given.shrink else ended
            print(
                f"seed {seed}, {ended.workers} workers {lie and f'(the last one lies: {lie})'}:",
                *ended.problems(),
                sep="\n  ",
            )
            print(*ended.faults, sep="\n  ", flush=True)
    print(
        f"{given.seeds} schedules, {failed} failed; all workers were in a round {max(settled):.1f} s after the last "
        f"fault at the latest, in most cases after {sorted(after)[len(after) // 2]} rounds "
        f"(at most {max(after)}); {time.monotonic() - started:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

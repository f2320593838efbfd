"""How many of many workers that train over gloo and exit are aborted at exit (SIGABRT): none may be.

    python benchmarks/exits.py                      500 exits, in every way to leave (tests/support/exits.py)
    python benchmarks/exits.py --exits 40 --load 2

Exit code 0: every process had the exit code that its way to leave has.
"""

import argparse
import os
import signal
from collections import Counter
from itertools import cycle

import torch

import search_path  # noqa: F401  `support` of the tests
from support.exits import WAYS, run_processes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exits", type=int, default=500)
    parser.add_argument("--load", type=int, default=0, help="processes that keep a core busy meanwhile")
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    exits: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    busy = [_busy() for _ in range(options.load)]
    try:
        for way in cycle(options.ways.split(",")):
            codes, text = run_processes(WAYS[way])
            exits[way] += len(codes)
            if tuple(codes) != WAYS[way].codes:
                bad[way] += 1
                print(f"{way}: {codes}\n{text}", flush=True)
            if exits.total() >= options.exits:
                break
    finally:
        for pid in busy:
            os.kill(pid, signal.SIGKILL)
    for way, count in exits.items():
        print(f"{way:20} {count:5} exits, {bad[way]} sets of processes with a wrong exit code")
    raise SystemExit(bool(bad))


def _busy() -> int:
    """Fork a process that keeps a core busy, and return its number."""
    pid = os.fork()
    while pid == 0:
        pass
    return pid


if __name__ == "__main__":
    main()

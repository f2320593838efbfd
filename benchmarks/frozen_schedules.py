"""Are the calls of the swarm's protocol, in 2,000 seeded schedules, those that were recorded?

    python benchmarks/frozen_schedules.py
    python benchmarks/frozen_schedules.py --every 20
    python benchmarks/frozen_schedules.py --record

A change of the code that should change nothing changes no digest in tests/golden/swarm/schedules.json: of every call,
answer, stream and event of a schedule with its virtual time. 1,000 have honest workers only, 500 one that lies, 500
two. `--every N` compares each Nth seed. `--record` writes the file anew: for a change that is meant, in a commit of
its own. A seed that is not recorded has a `-` there, and is passed over.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

from diloco.swarm.simulator import schedules
from schedules import IN_MEMORY, begin

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "swarm" / "schedules.json"
SEEDS = {0: 1000, 1: 500, 2: 500}
"""How many seeds are frozen, by the number of workers that lie."""
_DIGITS = 10
_REPORT_EVERY = 200

Case = tuple[int, int]
"""How many lie, and the seed."""


def digest_of(case: Case) -> tuple[Case, str]:
    lies, seed = case
    result = schedules.run(seed, lies=schedules.lies_of(seed, lies) if lies else ())
    return case, result.calls[:_DIGITS]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="compare each Nth seed only")
    parser.add_argument("--record", action="store_true", help="write the digests instead of comparing with them")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many run at once (one a core)")
    options = parser.parse_args()
    every = 1 if options.record else options.every
    cases = [(lies, seed) for lies, count in SEEDS.items() for seed in range(0, count, every)]
    frozen = {} if options.record else {lies: row.split() for lies, row in json.loads(GOLDEN.read_text()).items()}
    if not options.record:
        cases = [(lies, seed) for lies, seed in cases if frozen[str(lies)][seed] != "-"]
    digests: dict[Case, str] = {}
    changed = 0
    with (
        tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder,
        multiprocessing.Pool(options.processes, begin, (folder,), maxtasksperchild=100) as pool,
    ):
        for number, (case, digest) in enumerate(pool.imap_unordered(digest_of, cases), 1):
            digests[case] = digest
            if not options.record and frozen[str(case[0])][case[1]] != digest:
                changed += 1
                print(f"seed {case[1]} with {case[0]} that lie: other calls than recorded", flush=True)
            if number % _REPORT_EVERY == 0:
                print(f"{number} of {len(cases)}", flush=True)
    if options.record:
        lines = {str(lies): " ".join(digests[lies, seed] for seed in range(count)) for lies, count in SEEDS.items()}
        GOLDEN.write_text(json.dumps(lines, indent=1) + "\n")
    print(f"{len(cases)} schedules, " + ("recorded" if options.record else f"{changed} changed"))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())

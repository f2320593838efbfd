"""Kill a run again and again, resume it each time, and compare its end with that of a run left in peace.

    python benchmarks/kills.py                     20 kills
    python benchmarks/kills.py --kills 4 --seed 7

Exit code 0: the digests of all anchors and the exported weights are the same, bit for bit.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

import search_path  # noqa: F401  `support` of the tests
from support.kills import Kill, outcome, trial


def show(console: Console, kills: list[Kill]) -> None:
    table = Table(title="kills")
    for name in ("", "moment", "at step", "complete checkpoints", "unfinished"):
        table.add_column(name, justify="right")
    for number, kill in enumerate(kills, 1):
        steps = " ".join(map(str, kill.checkpoints))
        table.add_row(str(number), kill.moment, str(kill.at_step), steps, str(kill.unfinished))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options, extra = parser.parse_known_args()
    console = Console()
    console.print(f"kills {options.kills}, seed {options.seed}, options {extra}")
    with tempfile.TemporaryDirectory() as folder:
        kills, same = trial(Path(folder), options.kills, options.seed, extra)
        show(console, kills)
        digests, weights = outcome(Path(folder) / "killed")
    console.print(f"{len(kills)} kills; anchors {digests}, weights {weights}: {'the same' if same else 'DIFFERENT'}")
    sys.exit(0 if same and len(kills) == options.kills else 1)


if __name__ == "__main__":
    main()

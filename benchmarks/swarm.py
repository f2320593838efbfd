"""The swarm measured on this machine: a round beside Hivemind's own averaging, losses of workers, joins, many peers.

    python benchmarks/swarm.py                 everything, in some minutes
    python benchmarks/swarm.py --only round    one of round, losses, joins, crowd

Workers are real: trainer processes, each with a sidecar and a p2pd, on the loopback device, with the default timeouts.

    round    two peers, one large vector: from the outer gradient in fp32 to the decoded mean, the slower of the two.
             Hivemind 1.1.12 averages the same vector in fp16 in turn with ours; its matchmaking is not counted.
             The bytes of a round with fp16 through plain streams are the least that p2pd lets a round cost.
             CPU seconds are those of all processes of a peer, to the end of what is done beside training after a round
             (the check of the mean): the work, on a busy machine too.
             Bytes are what a peer sends for each parameter: as the engine counts, and at the loopback device.
             Extra memory is how much the peak of all processes beside a trainer grew over what they had at their start
    losses   how much longer the others' round takes than one in peace, when one is lost just before it or in it
    joins    seconds to a number and to the state, and rounds that ended with the state there and the work not in them
    crowd    sixteen peers: the share of rounds in which all were

Targets: the quickest of our codecs takes at most 0.4 of Hivemind's; a loss between rounds costs at most 2 s, one in a
transfer at most 10 s; no joiner misses a round; full groups in at least 95 % of rounds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import search_path  # noqa: F401  `support` of the tests
from measuring import results_path, write_results
from swarm_cases import OURS, RAW, Crowd, Join, Loss, crowd, joining, losses, one_round

PARTS = ("round", "losses", "joins", "crowd")
MOST_TIME = 0.4
"""The quickest of our codecs may take this share of Hivemind's time."""
MOST_BETWEEN = 2.0
"""Seconds that a loss between rounds may cost."""
MOST_DURING = 10.0
"""Seconds that a loss in a transfer may cost."""
LEAST_FULL = 0.95
"""The least share of rounds in which all peers are."""


def show_rounds(rows: list[dict[str, Any]]) -> list[str]:
    raw, raw_cpu = next((row["seconds"]["median"], row["cpu_seconds"]["median"]) for row in rows if row["case"] == RAW)
    lines = []
    for row in rows:
        seconds = row["seconds"]
        cpu = row["cpu_seconds"]["median"]
        reported = row["reported_bytes"]
        lines.append(
            (
                row["case"],
                f"{seconds['median']:.2f} ({seconds['low']:.2f}–{seconds['high']:.2f})",
                f"{seconds['median'] / raw:.2f}",
                f"{cpu:.2f} ({cpu / raw_cpu:.2f})",
                "" if reported is None else f"{reported:.3f}",
                f"{row['loopback_bytes']:.3f}",
                f"{row['extra_memory_bytes'] / 2**20:.0f}",
            )
        )
    title = f"one round of two peers, {rows[0]['parameters'] / 1e6:g}M parameters"
    headings = ("", "s (low–high)", "against Hivemind", "CPU s", "bytes/param", "at the device", "extra MiB")
    _table(title, headings, lines)
    best = min(row["seconds"]["median"] for row in rows if row["case"].startswith(OURS)) / raw
    return [f"the quickest of ours takes {best:.2f} of Hivemind's time, above {MOST_TIME}"] if best > MOST_TIME else []


def show_losses(rows: list[Loss]) -> list[str]:
    lines = [
        (row.deed, row.victim, str(row.workers), f"{row.seconds:.2f}", f"{row.extra:+.2f}", "yes" if row.same else "NO")
        for row in rows
    ]
    _table("a worker is lost", ("deed", "victim", "of", "s", "extra s", "the others' work and state"), lines)
    missed = []
    for row in rows:
        most = MOST_BETWEEN if "between" in row.deed else MOST_DURING
        if row.extra > most or not row.same:
            missed.append(f"{row.deed}, {row.victim} of {row.workers}: {row.extra:.1f} s extra, intact: {row.same}")
    return missed


def show_joins(rows: list[Join]) -> list[str]:
    lines = [(f"{row.member_seconds:.1f}", f"{row.state_seconds:.2f}", str(row.rounds_missed)) for row in rows]
    title = f"joining two workers, {rows[0].parameters / 1e6:g}M parameters"
    _table(title, ("s to a number", "s from there to the state", "rounds missed"), lines)
    return [f"a joiner missed {row.rounds_missed} rounds" for row in rows if row.rounds_missed]


def show_crowd(row: Crowd) -> list[str]:
    share = row.full / row.rounds
    seconds = f"{row.seconds.median:.2f} ({row.seconds.low:.2f}–{row.seconds.high:.2f})"
    line = (str(row.peers), str(row.rounds), f"{share:.1%}", str(row.failed), seconds)
    _table("many peers", ("peers", "rounds", "with all", "failed for a worker", "s a round"), [line])
    return [f"all {row.peers} were in {share:.1%} of the rounds only"] if share < LEAST_FULL else []


def _table(title: str, headings: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> None:
    table = Table(title=title)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for line in lines:
        table.add_row(*line)
    Console(width=max(110, Console().width)).print(table)


def measure(part: str, folder: Path, quick: bool) -> tuple[Any, list[str]]:
    """Measure a part. Returns its results, and the targets that were missed."""
    match part:
        case "round":
            parameters, repeats = (5_000_000, 2) if quick else (50_000_000, 5)
            rounds = one_round(folder, parameters, ["fp16", "int8", "int4"], repeats)
            return rounds, show_rounds(rounds)
        case "losses":
            loss_rows = losses(folder, 4_000_000)
            return [asdict(row) for row in loss_rows], show_losses(loss_rows)
        case "joins":
            join_rows = joining(folder, 1_000_000 if quick else 10_000_000)
            return [asdict(row) for row in join_rows], show_joins(join_rows)
    crowd_rounds = crowd(folder, 6 if quick else 16, 10 if quick else 40, 0.5)
    return asdict(crowd_rounds), show_crowd(crowd_rounds)


def _earlier_results() -> dict[str, Any]:
    """Read the parts that an earlier run has measured on such a machine."""
    path = results_path("swarm")
    return dict(json.loads(path.read_text())["results"]) if path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small vectors and few rounds, to see whether it works")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    missed: list[str] = []
    for part in options.only:
        with tempfile.TemporaryDirectory() as folder:
            results[part], problems = measure(part, Path(folder), options.quick)
        missed += problems
    if not options.quick:
        print(f"written: {write_results('swarm', _earlier_results() | results).name}")
    for target in missed:
        print(f"target missed: {target}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

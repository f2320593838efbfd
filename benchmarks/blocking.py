"""How long a sync blocks the inner loop of two workers on a slow link: ours over gloo and in a swarm, and torchft's.

    python benchmarks/blocking.py            all networks and cases, about ten minutes; needs root
    python benchmarks/blocking.py --quick    one network and few cases, to see whether it works
    python benchmarks/blocking.py --markdown the table of docs/methods.md, from what was measured last

Two workers, each in a network namespace, 10.5M parameters, H = 25. An inner step is a sleep of 0.1 s: on a GPU a step
leaves the CPU to the rest of the program, and a sleep does that without taking CPU time from the other worker on the
same machine. All cases of a network run one after another, so that what else the machine does falls on all alike.

    blocked       seconds of a full-model sync in which the inner loop does not run: all time outside inner steps,
                  divided by the syncs; the first sync is not counted; of the worker that was blocked longer
    thread        processor time of the trainer's thread in it: what remains of `blocked` on an idle machine where
                  every mean is in time
    utilisation   time inside inner steps, of all time
    peak          the most that left a worker within 0.1 s and within 0.5 s, the time that an overlapped round has
                  (`open` network: not limited, so that it is what a method asks for, not what the link gives); read
                  every 20 ms from the namespace's device
    step          an inner step of matrix products on one thread, while a round is in flight and while none is (`busy`)

Targets: streaming + overlap + int4 blocks at most 0.02 s and has a utilisation of at least 99 % where classic fp32 has
less than 70 %.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from blocking_worker import result_path
from links import Link, inside, joined
from measuring import results_path, write_results

NETWORKS = {"200 Mbit/s": Link(200), "200 Mbit/s, 50 ms each way": Link(200, 0.05), "open": Link(None)}
METHODS = {
    "classic": {"fragments": 1, "overlap_steps": 0, "mixing": 0.0},
    "streaming": {"fragments": 4, "overlap_steps": 5, "mixing": 0.5},
    "streaming in 10": {"fragments": 9, "overlap_steps": 2, "mixing": 0.5},
    "streaming in 3, 10 steps": {"fragments": 2, "overlap_steps": 10, "mixing": 0.5},
}
TORCHFT_OVERLAP = 4  # the most that it takes with five fragments in 25 steps
CODECS = ("fp32", "fp16", "int4")
H = 25
STEP_SECONDS = 0.1
WINDOW_SECONDS = 0.5
SHORT_SECONDS = 0.1
"""The two windows of `peak`."""
MOST_BLOCKED = 0.02
LEAST_USED = 0.99
CLASSIC_USED = 0.70
"""The targets: seconds blocked, utilisation, and utilisation of classic fp32."""
LIMIT_SECONDS = 240.0


@dataclass(frozen=True)
class Case:
    """A method on an engine."""

    engine: str
    method: str
    codec: str
    busy: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.method}, {self.codec}{', busy' if self.busy else ''}"


@dataclass(frozen=True)
class Row:
    """A case on a network; both workers together."""

    network: str
    case: str
    syncs: int
    blocked_seconds: float
    thread_seconds: float
    utilization: float
    cpu_seconds: float
    """Processor time of a worker for a sync, all threads; a swarm's sidecar is not in it."""
    sent_bytes: float
    """Bytes of a sync, at the device."""
    peak_bytes: float
    short_peak_bytes: float
    step_with_transfer: float | None
    step_without: float | None
    load: float
    """The machine's load when the case began: 2 is two cores at work."""


def cases(network: str, quick: bool, torchft: bool) -> list[Case]:
    if network == "open":
        return [
            Case("gloo", "classic", "fp16"),
            Case("gloo", "streaming", "fp16"),
            Case("gloo", "streaming in 10", "fp16"),
            Case("gloo", "streaming", "int4", True),
        ]
    ours = [Case("gloo", "classic", codec) for codec in CODECS]
    ours += [Case("gloo", "streaming", codec) for codec in ("fp16", "int4")]
    if quick:
        return [ours[0], ours[-1]]
    ours += [Case("swarm", "classic", "fp32"), Case("swarm", "streaming", "fp16"), Case("swarm", "streaming", "int4")]
    if NETWORKS[network].delay_seconds:
        ours += [Case(engine, "streaming in 3, 10 steps", "int4") for engine in ("gloo", "swarm")]
    return ours + ([Case("torchft", "classic", "fp32"), Case("torchft", "streaming", "fp32")] if torchft else [])


def run(network: str, case: Case, syncs: int) -> Row:
    load = os.getloadavg()[0]
    options = METHODS[case.method]
    with joined(NETWORKS[network]), tempfile.TemporaryDirectory() as folder:
        task = {"engine": case.engine, "codec": case.codec, "num_inner_steps": H, "step_seconds": STEP_SECONDS}
        if case.engine == "torchft" and case.method == "streaming":
            options = options | {"overlap_steps": TORCHFT_OVERLAP}
        if case.busy:  # so that there are steps without a round in flight
            options = options | {"overlap_steps": 2}
        task |= options | {"syncs": syncs, "folder": folder, "busy": case.busy}
        workers = [_start(task | {"rank": rank}, rank) for rank in (0, 1)]
        for worker in workers:
            _wait(worker, f"{network}, {case.name}")
        measured = [json.loads(result_path(folder, rank).read_text()) for rank in (0, 1)]
    return _row(network, case, syncs, measured, load)


def _start(task: dict[str, Any], rank: int) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__.replace("blocking.py", "blocking_worker.py"), json.dumps(task)]
    return subprocess.Popen(
        inside(rank, command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _wait(worker: "subprocess.Popen[str]", case_name: str) -> None:
    try:
        _, errors = worker.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        worker.kill()
        _, errors = worker.communicate()
    if worker.returncode:
        raise SystemExit(f"{case_name}: a worker gave no result\n{errors[-3000:]}")


def _row(network: str, case: Case, syncs: int, measured: list[dict[str, Any]], load: float) -> Row:
    sent_by_worker = [worker["sent"][-1][1] - worker["sent"][0][1] for worker in measured]
    steps_with_transfer, steps_without = (
        [step for worker in measured for step in worker[name]] for name in ("steps_with_transfer", "steps_without")
    )
    return Row(
        network,
        case.name,
        syncs,
        max((worker["seconds"] - worker["inner_seconds"]) / syncs for worker in measured),
        max(worker["thread_seconds"] / syncs for worker in measured),
        min(worker["inner_seconds"] / worker["seconds"] for worker in measured),
        max(worker["cpu_seconds"] / syncs for worker in measured),
        max(sent_by_worker) / syncs,
        max(_most_within(worker["sent"], WINDOW_SECONDS) for worker in measured),
        max(_most_within(worker["sent"], SHORT_SECONDS) for worker in measured),
        _middle(steps_with_transfer) if case.busy else None,
        _middle(steps_without) if case.busy else None,
        load,
    )


def _middle(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _most_within(samples: list[list[float]], seconds: float) -> float:
    """Return the most bytes in any window of `seconds`. `samples`: (time, bytes so far)."""
    most = 0.0
    first = 0
    for time_, total in samples:
        while samples[first][0] < time_ - seconds:
            first += 1
        most = max(most, total - samples[first][1])
    return most


def missed_targets(rows: list[Row]) -> list[str]:
    missed = []
    for row in rows:
        classic = next(
            (r.utilization for r in rows if (r.network, r.case) == (row.network, "gloo, classic, fp32")), None
        )
        if classic is None or not re.search(r", streaming.*, int4$", row.case):
            continue
        if row.blocked_seconds > MOST_BLOCKED:
            missed.append(f"{row.network}, {row.case}: blocked {row.blocked_seconds:.3f} s, above {MOST_BLOCKED}")
        if row.utilization < LEAST_USED or classic >= CLASSIC_USED:
            used = f"{row.utilization:.1%} where classic fp32 has {classic:.1%}"
            missed.append(f"{row.network}, {row.case}: {used}, not {LEAST_USED:.0%} and below {CLASSIC_USED:.0%}")
    return missed


def print_table(rows: list[Row]) -> None:
    table = Table(title="a full-model sync of two workers, 10.5M parameters, H = 25, steps of 0.1 s")
    for heading in ("network", "case", "blocked s", "thread s", "utilisation", "sent MB", "peak MB", "step s", "load"):
        table.add_column(heading, justify="left" if heading in ("network", "case") else "right")
    for row in rows:
        step = "" if row.step_without is None else f"{row.step_with_transfer:.4f} / {row.step_without:.4f}"
        numbers = (f"{row.blocked_seconds:.3f}", f"{row.thread_seconds:.3f}", f"{row.utilization:.1%}")
        bytes_ = (f"{row.sent_bytes / 1e6:.1f}", f"{row.short_peak_bytes / 1e6:.1f} / {row.peak_bytes / 1e6:.1f}")
        table.add_row(row.network, row.case, *numbers, *bytes_, step, f"{row.load:.1f}")
    Console(width=max(130, Console().width)).print(table)


def _with_earlier(rows: list[Row]) -> list[dict[str, Any]]:
    """Add the cases that an earlier run has measured on such a machine, and this one has left out."""
    path = results_path("blocking")
    measured = {(row.network, row.case) for row in rows}
    earlier = json.loads(path.read_text())["results"] if path.exists() else []
    return [row for row in earlier if (row["network"], row["case"]) not in measured] + [asdict(row) for row in rows]


def print_markdown() -> None:
    """Print the results of this machine as docs/methods.md shows them."""
    row_by_case = {
        (row["network"], row["case"]): row for row in json.loads(results_path("blocking").read_text())["results"]
    }
    near, far, _ = NETWORKS
    print("| | blocked s | utilisation | thread s | load | blocked s with 50 ms each way | utilisation |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in dict.fromkeys(case for network, case in row_by_case if network in (near, far)):
        cells = []
        for network, shows_thread in ((near, True), (far, False)):
            row = row_by_case.get((network, case))
            cells += [f"{row['blocked_seconds']:.3f}", f"{row['utilization']:.1%}"] if row else ["", ""]
            if shows_thread:
                cells += [f"{row['thread_seconds']:.3f}", f"{row['load']:.1f}"] if row else ["", ""]
        print(f"| {case} | {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--syncs", type=int, default=4, help="measured syncs of each case")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="cases whose network or name has this in it")
    parser.add_argument("--markdown", action="store_true", help="measure nothing; print what was measured last")
    options = parser.parse_args()
    if options.markdown:
        print_markdown()
        return 0
    torchft = importlib.util.find_spec("torchft") is not None
    if not torchft:
        print("torchft is not installed, so there is no peer: make .venv/.bench")
    rows: list[Row] = []
    for network in list(NETWORKS)[: 1 if options.quick else None]:
        for case in cases(network, options.quick, torchft):
            if options.only in network or options.only in case.name:
                row = run(network, case, 1 if options.quick else options.syncs)
                print(f"{network}, {case.name}: blocked {row.blocked_seconds:.3f} s, load {row.load:.1f}", flush=True)
                rows.append(row)
                if not options.quick:  # after each, so that a failure loses none
                    write_results("blocking", _with_earlier(rows))
    print_table(rows)
    missed = missed_targets(rows)
    for target in missed:
        print(f"target missed: {target}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Bytes on the wire of one sync of two workers, per parameter and worker: every codec over every engine.

Everything runs in a network namespace of its own (Linux; `unshare`), in which no other program sends anything.

    gloo    at a worker's TCP sockets (TCP_INFO); torchft's DiLoCo in the same run
    swarm   at the loopback device, half of what both workers sent, with TCP/IP headers and what holds the swarm
            together; raw Hivemind (fp16) in the same run

    python benchmarks/bytes.py [--only gloo] [--without-torchft]

Targets: int4 and e3m0 at most 0.55 bytes, int8 1.05, topk 0.1.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco.codecs.registry import CODECS
from measuring import write_results

TARGETS = {"int4": 0.55, "e3m0": 0.55, "int8": 1.05, "topk": 0.1}
_INSIDE = "DILOCO_BENCH_NAMESPACE"


@dataclass(frozen=True)
class Row:
    engine: str
    case: str
    parameters: int
    bytes_per_parameter: float
    reported: float | None
    """Bytes per parameter as the engine counts them."""


def over_gloo(size: str, cases: list[str]) -> list[Row]:
    from sync import build_model, run

    parameters = sum(parameter.numel() for parameter in build_model(size).parameters())
    rows = []
    for case in cases:
        measured = run(case, size, 3, {})
        sent_bytes = max(count for worker in measured for count in worker.bytes_sent[1:])
        reported = [count for worker in measured for count in worker.bytes_reported]
        reported_per_parameter = max(reported) / parameters if reported else None
        rows.append(Row("gloo", case, parameters, sent_bytes / parameters, reported_per_parameter))
        show(rows[-1])
    return rows


def over_swarm(parameters: int, codecs: list[str]) -> list[Row]:
    from swarm_cases import one_round

    with tempfile.TemporaryDirectory() as folder:
        measured_rows = one_round(Path(folder), parameters, codecs, 2)
    rows = []
    for row in measured_rows:
        reported = row["reported_bytes"]
        assert isinstance(row["loopback_bytes"], float)
        reported_per_parameter = float(reported) if isinstance(reported, float) else None
        rows.append(Row("swarm", str(row["case"]), parameters, row["loopback_bytes"], reported_per_parameter))
        show(rows[-1])
    return rows


def show(row: Row) -> None:
    reported = "" if row.reported is None else f"  (reported {row.reported:.4f})"
    print(f"{row.engine:6} {row.case:16} {row.bytes_per_parameter:7.4f} bytes a parameter{reported}", flush=True)


def missed_targets(rows: list[Row]) -> list[str]:
    missed = []
    for row in rows:
        limit = TARGETS.get(row.case.removeprefix("ours "))
        if limit is not None and row.bytes_per_parameter > limit:
            missed.append(f"{row.engine}, {row.case}: {row.bytes_per_parameter:.4f} bytes a parameter, above {limit}")
    return missed


def enter_namespace() -> int:
    """Run this script again in a network namespace of its own, with a loopback device."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        print("this benchmark counts bytes in a network namespace: it needs `unshare` and `ip`, and Linux")
        return 2
    command = [sys.executable, *sys.argv]
    in_namespace = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    return subprocess.run(in_namespace, env={**os.environ, _INSIDE: "1"}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("gloo", "swarm"), nargs="+", default=["gloo", "swarm"])
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS))
    parser.add_argument("--size", choices=("10.5M", "50M"), default="10.5M")
    parser.add_argument("--without-torchft", action="store_true")
    options = parser.parse_args()
    if "gloo" in options.only and not options.without_torchft and importlib.util.find_spec("torchft") is None:
        print("torchft is not installed: `make bench` installs it (the extra 'bench'), or add --without-torchft")
        return 2
    if _INSIDE not in os.environ:
        return enter_namespace()
    rows: list[Row] = []
    if "gloo" in options.only:
        from sync_sides import TORCHFT

        torchft_cases = [] if options.without_torchft else [TORCHFT]
        rows += over_gloo(options.size, [f"ours {name}" for name in options.codecs] + torchft_cases)
    if "swarm" in options.only:
        rows += over_swarm({"10.5M": 10_500_000, "50M": 50_000_000}[options.size], options.codecs)
    print(f"written: {write_results('bytes', [asdict(row) for row in rows]).name}")
    missed = missed_targets(rows)
    for target in missed:
        print(f"target missed: {target}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

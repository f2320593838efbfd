"""How long the dashboard takes to load a run of many events, and to answer the page afterwards.

    python benchmarks/dashboard.py --events 100000 --workers 8 [--keep FOLDER]

The log is made up: steps of all workers, a round every 20 logged steps, with reports of all members and all cosines.
"""

import argparse
import json
import math
import platform
import tempfile
import time
from pathlib import Path

from diloco.dashboard.runs import Run

_TOKENS = 4096


def write_log(folder: Path, events: int, workers: int) -> None:
    """Write a run folder with about this many events."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(f"steps = {events}\n")
    num_written = 0
    step = 0
    sequence = 0
    event_time = time.time() - events / workers / 4
    with (folder / "events.jsonl").open("w") as file:

        def emit(type_: str, worker: int, **fields: object) -> None:
            nonlocal num_written
            num_written += 1
            event = {"v": 1, "time": round(event_time, 4), "worker": worker, "type": type_}
            file.write(json.dumps(event | fields) + "\n")

        for worker in range(workers):
            emit(
                "worker_started", worker, workers=workers, ranks=1, device="cpu", precision="fp32", threads=1,
                parameters=150_000_000, tokens_per_step=_TOKENS, unigram_perplexity=500.0, resolved={},
            )  # fmt: skip
        while num_written < events:
            step += 10
            event_time += 0.25
            for worker in range(workers):
                loss = 2.5 + 5 * math.exp(-step / events) + 0.2 * math.sin(step * 1.7 + worker)
                emit(
                    "step", worker, step=step, loss=loss, learning_rate=4e-4, gradient_norm=1 + 0.3 * math.cos(step),
                    loss_scale=None, tokens=step * _TOKENS, elapsed_seconds=step / 40, sync_seconds=step / 400,
                    bytes_sent=sequence * 300_000_000, rounds=sequence,
                )  # fmt: skip
            if step % 200 == 0:
                _round(emit, sequence, step, workers)
                sequence += 1


def _round(emit, sequence: int, step: int, workers: int) -> None:  # type: ignore[no-untyped-def]
    report = {"inner_steps": step, "tokens": step * _TOKENS, "bytes_sent": 0, "elapsed_seconds": step / 40.0}
    members = [
        {"worker": w, "anchor_digest": f"{sequence:016x}", "weight": 1.0, "norm": 2.0, "report": report}
        for w in range(workers)
    ]
    cosines = [[a, b, 0.5] for a in range(workers) for b in range(a + 1, workers)]
    for worker in range(workers):
        emit("round_posted", worker, sequence=sequence, fragment=0, step=step)
    for worker in range(workers):
        emit(
            "round", worker, sequence=sequence, fragment=0, step=step, norm=2.0, mean_norm=1.0, codec_error=1e-4,
            similarity=0.5, cosines=cosines, waited_seconds=0.1, failure=None, seconds=0.1, bytes_sent=300_000_000,
            contributors=list(range(workers)), refused={}, members=members, roster=[],
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="leave the run folder here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary) / "run"
        write_log(folder, options.events, options.workers)
        size = (folder / "events.jsonl").stat().st_size
        run = Run(folder, "run")
        print(f"{options.events:,} events of {options.workers} workers, {size / 1e6:.0f} MB, {platform.machine()}")
        for name, work in (
            ("load the log", run.refresh),
            ("state", run.state),
            ("curves", lambda: run.series(None, 1000, None)),
            ("rounds", lambda: run.rounds(None, 8)),
            ("state in the middle", lambda: run.state(time.time() - options.events / options.workers / 8)),
        ):
            started = time.monotonic()
            cpu_started = time.process_time()
            work()
            seconds = time.monotonic() - started
            cpu_seconds = time.process_time() - cpu_started
            print(f"  {name:22} {seconds:6.2f} s ({cpu_seconds:.2f} s of one core)")


if __name__ == "__main__":
    main()

"""The sizes that `diloco train --estimate` tells, against those that the run then has: memory, disk, bytes of a round.

    python benchmarks/sizes.py                     all cases: a fine-tune of 135M parameters takes some 10 GB of disk
    python benchmarks/sizes.py --cases tiny        the other cases keep their earlier results

Memory is VmHWM, the kernel's high-water mark of each worker process; disk is the largest size of the run folder while
the run goes on; bytes are those that the rounds counted. Exit code 0: each is within 20 % of what was told. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco.data.tokenizer import Tokenizer
from diloco.history.run_history import read_history
from diloco.models.native.config import ModelConfig
from diloco.models.native.model import NativeModel
from measuring import results_path, write_results

SHORT = ("--data.max_bytes=2000000", "--training.eval_windows=4", "--training.sample_tokens=0")
FINE_TUNE = ("--steps=10", "--H=5", "--training.batch_size=2", "--data.sequence_length=128")
CASES: dict[str, tuple[str, ...]] = {
    "tiny": ("--steps=90",),
    "tiny, swarm": ("--steps=90", "--engine=swarm", "--workers=2", "--host=127.0.0.1"),
    "60m": (
        *("--model=60m", "--data.vocab_size=4000", "--steps=4", "--H=2", "--checkpoint.interval=2"),
        *("--training.batch_size=4", "--data.sequence_length=128"),
    ),
    "fine-tune of 135M": FINE_TUNE,
    "fine-tune of 135M by transformers": FINE_TUNE,
}
MOST_OFF = 0.2


@dataclass(frozen=True)
class Size:
    """One size of a run, as the estimate told it and as it was measured."""

    what: str
    told: float
    measured: float

    @property
    def off(self) -> float:
        return self.told / self.measured - 1 if self.measured else 0.0


def make_model(folder: Path) -> Path:
    """Write a Llama-family folder of 135M random weights, shaped as SmolLM2-135M."""
    shape = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_sequence_length=2048,
        tie_embeddings=True,
    )
    tokenizer = Tokenizer.train([Path(json.__file__).read_text()], 500)
    path = folder / "tokenizer.json"
    tokenizer.save(path)
    NativeModel(shape).save(
        folder / "model", tokenizer_path=path, end_of_text=tokenizer.decode([tokenizer.end_of_text])
    )
    return folder / "model"


def command(options: tuple[str, ...], out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "diloco.cli.main", "train", *options, "--device=cpu", f"--out={out}", *more]


def measure(options: tuple[str, ...], out: Path) -> list[Size]:
    """Compare what `--estimate` tells of a run with what the run has."""
    estimate = json.loads(
        subprocess.run(command(options, out, "--estimate", "--json"), check=True, capture_output=True).stdout
    )
    with (out.parent / "output.txt").open("wb") as output:
        run = subprocess.Popen(command(options, out), stdout=output, stderr=subprocess.STDOUT)
        peaks: dict[int, int] = {}
        disk = 0
        while run.poll() is None:
            time.sleep(0.2)
            for process, peak in worker_peaks(run.pid):
                peaks[process] = max(peak, peaks.get(process, 0))
            disk = max(disk, folder_size(out))
    if run.returncode:
        raise SystemExit((out.parent / "output.txt").read_text())
    rounds = [round_.bytes_sent for round_ in read_history(out).rounds.by_sequence.values() if round_.bytes_sent]
    return [
        Size("memory of a process", estimate["process_bytes"], max(peaks.values())),
        Size("disk at most", estimate["disk_peak_bytes"], disk),
        Size("bytes of a round", estimate["round_bytes"], max(rounds)),
    ]


def worker_peaks(launcher: int) -> list[tuple[int, int]]:
    """List (process, peak memory) of the launcher's worker processes; not of a worker's own children."""
    peaks = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            command_line = (status.parent / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if int(lines["PPid"]) == launcher and b"spawn_main" in command_line and "VmHWM" in lines:
            peaks.append((int(status.parent.name), int(lines["VmHWM"].split()[0]) * 1024))
    return peaks


def folder_size(folder: Path) -> int:
    total = 0
    for folder_path, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(folder_path) / name).stat().st_size
            except OSError:
                continue
    return total


def show(console: Console, results: dict[str, list[Size]]) -> None:
    table = Table(title="told and measured")
    for name in ("case", "what", "told", "measured", "off"):
        table.add_column(name, justify="left" if name in ("case", "what") else "right")
    for case, sizes in results.items():
        for size in sizes:
            table.add_row(
                case, size.what, f"{size.told / 1e6:,.1f} MB", f"{size.measured / 1e6:,.1f} MB", f"{size.off:+.1%}"
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    console = Console()
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        for case in arguments.cases:
            folder = Path(temporary) / case.replace(" ", "-").replace(",", "")
            folder.mkdir()
            options = CASES[case] + SHORT
            if "135M" in case:
                model = make_model(folder)
                options += (f"--model={'hf:' if 'transformers' in case else ''}{model}",)
            results[case] = measure(options, folder / "run")
            show(console, {case: results[case]})
    path = results_path("sizes")
    earlier: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    measured = {case: [asdict(size) | {"off": size.off} for size in sizes] for case, sizes in results.items()}
    all_sizes = {case: (earlier | measured)[case] for case in CASES if case in earlier | measured}
    console.print(f"written to {write_results('sizes', all_sizes)}")
    worst = max(abs(size.off) for sizes in results.values() for size in sizes)
    console.print(f"the furthest off is {worst:.1%}, and {MOST_OFF:.0%} is allowed")
    sys.exit(0 if worst <= MOST_OFF else 1)


if __name__ == "__main__":
    main()

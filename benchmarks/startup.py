"""How long a user waits before anything happens: importing diloco, and `diloco --help`.

Each measurement is a new interpreter, several in turn; the median counts for the target.

    import    `import torch, diloco` and touching diloco.DiLoCo, less `import torch` in the interpreter before it
    help      `python -m diloco.cli.main --help`, whole

Targets: import below 2 s beyond torch; help below 1 s.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from measuring import Spread, write_results

TORCH = ["-c", "import torch"]
DILOCO = ["-c", "import torch, diloco; diloco.DiLoCo"]
HELP = ["-m", "diloco.cli.main", "--help"]
MAX_IMPORT_SECONDS = 2.0
MAX_HELP_SECONDS = 1.0


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    completed = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if completed.returncode:
        raise SystemExit(f"python {' '.join(arguments)} failed:\n{completed.stderr}")
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 3 if parser.parse_args().quick else 9
    for arguments in (DILOCO, HELP):
        seconds(arguments)  # compiles what is not compiled yet, and fills the file cache
    torch_seconds = []
    diloco_seconds = []
    help_seconds = []
    for _ in range(repeats):
        torch_seconds.append(seconds(TORCH))
        diloco_seconds.append(seconds(DILOCO))
        help_seconds.append(seconds(HELP))
    beyond = [with_diloco - without for with_diloco, without in zip(diloco_seconds, torch_seconds, strict=True)]
    rows = {
        "import torch": (Spread.of(torch_seconds), None),
        "diloco.DiLoCo beyond torch": (Spread.of(beyond), MAX_IMPORT_SECONDS),
        "diloco --help": (Spread.of(help_seconds), MAX_HELP_SECONDS),
    }
    table = Table(title=f"start-up, {repeats} new interpreters each")
    for heading in ("", "lowest", "median", "highest", "target"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, (spread, limit) in rows.items():
        numbers = [f"{value:.3f} s" for value in (spread.low, spread.median, spread.high)]
        table.add_row(name, *numbers, "" if limit is None else f"< {limit:g} s")
    Console(width=max(100, Console().width)).print(table)
    results = {name: asdict(spread) for name, (spread, _) in rows.items()}
    print(f"written: {write_results('startup', results).name}")
    missed = [name for name, (spread, limit) in rows.items() if limit is not None and spread.median >= limit]
    for name in missed:
        print(f"target missed: {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

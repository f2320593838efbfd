"""What `make train` gains and what it costs: the default run beside classic DiLoCo and data parallelism.

    python benchmarks/recipe.py --seeds 3

Each case is a real `diloco train` of the small model with two workers, 800 steps, the same tokens. Runs that are
complete in --runs are not repeated. Writes benchmarks/results/recipe-<machine>.json.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring import write_results

CASES: dict[str, list[str]] = {
    "data-parallel": ["--mode", "data-parallel"],
    "default": [],
    "classic": ["--H", "30", "--outer.momentum", "0.5", "--codec", "fp16"],
}


def run(folder: Path, options: list[str]) -> dict[str, Any]:
    summary = folder / "summary.json"
    if not summary.exists():
        command = [sys.executable, "-m", "diloco", "train", "--out", str(folder), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads(summary.read_text()))


def case(name: str, seeds: int, runs: Path) -> dict[str, Any]:
    told = [run(runs / f"{name}-{seed}", [*CASES[name], "--seed", str(seed)]) for seed in range(seeds)]
    losses = [one["validation_loss"] for one in told]
    return {
        "options": CASES[name],
        "validation_losses": losses,
        "validation_loss": statistics.fmean(losses),
        "perplexity": math.exp(statistics.fmean(losses)),
        "bytes_sent_by_a_worker": statistics.fmean(one["bytes_sent_per_worker"] for one in told),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/recipe"))
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    cases = {name: case(name, given.seeds, given.runs) for name in CASES}
    base = cases["data-parallel"]
    for name, one in cases.items():
        one["loss_above_data_parallel"] = one["validation_loss"] / base["validation_loss"] - 1
        one["times_fewer_bytes"] = base["bytes_sent_by_a_worker"] / one["bytes_sent_by_a_worker"]
        print(
            f"{name:14} loss {one['validation_loss']:.3f} ({one['loss_above_data_parallel']:+.1%})  perplexity "
            f"{one['perplexity']:.1f}  {one['times_fewer_bytes']:.0f} times fewer bytes"
        )
    print(f"written: {write_results('recipe', {'seeds': given.seeds, 'cases': cases}).name}")


if __name__ == "__main__":
    main()

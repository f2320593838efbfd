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

COMMON = [
    *("--model", "tiny", "--workers", "2", "--steps", "800", "--data.source", "stdlib"),
    *("--inner.lr", "3e-3", "--inner.warmup_steps", "100"),
    *("--training.batch_size", "8", "--data.sequence_length", "128"),
]
CASES: dict[str, list[str]] = {
    "data-parallel": ["--mode", "data-parallel", "--codec", "fp32"],
    "default": ["--H", "15", "--codec", "int4", "--sync.warm_start", "200", "--outer.momentum", "0.8"],
    "classic": ["--H", "30", "--codec", "fp16", "--sync.warm_start", "0", "--outer.momentum", "0.5"],
}
"""Each option is given, so that a changed default does not change what is compared."""


def run(folder: Path, options: list[str]) -> dict[str, Any]:
    summary = folder / "summary.json"
    if not summary.exists():
        command = [sys.executable, "-m", "diloco", "train", "--out", str(folder), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads(summary.read_text()))


def case(name: str, seeds: int, runs: Path) -> dict[str, Any]:
    summaries = [run(runs / f"{name}-{seed}", [*COMMON, *CASES[name], "--seed", str(seed)]) for seed in range(seeds)]
    losses = [summary["validation_loss"] for summary in summaries]
    return {
        "options": [*COMMON, *CASES[name]],
        "validation_losses": losses,
        "validation_loss": statistics.fmean(losses),
        "perplexity": math.exp(statistics.fmean(losses)),
        "unigram_perplexity": summaries[0]["unigram_perplexity"],
        "bytes_sent_by_a_worker": statistics.fmean(summary["bytes_sent_per_worker"] for summary in summaries),
        "data_parallel_bytes_by_parameters": summaries[0]["data_parallel_bytes_per_worker"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/recipe"))
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    cases = {name: case(name, options.seeds, options.runs) for name in CASES}
    base = cases["data-parallel"]
    for name, measured in cases.items():
        pairs = zip(measured["validation_losses"], base["validation_losses"], strict=True)
        measured["losses_above_data_parallel"] = [loss / base_loss - 1 for loss, base_loss in pairs]
        measured["loss_above_data_parallel"] = measured["validation_loss"] / base["validation_loss"] - 1
        measured["times_fewer_bytes"] = base["bytes_sent_by_a_worker"] / measured["bytes_sent_by_a_worker"]
        print(
            f"{name:14} loss {measured['validation_loss']:.3f} ({measured['loss_above_data_parallel']:+.1%})  "
            f"perplexity {measured['perplexity']:.1f}  {measured['times_fewer_bytes']:.0f} times fewer bytes"
        )
    print(f"written: {write_results('recipe', {'seeds': options.seeds, 'cases': cases}).name}")


if __name__ == "__main__":
    main()

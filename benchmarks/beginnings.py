"""Does data-parallel training begin alike in all seeds? Its loss over the first steps, by heads, rate and warm-up.

    diloco data prepare --data.source TEXT --data.vocab_size 4096
    python benchmarks/beginnings.py --text FOLDER --processes 8

All arms of a seed in the laboratory go on from one shared beginning, so a seed whose beginning is worse than those of
the others widens the interval of every table. Each case below is the beginning of a run of 2,250 data-parallel steps of
a scale of the laboratory, on tuning seeds. It is stopped after 1,200 steps; the rates are those of the whole run.
"""

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from diloco.lab.arm import Arm, Progress
from diloco.lab.results import TUNING_SEED
from diloco.lab.scales import SCALES
from diloco.lab.simulation.checkpoint import ArmCheckpoint, Interrupted
from diloco.lab.simulation.simulator import simulate
from diloco.lab.texts import Texts
from measuring import write_results

STEPS = 1200
OF_STEPS = 2250
EVERY = 50


@dataclass(frozen=True)
class Case:
    """The beginning of a data-parallel run of a scale, with other heads, rate or warm-up."""

    scale: str
    heads: int
    lr: float
    warmup_steps: int
    seeds: int

    def arm(self) -> Arm:
        scale = SCALES[self.scale]
        heads = {"num_heads": self.heads, "num_kv_heads": self.heads}
        return scale.data_parallel(
            model={**scale.model, **heads, "head_dim": scale.model["hidden_size"] // self.heads},
            inner={"lr": self.lr, "warmup_steps": self.warmup_steps},
            pretraining_inner=None,
            pretraining_steps=0,
            pretraining_batch_size=None,
            steps=OF_STEPS,
            eval_points=OF_STEPS // EVERY,
        )


CASES = [
    Case("1m", 2, 4e-3, 100, 3),
    Case("1m", 4, 4e-3, 100, 3),
    Case("1m", 4, 8e-3, 100, 3),
    Case("1m", 4, 4e-3, 200, 3),
    Case("4m", 8, 4e-3, 100, 2),
]


def curve(task: tuple[Case, int], text: str, device: str) -> list[tuple[int, float]]:
    """Return (step, validation loss) up to STEPS: an arm that is stopped there leaves its curve in its checkpoint."""
    case, seed = task
    torch.set_num_threads(1)
    step = 0

    def follow(progress: Progress) -> None:
        nonlocal step
        step = progress.step

    corpus = Texts(text, text, SCALES[case.scale]).open("text")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arm.safetensors"
        checkpoint = ArmCheckpoint(path, math.inf, stop=lambda: step >= STEPS)
        try:
            simulate(case.arm(), seed, corpus, device, on_progress=follow, checkpoint=checkpoint)
        except Interrupted:
            with safe_open(path, "pt") as file:
                losses: list[tuple[int, float]] = json.loads(file.metadata()["numbers"])["curve"]
            return losses
    raise AssertionError(f"the arm has ended before step {STEPS}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", required=True, help="a data.source, or the folder of a prepared corpus")
    parser.add_argument("--processes", type=int, default=1, help="how many share the device")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    tasks = [(case, TUNING_SEED + index) for case in CASES for index in range(case.seeds)]
    rows = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        curves = pool.imap(partial(curve, text=options.text, device=options.device), tasks)
        for (case, seed), losses in zip(tasks, curves, strict=True):
            print(case, seed, *(f"{step}: {loss:.3f}" for step, loss in losses), flush=True)
            rows.append({**vars(case), "seed": seed, "curve": losses})
    name = torch.cuda.get_device_name() if options.device == "cuda" else None
    print(f"written: {write_results('beginnings', {'of_steps': OF_STEPS, 'runs': rows}, device=name).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

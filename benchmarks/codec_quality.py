"""What codecs cost in quality: small runs after a shared beginning, several seeds, on one device.

A small model (on a GPU the preset `tiny` with 1M parameters, on a CPU one of 0.09M) is first trained data-parallel,
then by k workers of the laboratory (diloco.lab): for each seed all cases begin with the same weights and see the same
batches. The figure is the validation loss of the outer parameters at the end; differences are taken seed by seed
against fp32 with the same outer optimizer.

    python benchmarks/codec_quality.py [--device cuda] [--processes 12] [--seconds 180] [--source TEXT]

The text is Python's own library, or any other source that `diloco train` takes.

Three groups of cases: `codecs` (Nesterov, as DiLoCo has it, and outer SGD(1.0), as SparseLoCo has it), `means` (how the
mean of sparse contributions travels), `prune` (readings of the paper's per-neuron sign pruning, Table 6).
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from codec_variants import READINGS, DenseMean, ForgottenMean, RememberedTopK, RememberingMean
from diloco.core import fragments
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.data.preparation.corpus_cache import prepare
from diloco.lab.arm import Arm
from diloco.lab.simulation.simulator import simulate
from diloco.methods import pruning
from diloco.models.native.config import ModelConfig
from diloco.models.native.presets import preset
from measuring import write_results

MODELS = {
    "cuda": preset("tiny"),
    "cpu": ModelConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        max_sequence_length=32, tie_embeddings=True,
    ),
}  # fmt: skip
INNER = {"lr": 3e-3, "warmup_steps": 50, "beta2": 0.999}
NESTEROV = "nesterov 0.7/0.8"
AVERAGING = "sgd 1.0"
OUTER: dict[str, dict[str, Any]] = {
    NESTEROV: {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.8},
    AVERAGING: {"optimizer": "sgd", "lr": 1.0},
}


# One run


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    workers: int
    outer: str
    sync: dict[str, Any] = field(default_factory=dict)
    reading: str = ""


@dataclass(frozen=True)
class Result:
    case: Case
    seed: int
    loss: float
    first_loss: float
    norm_ratio: float
    """The most that a norm was above the lower median of its round, by which a swarm judges contributions."""
    seconds: float


@dataclass(frozen=True)
class Setting:
    corpus: str
    device: str
    pretraining: int
    steps: int
    inner_steps: int
    batch_size: int


def cases(groups: list[str], workers: list[int]) -> Iterator[Case]:
    """Yield the cases, the most important first."""
    for k in workers:
        for outer in (AVERAGING,) if groups == ["means"] else OUTER:
            yield Case("codecs", "fp32", k, outer, {"codec": "fp32"})
    for k in workers:
        if "codecs" in groups:
            for codec in ("int4", "e3m0"):
                yield Case("codecs", codec, k, NESTEROV, {"codec": codec})
            yield from _with_and_without_feedback("topk", k, AVERAGING)
        if "means" in groups:
            if "codecs" not in groups:
                yield from _with_and_without_feedback("topk", k, AVERAGING)
            for variant in (DenseMean, ForgottenMean, RememberedTopK):
                yield Case("means", variant.name, k, AVERAGING, {"codec": variant.name, "error_feedback": True})
    if "prune" in groups:
        for reading in READINGS:
            for fraction in (0.25, 0.5, 0.75):
                sync = {"codec": "fp32", "prune": fraction}
                yield Case("prune", f"{fraction:.0%}", workers[0], NESTEROV, sync, reading)
    if "codecs" in groups:
        for k in workers:
            yield from _with_and_without_feedback("2bit", k, AVERAGING)
        yield Case("codecs", "int8", workers[0], NESTEROV, {"codec": "int8"})
        yield from _with_and_without_feedback("2bit", workers[0], NESTEROV)
        yield from _with_and_without_feedback("topk", workers[0], NESTEROV)


def _with_and_without_feedback(codec: str, k: int, outer: str) -> Iterator[Case]:
    yield Case("codecs", codec, k, outer, {"codec": codec})
    yield Case("codecs", f"{codec}, no feedback", k, outer, {"codec": codec, "error_feedback": False})


class Run:
    """Runs one case after another from the shared beginning of a seed."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.seed = seed
        self.corpus = Corpus.open(Path(setting.corpus))

    def arm(self, case: Case) -> Arm:
        setting = self.setting
        config = MODELS[setting.device]
        return Arm(
            case.name,
            model=asdict(config),
            workers=case.workers,
            steps=setting.steps,
            pretraining_steps=setting.pretraining,
            pretraining_batch_size=8 * setting.batch_size,
            batch_size=setting.batch_size,
            sequence_length=config.max_sequence_length,
            inner=INNER,
            outer=OUTER[case.outer],
            sync={"num_inner_steps": setting.inner_steps, "max_norm_ratio": None, **case.sync},
            eval_points=1,
        )

    def __call__(self, case: Case) -> Result:
        started = time.monotonic()
        RememberedTopK.reducer = RememberingMean()
        pruning.prune_ = READINGS[case.reading or "magnitude"]
        result = simulate(self.arm(case), self.seed, self.corpus, self.setting.device, how="stacked")
        ratio = max(row.norm_ratio or 0.0 for row in result.statistics)
        return Result(case, self.seed, result.loss, result.curve[0][1], ratio, time.monotonic() - started)


def work(setting: Setting, seed: int, todo: list[Case], ends: float, results: Any) -> None:
    """Run all cases in their order, until `ends` (time.time())."""
    torch.set_num_threads(1)
    fragments._SPAN_ELEMENTS["cpu"] = 1 << 25  # a mean in one call: RememberingMean needs it
    run = Run(setting, seed)
    for case in todo:
        if time.time() < ends:
            results.put(run(case))


# All runs


@dataclass(frozen=True)
class Row:
    case: Case
    losses: list[float]
    against_fp32: list[float]
    """Difference of the loss, seed by seed, with the same workers and outer optimizer."""
    perplexity_change: float
    """exp(mean difference) − 1."""
    norm_ratio: float


def summarise(results: list[Result]) -> list[Row]:
    by_case: dict[str, dict[int, Result]] = {}
    for result in results:
        by_case.setdefault(json.dumps(asdict(result.case)), {})[result.seed] = result
    exact = {
        (result.case.workers, result.case.outer, result.seed): result.loss
        for result in results
        if result.case.sync == {"codec": "fp32"}
    }
    rows = []
    for runs in by_case.values():
        ordered = [runs[seed] for seed in sorted(runs)]
        case = ordered[0].case
        exact_of = {result.seed: exact.get((case.workers, case.outer, result.seed)) for result in ordered}
        differences = [
            result.loss - exact_loss for result in ordered if (exact_loss := exact_of[result.seed]) is not None
        ]
        if not differences:  # the run with fp32 was not reached in time
            continue
        change = math.expm1(statistics.mean(differences))
        rows.append(
            Row(
                case,
                [result.loss for result in ordered],
                differences,
                change,
                max(result.norm_ratio for result in ordered),
            )
        )
    return sorted(rows, key=lambda row: (row.case.workers, row.case.group, row.case.outer, row.case.reading))


def show(rows: list[Row]) -> None:
    for row in rows:
        case = row.case
        name = f"{case.reading} {case.name}".strip()
        differences = " ".join(f"{difference:+.4f}" for difference in row.against_fp32)
        print(
            f"k={case.workers} {case.group:7} {case.outer:17} {name:34} loss {statistics.mean(row.losses):.4f}  "
            f"vs fp32 {differences}  ppl {row.perplexity_change:+.2%}  norm ratio {row.norm_ratio:.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", default="stdlib", help="the text, as data.source")
    parser.add_argument("--name", default="codec-quality", help="of the file of results")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further run after so many")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--groups", nargs="+", default=["codecs", "means", "prune"])
    parser.add_argument("--workers", nargs="+", type=int, default=[8, 2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pretraining", type=int, default=500)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--H", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--processes", type=int, default=3, help="at least one for each seed")
    options = parser.parse_args()
    corpus = prepare(DataConfig(source=options.source, vocab_size=MODELS[options.device].vocab_size))
    setting = Setting(
        str(corpus.folder), options.device, options.pretraining, options.steps, options.H, options.batch_size
    )
    todo = list(cases(options.groups, options.workers))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    shares = max(1, options.processes // options.seeds)
    tasks = [(seed, todo[todo_part::shares]) for seed in range(options.seeds) for todo_part in range(shares)]
    ends = time.time() + options.seconds
    processes = [
        context.Process(target=work, args=(setting, seed, todo_part, ends, queue)) for seed, todo_part in tasks
    ]
    for process in processes:
        process.start()
    results: list[Result] = []
    while any(process.is_alive() for process in processes) or not queue.empty():
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
            raise SystemExit("a process failed; its error is above")
        with suppress(Empty):
            result = queue.get(timeout=0.5)
            results.append(result)
            count = f"{len(results)}/{len(todo) * options.seeds}"
            print(f"{count} {result.case.name} k={result.case.workers} {result.seconds:.0f} s")
    rows = summarise(results)
    show(rows)
    name = torch.cuda.get_device_name() if options.device == "cuda" else None
    described = asdict(setting) | {
        "corpus": options.source,
        "tokens": sum(corpus.meta.shard_tokens),
        "parameters": MODELS[options.device].num_parameters(),
        "seeds": options.seeds,
    }
    report = {"setting": described, "rows": [asdict(row) for row in rows]}
    print(f"written: {write_results(options.name, report, device=name).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One worker is three times slower than the others: how long they wait for it, and whether all its work counts.

Three processes on this machine train a small model over gloo; an inner step is a real one, and a sleep that stands for
the computation of a large model. Each way of averaging runs by itself, the classic one for a quarter of the rounds:

    classic   every worker takes H inner steps in a round
    dynamic   sync.dynamic_steps: a slower worker takes fewer, by its measured speed
    streamed  the same with fragments, overlap and mixing
    warm      dynamic, after five steps of a warm start, in which the workers learn each other's speeds

    idle      the share of a worker's time that it spends on rounds instead of inner steps: waiting, above all
    in means  the inner steps of a worker that are in a mean, of those that it took
    steps/s   inner steps of all workers together, in a second

Without a warm start the first round is of H steps everywhere (streamed: until its first fragment is merged), since no
speed is known before it: the fast workers wait 2 H of their steps. `idle` counts it, `later` does not.
Target: with dynamic steps the fast workers idle at most 5 %, and every step of every worker is in a mean.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

from diloco.core.config import SyncConfig
from diloco.engines.connect import join
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.optimizer import DiLoCo
from measuring import write_results

WORKERS = 3
SLOW = 2
"""The number of the slow worker."""
TIMES_SLOWER = 3.0
H = 30
WAYS = {
    "classic": SyncConfig(H, timeout_seconds=120.0),
    "dynamic": SyncConfig(H, dynamic_steps=True, timeout_seconds=120.0),
    "warm": SyncConfig(H, dynamic_steps=True, warm_start=5, timeout_seconds=120.0),
    "streamed": SyncConfig(H, fragments=2, overlap_steps=5, mixing=0.5, dynamic_steps=True, timeout_seconds=120.0),
}


@dataclass(frozen=True)
class Measured:
    """What one worker saw."""

    steps: int
    steps_in_means: float
    seconds: float
    idle: float
    idle_later: float
    """The idle share after the first round."""
    digest: str


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def train(rank: int, path: str, way: str, rounds: int, step_seconds: float, results: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    join("a file", FileStore(path, WORKERS), rank, WORKERS, 60.0)
    engine = TorchDistributedEngine(timeout_seconds=120.0, owns_world=True)
    model = Blocks()
    optimizer = DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=1e-3), engine, sync=WAYS[way])
    weights_in_means = [0.0]
    fragments = optimizer.loop.state.num_fragments
    optimizer.on_round = lambda event: weights_in_means.append(
        event.result.members[rank].weight if event.result is not None and rank in event.result.contributors else 0.0
    )
    compute = step_seconds * (TIMES_SLOWER if rank == SLOW else 1.0)
    began = time.monotonic()
    first_round = (0.0, 0.0)
    while optimizer.position < rounds * H + WAYS[way].warm_start:
        x = torch.randn(8, 64)
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        time.sleep(compute)
        optimizer.step()
        if first_round[0] == 0.0 and optimizer.position >= H + 5:  # the first round is merged on all
            first_round = (time.monotonic() - began, optimizer.loop.counters.sync_seconds)
    seconds = time.monotonic() - began
    waited = optimizer.loop.counters.sync_seconds
    steps = optimizer.loop.state.steps_taken
    optimizer.finish()
    results.send(
        Measured(
            steps,
            sum(weights_in_means) / fragments + WAYS[way].warm_start,  # whose gradients are averaged
            seconds,
            waited / seconds,
            (waited - first_round[1]) / (seconds - first_round[0]),
            optimizer.anchor_digest(),
        )
    )
    engine.close()


def run(way: str, rounds: int, step_seconds: float) -> list[Measured]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        processes = []
        for rank in range(WORKERS):
            receive, send = context.Pipe(duplex=False)
            arguments = (rank, str(Path(folder) / "rendezvous"), way, rounds, step_seconds, send)
            processes.append(context.Process(target=train, args=arguments, daemon=True))
            pipes.append(receive)
            processes[-1].start()
        measured: list[Measured] = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join(30.0)
    assert len({worker.digest for worker in measured}) == 1, "the workers ended with different parameters"
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="at least 8; a fourth of them for the classic way")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="of a fast worker")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    if options.rounds < 8:
        parser.error(f"--rounds {options.rounds}: at least 8, since the classic way has a fourth of them")
    table = Table("way", "worker", "steps", "in means", "idle", "later", "steps/s of all")
    measured: dict[str, list[Measured]] = {}
    for way in options.ways:
        measured[way] = run(way, options.rounds // 4 if way == "classic" else options.rounds, options.step_seconds)
        rate = sum(measured_worker.steps for measured_worker in measured[way]) / max(
            measured_worker.seconds for measured_worker in measured[way]
        )
        for worker, measured_worker in enumerate(measured[way]):
            name = f"{worker}, {TIMES_SLOWER:g} x slower" if worker == SLOW else str(worker)
            shares = (
                f"{measured_worker.steps_in_means / measured_worker.steps:.1%}",
                f"{measured_worker.idle:.1%}",
                f"{measured_worker.idle_later:.1%}",
            )
            table.add_row(way, name, str(measured_worker.steps), *shares, "" if worker else f"{rate:.1f}")
    Console().print(table)
    if options.save:
        setting = {"workers": WORKERS, "times_slower": TIMES_SLOWER, "H": H, "rounds": options.rounds}
        ways = {way: [asdict(measured_worker) for measured_worker in workers] for way, workers in measured.items()}
        write_results("heterogeneous", {**setting, "step_seconds": options.step_seconds, "ways": ways})


if __name__ == "__main__":
    main()

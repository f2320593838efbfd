"""Workers of different speeds at equal time: synchronous rounds, asynchronous Nesterov, delayed Nesterov.

Four workers, of which one is half as fast as the others and one a third, train a small transformer on this
repository's own text (bytes; a fixed part is held out) in one thread, on a virtual clock: each run ends at the same
virtual time, so what a way of averaging wastes by waiting shows as fewer tokens. A run is the same every time.

    synchronous       every worker takes H steps in a round, and the fast ones wait for the slow ones
    dynamic steps     synchronous rounds with sync.dynamic_steps
    plain N = 1       asynchronous: Nesterov at every arrival; with the outer rate of the others, and with a lower one
    delayed N = 4     asynchronous: delayed Nesterov, the momentum moves with every fourth arrival
    delayed, dynamic  the same with sync.dynamic_steps

The loss is that of the anchor on the held-out text, after `finish`. No time is counted for communication.
"""

import argparse
import heapq
import statistics
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import Nesterov
from diloco.engines.asynchronous import replay
from diloco.engines.local import LocalSwarm
from diloco.methods.dynamic_steps import DynamicSteps
from diloco.models.native.config import ModelConfig
from diloco.models.native.transformer import Transformer
from diloco.optimizer import DiLoCo
from diloco.outer.loop import OuterLoop
from measuring import write_results

SECONDS = (1.0, 1.0, 2.0, 3.0)
"""What an inner step of each worker takes on the virtual clock."""
H = 10
LENGTH = 48
BATCH = 4
SHAPE = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_sequence_length=LENGTH,
    tie_embeddings=True,
)


@dataclass(frozen=True)
class Way:
    """A way of averaging."""

    asynchronous: bool
    dynamic: bool = False
    arrivals: int | None = None
    lr: float = 0.7

    def sync(self) -> SyncConfig:
        return SyncConfig(
            H,
            "fp32",
            dynamic_steps=self.dynamic,
            max_norm_ratio=None,
            asynchronous=self.asynchronous,
            momentum_arrivals=self.arrivals,
        )


WAYS = {
    "synchronous": Way(False),
    "dynamic steps": Way(False, dynamic=True),
    "plain N = 1, outer rate 0.7": Way(True, arrivals=1),
    "plain N = 1, outer rate 0.175": Way(True, arrivals=1, lr=0.175),
    "delayed N = 4": Way(True, arrivals=4),
    "delayed N = 4, dynamic steps": Way(True, dynamic=True, arrivals=4),
}


def text() -> Tensor:
    folder = Path(__file__).parent.parent
    files = sorted([*folder.glob("docs/**/*.md"), *folder.glob("src/**/*.py")])
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


class World:
    """One run: the workers, their data and their virtual time."""

    def __init__(self, way: Way, seed: int, data: Tensor, momentum: float) -> None:
        self.data = data[: -len(data) // 20]
        self.held_out = data[-len(data) // 20 :]
        self.seed = seed
        self.models: list[Transformer] = []
        self.optimizers: list[DiLoCo] = []
        for engine in LocalSwarm(len(SECONDS)).engines():
            torch.manual_seed(seed)
            model = Transformer(SHAPE)
            inner = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
            optimizer = DiLoCo(model, inner, engine, sync=way.sync(), outer=Nesterov(way.lr, momentum))
            for method in optimizer.loop.methods:
                if isinstance(method, DynamicSteps):
                    method.clock = partial(self._time_of, optimizer.loop)
                    method.begin_anew()
            self.models.append(model)
            self.optimizers.append(optimizer)

    @staticmethod
    def _time_of(loop: OuterLoop) -> float:
        return loop.state.steps_taken * SECONDS[loop.engine.worker]

    def inner_step(self, worker: int) -> None:
        model = self.models[worker]
        optimizer = self.optimizers[worker]
        number = optimizer.loop.state.steps_taken
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + 10_007 * number + worker)
        share = len(self.data) // len(SECONDS)  # each worker reads its own part of the text
        starts = torch.randint(share - LENGTH - 1, (BATCH,), generator=generator) + worker * share
        windows = torch.stack([self.data[start : start + LENGTH + 1] for start in starts]).long()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (number + 1) / 20)
        optimizer.zero_grad()
        model.loss(windows[:, :-1], windows[:, 1:]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.inner_step()

    def run(self, way: Way, until: float) -> None:
        if way.asynchronous:
            replay(self._step, SECONDS, until)
        else:
            self._in_rounds(until)
        self._finish(way)

    def _step(self, worker: int) -> None:
        self.inner_step(worker)
        self.optimizers[worker].post()
        self.optimizers[worker].merge()

    def _in_rounds(self, until: float) -> None:
        """Let each worker train to the end of its turn; the next turn begins for all when the last worker has come."""
        round_started = 0.0
        while round_started < until:
            ends = [(round_started, worker) for worker in range(len(SECONDS))]
            heapq.heapify(ends)
            arrived: list[float] = []
            while ends:
                time, worker = heapq.heappop(ends)
                optimizer = self.optimizers[worker]
                self.inner_step(worker)
                optimizer.post()
                if optimizer.loop.in_flight:
                    arrived.append(time + SECONDS[worker])
                else:
                    heapq.heappush(ends, (time + SECONDS[worker], worker))
            for optimizer in self.optimizers:
                optimizer.merge()
            round_started = max(arrived)

    def _finish(self, way: Way) -> None:
        if way.asynchronous:
            for optimizer in self.optimizers:  # the last arrivals in worker order
                if optimizer.loop.state.steps_taken > optimizer.loop.state.merged_at[0]:
                    optimizer.loop.post_fragment(0)
                    optimizer.loop.merge_pending()
        threads = [threading.Thread(target=optimizer.finish) for optimizer in self.optimizers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @torch.no_grad()
    def loss(self) -> float:
        model = self.models[0].eval()
        length = LENGTH + 1
        windows = self.held_out[: len(self.held_out) // length * length].view(-1, length).long()[:384]
        return float(model.loss(windows[:, :-1], windows[:, 1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="virtual time: the inner steps of a fast worker")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer optimizer")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results, by momentum")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = text()
    results_by_way = {}
    table = Table("way", "inner steps of all", "outer steps", "validation loss", "seeds")
    for name in options.ways:
        way = WAYS[name]
        losses = []
        for seed in range(options.seeds):
            world = World(way, seed, data, options.momentum)
            world.run(way, options.seconds)
            losses.append(world.loss())
        steps = sum(optimizer.loop.state.steps_taken for optimizer in world.optimizers)
        results_by_way[name] = {"losses": losses, "inner_steps": steps, "outer_steps": world.optimizers[0].rounds}
        losses_text = " ".join(f"{loss:.3f}" for loss in losses)
        table.add_row(name, str(steps), str(world.optimizers[0].rounds), f"{statistics.fmean(losses):.3f}", losses_text)
        print(name, losses_text, flush=True)
    Console().print(table)
    if options.save:
        setting = {
            "step_seconds": SECONDS,
            "H": H,
            "batch": BATCH,
            "length": LENGTH,
            "virtual_seconds": options.seconds,
        }
        write_results(
            f"asynchronous-{options.momentum:g}",
            {**setting, "momentum": options.momentum, "bytes_of_text": len(data), "ways": results_by_way},
        )


if __name__ == "__main__":
    main()

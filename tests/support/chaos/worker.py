"""One worker of the chaos run: a small language model, DiLoCo and the swarm's engine, in a loop as a user's would be.

It writes down what it sees (`Story`), a line each, so that nothing is lost when it is killed. `calm` is the same
training without any chaos: the same number of rounds on the local engine, which a calm swarm equals bit for bit.
"""

import json
import math
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.core.config import SyncConfig
from diloco.core.merging import MAX_WEIGHT_ROUNDS
from diloco.engines.base import Engine, PendingRound
from diloco.engines.local import LocalSwarm
from diloco.engines.rounds import Contribution, RoundKey
from diloco.errors import DiLoCoError
from diloco.models.native.config import ModelConfig
from diloco.models.native.transformer import Transformer
from diloco.optimizer import DiLoCo
from diloco.outer.elastic import ElasticLoop
from diloco.outer.rounds import RoundEvent
from diloco.swarm.engine import SwarmEngine
from diloco.swarm.settings import Settings

H = 10
LENGTH, BATCH = 32, 8
LEARNING_RATE, WARMUP = 4e-3, 20
_VALIDATION_WINDOWS = 64
SHAPE = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=160,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_sequence_length=LENGTH,
    tie_embeddings=True,
)


@dataclass(frozen=True)
class Task:
    """What a worker is to do, and how badly."""

    rounds: int
    story: Path
    life: str
    """A name for this process: a machine may have several, one after another."""
    step_seconds: float
    """No inner step is quicker than this, so that the machine's load does not decide which worker is slow."""
    lie: str = ""
    """nan or huge: what it sends instead of its outer gradient; greedy: it claims five rounds of work in every one;
    changing: honest work, greedy, against the others, next to nothing, in turn and none of them provable."""

    overlap_steps: int = 0

    @property
    def sync(self) -> SyncConfig:
        # In so short a run a worker that returns may differ from the others by 25 times their norm (ADR 22).
        return SyncConfig(H, "int8", max_norm_ratio=1000.0, timeout_seconds=120.0, overlap_steps=self.overlap_steps)


# The training


@cache
def text() -> Tensor:
    """Prose that comes with Python, as bytes below 128."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    return torch.tensor([min(byte, 127) for byte in path.read_bytes()], dtype=torch.int64)


def windows(starts: Tensor) -> tuple[Tensor, Tensor]:
    taken = text()[starts.unsqueeze(1) + torch.arange(LENGTH + 1)]
    return taken[:, :-1], taken[:, 1:]


def batch(number: int, step: int) -> tuple[Tensor, Tensor]:
    """Of the first nine tenths of the text."""
    generator = torch.Generator().manual_seed(1_000_003 * (number + 1) + step)
    return windows(torch.randint(0, len(text()) * 9 // 10 - LENGTH - 1, (BATCH,), generator=generator))


@torch.no_grad()
def validation_loss(model: Transformer) -> float:
    """Of the last tenth."""
    starts = torch.linspace(len(text()) * 0.9, len(text()) - LENGTH - 2, _VALIDATION_WINDOWS).long()
    return float(model.loss(*windows(starts)))


def learning_rate(position: int, last: int) -> float:
    if position < WARMUP:
        return LEARNING_RATE * (position + 1) / WARMUP
    return LEARNING_RATE * (0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, position / last))) / 2)


def build(engine: Engine, sync: SyncConfig, last: int) -> tuple[Transformer, DiLoCo]:
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    optimizer = DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), engine, sync=sync)
    optimizer.loop.end_at(last)
    return model, optimizer


def inner_step(model: Transformer, optimizer: DiLoCo, number: int, step: int, last: int) -> float:
    """`step`: of this worker's own; the learning rate is that of its position."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(optimizer.loop.inner_steps, last)
    optimizer.zero_grad()
    loss = model.loss(*batch(number, step))
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.inner_step()
    return float(loss.detach())


def calm(workers: int, rounds: int) -> tuple[float, str]:
    """The loss and the digest after as many rounds in peace."""
    torch.set_num_threads(1)
    last = rounds * H
    sync = Task(rounds, Path(), "", 0.0).sync
    pairs = [build(engine, sync, last) for engine in LocalSwarm(workers).engines()]
    for step in range(last):
        for number, (model, optimizer) in enumerate(pairs):
            inner_step(model, optimizer, number, step, last)
            optimizer.post()
        for _, optimizer in pairs:
            optimizer.merge()
    model, optimizer = pairs[0]
    with optimizer.outer_parameters():
        return validation_loss(model), optimizer.anchor_digest()


# One worker of the swarm


class Story:
    """What one process has seen: a line of JSON for each thing."""

    def __init__(self, task: Task) -> None:
        self._life, self._file = task.life, task.story.open("a", buffering=1)

    def tell(self, kind: str, **fields: Any) -> None:
        line = {"life": self._life, "time": time.monotonic(), "kind": kind, **fields}
        self._file.write(json.dumps(line) + "\n")


_CHANGING = ("honest", "against", "greedy", "against", "small", "honest", "against")


class Liar(SwarmEngine):
    """Sends what it has not claimed."""

    lie = ""

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        lie = self.lie if self.lie != "changing" else _CHANGING[key.sequence % len(_CHANGING)]
        if lie == "honest":
            return super().start_round(key, contribution, deadline_seconds)
        if lie in ("against", "small"):
            vector, factor = contribution.vector, -2.9 if lie == "against" else 1e-3
            if vector.num_bytes:
                vector.encode(0, factor * vector.decode(0, vector.layout.num_parts))
                norm = float(torch.linalg.vector_norm(vector.decode(0, vector.layout.num_parts)))
                contribution = replace(contribution, norm=norm)
            return super().start_round(key, contribution, deadline_seconds)
        if lie == "greedy":
            most = MAX_WEIGHT_ROUNDS * contribution.round_weight
            return super().start_round(key, replace(contribution, weight=most), deadline_seconds)
        vector = contribution.vector
        wrong = float("nan") if self.lie == "nan" else 1e30
        if vector.num_bytes:
            vector.encode(0, torch.full((vector.layout.numel,), wrong))
        if self.lie == "nan" and key.sequence % 2:  # half the time it even says so
            contribution = replace(contribution, norm=wrong)
        return super().start_round(key, contribution, deadline_seconds)


def train(settings: Settings, pipe: Connection, task: Task) -> None:
    """Says its number when it has joined, and goes on when it hears anything."""
    story = Story(task)
    text()
    engine: SwarmEngine | None = None
    try:
        kind = Liar if task.lie else SwarmEngine
        engine = kind(settings, on_event=lambda type_, fields: story.tell("event", type=type_, fields=dict(fields)))
        if isinstance(engine, Liar):
            engine.lie = task.lie
        _train(engine, pipe, task, story)
    except DiLoCoError as error:
        story.tell("error", error=type(error).__name__, text=str(error))
        pipe.send((True, -1))
    finally:
        if engine is not None:
            engine.close()


def _train(engine: SwarmEngine, pipe: Connection, task: Task, story: Story) -> None:
    last = task.rounds * H
    model, optimizer = build(engine, task.sync, last)
    outer, losses = optimizer.loop, list[float]()
    here: dict[str, Any] = {"number": engine.worker}

    def place() -> dict[str, Any]:
        state = {"digest": optimizer.anchor_digest(), "position": outer.inner_steps, "work": outer.state.steps_taken}
        return here | state | {"sequence": outer.sequence}

    outer.on_round = lambda event: story.tell("round", **place() | _told(event, losses))
    assert isinstance(outer, ElasticLoop)
    outer.on_resync = lambda reason, _: story.tell("resync", reason=reason, **place())
    story.tell("start", **place())
    pipe.send((True, engine.worker))
    pipe.recv()
    while outer.inner_steps < last:
        began = time.monotonic()
        losses.append(inner_step(model, optimizer, engine.worker, outer.state.steps_taken, last))
        time.sleep(max(0.0, began + task.step_seconds - time.monotonic()))
        engine.progress(
            inner_steps=outer.inner_steps,
            tokens=outer.state.steps_taken * BATCH * LENGTH,
            loss=losses[-1],
            step_seconds=time.monotonic() - began,
        )
        optimizer.post()
        optimizer.merge()
    optimizer.finish()
    counts = {"resyncs": outer.counters.resyncs, "failed": outer.counters.rounds_failed}
    story.tell("end", **place(), **counts, loss=validation_loss(model))


def _told(event: RoundEvent, losses: list[float]) -> dict[str, Any]:
    loss, result = _mean(losses), event.result
    losses.clear()
    told: dict[str, Any] = {"round": event.key.sequence, "failure": event.failure, "loss": loss}
    if result is not None:
        told["weights"] = {str(m.worker): m.weight for m in result.members if m.worker in result.contributors}
        told["total"] = result.total_weight
        told["refused"] = {str(number): reason for number, reason in result.refused.items()}
        told["roster"] = list(result.roster)
        told["seconds"] = event.waited_seconds
    return told


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses) if losses else -1.0

"""A worker of a swarm whose model is one vector, with a gradient known from worker and step.

From the workers of a round and their weights follows what the anchor must be, and so whether work was lost, doubled or
mixed.
"""

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import SGD
from diloco.optimizer import DiLoCo
from diloco.outer.rounds import RoundEvent
from diloco.swarm.engine import SwarmEngine
from diloco.swarm.settings import Settings

_RAMP = 7
"""A gradient's elements are its size times 1, 2, …, 7, 1, 2, …"""
UNIT = 2.0**-10


@dataclass(frozen=True)
class Round:
    """How a worker ended a command's round."""

    worker: int
    sequence: int
    seconds: float
    """From the post to the merged anchor."""
    failure: str | None
    weights: dict[int, float]
    """Of those that are in the mean."""
    digest: str
    anchor: float
    """The anchor's size; nan if it is not a ramp any more."""
    steps_taken: int
    resyncs: int
    bytes_sent: int


class Vector(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(numel))


def gradient(worker: int, step: int) -> float:
    """Its size; exact in fp32, and another one for every worker and step."""
    return UNIT * (worker + 1) * (1 + step % 5)


def average(settings: Settings, pipe: Connection, numel: int, sync: SyncConfig) -> None:
    """Commands: True: train to the next round, and end it; None: the end. Answers: Round."""
    engine = SwarmEngine(settings)
    model = Vector(numel)
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), engine, sync=sync, outer=SGD(lr=1.0))
    ramp = torch.arange(numel, dtype=torch.float32).remainder_(_RAMP).add_(1.0)
    model.vector.grad = torch.empty(numel)
    pipe.send((True, engine.worker))
    outer = optimizer.loop
    while pipe.recv() is not None:
        while outer.inner_steps < outer.schedule.post_step(outer.sequence):
            torch.mul(ramp, gradient(engine.worker, outer.state.steps_taken), out=model.vector.grad)
            optimizer.inner_step()
        pipe.send((True, _round(engine, optimizer, ramp)))
    engine.close()
    pipe.send((True, None))


def _round(engine: SwarmEngine, optimizer: DiLoCo, ramp: Tensor) -> Round:
    events: list[RoundEvent] = []
    optimizer.loop.on_round = events.append
    outer, started = optimizer.loop, time.monotonic()
    outer.post()
    outer.merge_pending()
    seconds = time.monotonic() - started
    anchor = outer.state.fragments[0].anchor_values()
    size = float(anchor[0])
    event = events[-1] if events else None
    result = None if event is None else event.result
    weights = {} if result is None else {m.worker: m.weight for m in result.members if m.worker in result.contributors}
    return Round(
        engine.worker,
        outer.sequence - 1 if event is None else event.key.sequence,
        seconds,
        "nothing was posted" if event is None else event.failure,
        weights,
        optimizer.anchor_digest(),
        size if torch.allclose(anchor, ramp * size, rtol=1e-5, atol=0.0) else float("nan"),
        outer.state.steps_taken,
        outer.counters.resyncs,
        0 if result is None else result.bytes_sent,
    )

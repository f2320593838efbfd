"""What the workers of benchmarks/swarm.py do.

    exchange        rounds of the bare engine, one at a command: from an outer gradient in fp32 to the decoded mean
    average         the same with DiLoCo around it
    train_freely    rounds as they come, until told to stop

The model of the latter two is one vector, and its gradient is known from worker and step: whoever knows who was in a
round, and with which weight, knows what the anchor must be, and so whether anybody's work was lost, doubled or mixed.
"""

import math
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.digest import digest
from diloco.core.fragments import PartLayout, span_elements
from diloco.core.outer_optimizers import SGD
from diloco.engines.rounds import Contribution, GlobalState, RoundKey
from diloco.engines.swarm.engine import SwarmEngine
from diloco.engines.swarm.settings import Settings
from diloco.optimizer import DiLoCo
from diloco.outer.ranks.worker_round import RoundEvent
from swarm_hivemind import Exchange

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
    """Of those who are in the mean."""
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
            torch.mul(ramp, gradient(engine.worker, outer.steps_taken), out=model.vector.grad)
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
    anchor = outer.fragments[0].anchor_values()
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
        outer.steps_taken,
        outer.resyncs,
        0 if result is None else result.bytes_sent,
    )


# The bare engine


def exchange(settings: Settings, pipe: Connection, numel: int) -> None:
    """Commands: a codec's name; None: the end. Says "ready", and after another command its Exchange."""
    engine = SwarmEngine(settings)
    engine.serve_state(lambda: GlobalState({"0.anchor": torch.zeros(1)}, {"sequence": 0}, "same"))
    engine.fetch_state()
    gradient_, mean = torch.randn(numel), torch.empty(numel)
    sequence, vectors = 0, dict[str, EncodedVector]()
    pipe.send((True, engine.worker))
    while (name := pipe.recv()) is not None:
        vector = vectors.setdefault(name, EncodedVector(codec(name), PartLayout(numel)))
        pipe.send((True, "ready"))
        pipe.recv()
        started = time.monotonic()
        norm = _encode(gradient_, vector)
        contribution = Contribution(vector, 1.0, norm, "anchor", f"vector {name}"[:16], 1000.0)
        result = engine.start_round(RoundKey(sequence, 0), contribution, 120.0).wait()
        _decode(result.mean, mean)
        seconds = time.monotonic() - started
        sequence += 1
        pipe.send((True, Exchange(seconds, result.bytes_sent, digest(mean))))
    engine.close()
    pipe.send((True, None))


def _spans(vector: EncodedVector) -> "list[tuple[int, int, slice]]":
    """As the outer loop goes through a fragment: first part, number of parts, elements."""
    part, layout = vector.layout.part_elements, vector.layout
    parts = max(1, span_elements(vector.data.device) // part)
    firsts = range(0, layout.num_parts, parts)
    counts = [min(parts, layout.num_parts - first) for first in firsts]
    return [(f, n, slice(f * part, min((f + n) * part, layout.numel))) for f, n in zip(firsts, counts, strict=True)]


def _encode(values: Tensor, vector: EncodedVector) -> float:
    norms = []
    for first, _, elements in _spans(vector):
        norms.append(float(torch.linalg.vector_norm(values[elements])))
        vector.encode(first, values[elements])
    return math.hypot(*norms)


def _decode(vector: EncodedVector, into: Tensor) -> None:
    for first, parts, elements in _spans(vector):
        into[elements].copy_(vector.decode(first, parts))


# Rounds as they come


@dataclass(frozen=True)
class Joined:
    """How a worker came in; times are from its first line on."""

    worker: int
    sequence: int
    """The first round that it can be in."""
    member_seconds: float
    state_seconds: float


def train_freely(settings: Settings, pipe: Connection, numel: int, sync: SyncConfig, step_seconds: float) -> None:
    """Says Joined; at a command it ends, and says in which rounds its work is, and when each ended."""
    began = time.monotonic()
    engine = SwarmEngine(settings)
    member_seconds = time.monotonic() - began
    model = Vector(numel)
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1e-3), engine, sync=sync, outer=SGD(lr=1.0))
    rounds: list[tuple[int, float, bool]] = []

    def note(event: RoundEvent) -> None:
        mine = event.result is not None and engine.worker in event.result.contributors
        rounds.append((event.key.sequence, time.monotonic(), mine))

    optimizer.loop.on_round = note
    pipe.send((True, Joined(engine.worker, optimizer.loop.sequence, member_seconds, time.monotonic() - began)))
    model.vector.grad = torch.randn(numel)
    while not pipe.poll():
        time.sleep(step_seconds)
        optimizer.step()
    engine.close()
    pipe.send((True, rounds))

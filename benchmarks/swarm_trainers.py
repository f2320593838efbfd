"""What the workers of benchmarks/swarm.py do.

    exchange        rounds of the bare engine, one at a command: from an outer gradient in fp32 to the decoded mean
    train_freely    rounds as they come, until told to stop

A third one, `average`, is shared with the tests: tests/support/swarm/trainers.py.
"""

import math
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

import search_path  # noqa: F401  `support` of the tests
from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.digest import digest
from diloco.core.fragments import PartLayout, span_elements
from diloco.core.outer_optimizers import SGD
from diloco.engines.rounds import Contribution, GlobalState, RoundKey
from diloco.optimizer import DiLoCo
from diloco.outer.rounds import RoundEvent
from diloco.swarm.engine import SwarmEngine
from diloco.swarm.settings import Settings
from support.swarm.trainers import Vector
from swarm_hivemind import Exchange

# The bare engine


def exchange(settings: Settings, pipe: Connection, numel: int) -> None:
    """Commands: a codec's name; None: the end. Says "ready", and after another command its Exchange."""
    engine = SwarmEngine(settings)
    engine.serve_state(lambda: GlobalState({"0.anchor": torch.zeros(1)}, {"sequence": 0}, "same"))
    engine.fetch_state()
    gradient, mean = torch.randn(numel), torch.empty(numel)
    sequence, vectors = 0, dict[str, EncodedVector]()
    pipe.send((True, engine.worker))
    while (name := pipe.recv()) is not None:
        vector = vectors.setdefault(name, EncodedVector(codec(name), PartLayout(numel)))
        pipe.send((True, "ready"))
        pipe.recv()
        started = time.monotonic()
        norm = _encode(gradient, vector)
        contribution = Contribution(vector, 1.0, norm, "anchor", "vector", 1000.0)
        result = engine.start_round(RoundKey(sequence, 0), contribution, 120.0).wait()
        _decode(result.mean, mean)
        seconds = time.monotonic() - started
        sequence += 1
        pipe.send((True, Exchange(seconds, result.bytes_sent, digest(mean))))
    engine.close()
    pipe.send((True, None))


def _spans(vector: EncodedVector) -> "list[tuple[int, int, slice]]":
    """As the outer loop goes through a fragment: first part, number of parts, elements."""
    part_elements, layout = vector.layout.part_elements, vector.layout
    parts = max(1, span_elements(vector.data.device) // part_elements)
    firsts = range(0, layout.num_parts, parts)
    counts = [min(parts, layout.num_parts - first) for first in firsts]
    return [
        (f, n, slice(f * part_elements, min((f + n) * part_elements, layout.numel)))
        for f, n in zip(firsts, counts, strict=True)
    ]


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
        took_part = event.result is not None and engine.worker in event.result.contributors
        rounds.append((event.key.sequence, time.monotonic(), took_part))

    optimizer.loop.on_round = note
    pipe.send((True, Joined(engine.worker, optimizer.loop.state.sequence, member_seconds, time.monotonic() - began)))
    model.vector.grad = torch.randn(numel)
    while not pipe.poll():
        time.sleep(step_seconds)
        optimizer.step()
    engine.close()
    pipe.send((True, rounds))

"""The functions that the workers of benchmarks/swarm.py run, each in a process of its own.

    exchange        rounds of the bare engine, one at a command: from an outer gradient in fp32 to the decoded mean
    average_raw     the same with Hivemind's own averaging as it is, in fp16
    pass_streams    the bytes of a round through plain streams of p2pd
    train_freely    rounds as they come, until told to stop

A fifth one, `average`, is shared with the tests: tests/support/swarm/trainers.py.
"""

import asyncio
import math
import multiprocessing
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
from diloco.swarm.network.listening import ListenConfig
from diloco.swarm.network.p2pd.transport import P2pdTransport, protocol_of
from diloco.swarm.network.transport import Stream
from diloco.swarm.settings import Settings
from support.swarm.trainers import Vector

_MATCHMAKING_SECONDS = 5.0
_HIVEMIND_ROUND_SECONDS = 120.0
_STREAM_SECONDS = 120.0


@dataclass(frozen=True)
class Exchange:
    """One round as one peer saw it. `bytes_sent`: as the engine counts them; 0 where it does not."""

    seconds: float
    bytes_sent: int = 0
    digest: str = ""


# The bare engine


def exchange(settings: Settings, pipe: Connection, numel: int) -> None:
    """Average one vector in rounds of the bare engine.

    Commands: a codec's name, answered by "ready", then any other command, answered by an Exchange; None: the end.
    """
    engine = SwarmEngine(settings)
    engine.serve_state(lambda: GlobalState({"0.anchor": torch.zeros(1)}, {"sequence": 0}, "same"))
    engine.fetch_state()
    gradient = torch.randn(numel)
    mean = torch.empty(numel)
    sequence = 0
    vectors: dict[str, EncodedVector] = {}
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
    """Cut a vector as the outer loop cuts a fragment: first part, number of parts and elements of each span."""
    part_elements = vector.layout.part_elements
    layout = vector.layout
    parts = max(1, span_elements(vector.data.device) // part_elements)
    firsts = range(0, layout.num_parts, parts)
    counts = [min(parts, layout.num_parts - first) for first in firsts]
    return [
        (first, count, slice(first * part_elements, min((first + count) * part_elements, layout.numel)))
        for first, count in zip(firsts, counts, strict=True)
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


# Hivemind's own averaging. A round is timed from the moment when the group stands (matchmaking is not counted) to the
# averaged vector in memory.


def average_raw(settings: Settings, pipe: Connection, numel: int, first: list[str]) -> None:
    """Average one vector with Hivemind. Sends its addresses first.

    Commands: any command, answered by "ready", then another, answered by an Exchange; None: the end.
    """
    multiprocessing.set_start_method("fork", force=True)  # it can start its own processes in no other way
    import hivemind
    from hivemind.averaging.control import AveragingStage
    from hivemind.compression import Float16Compression

    dht = hivemind.DHT(start=True, initial_peers=first, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    vector = torch.randn(numel)
    averager = hivemind.averaging.DecentralizedAverager(
        [vector],
        dht,
        start=True,
        prefix=settings.label,
        target_group_size=2,
        min_group_size=2,
        min_matchmaking_time=_MATCHMAKING_SECONDS,
        request_timeout=_MATCHMAKING_SECONDS / 2,
        compression=Float16Compression(),
    )
    pipe.send((True, [str(address) for address in dht.get_visible_maddrs()]))
    while pipe.recv() is not None:
        control = averager.step(wait=False, require_trigger=True, timeout=_HIVEMIND_ROUND_SECONDS)
        while control.stage not in (AveragingStage.AWAITING_TRIGGER, AveragingStage.FINISHED):
            time.sleep(0.005)
        pipe.send((True, "ready"))
        pipe.recv()
        started = time.monotonic()
        control.allow_allreduce()
        control.result(_HIVEMIND_ROUND_SECONDS)
        with averager.get_tensors() as tensors:
            size = float(tensors[0][0])
        pipe.send((True, Exchange(time.monotonic() - started, digest=f"{size:.3f}")))
    averager.shutdown()
    dht.shutdown()
    pipe.send((True, None))


# The least that a round can cost over p2pd: its bytes through plain streams between two peers, and nothing else. As in
# a round, each of two peers opens a stream to the other, sends its parts of the other's range and gets the mean of that
# range back at the same time. p2pd encrypts them (TLS 1.3); nothing is encoded, reduced, hashed or checked.


def pass_streams(settings: Settings, pipe: Connection, num_bytes: int, first: tuple[str, list[str]] | None) -> None:
    """Send and receive `num_bytes` in each round. Sends (its name, its addresses) first, and receives the other's name.

    Commands: any command, answered by "ready", then another, answered by an Exchange; None: the end.
    """
    asyncio.run(_pass(settings, pipe, num_bytes // 2, first))


async def _pass(settings: Settings, pipe: Connection, half: int, first: tuple[str, list[str]] | None) -> None:
    outgoing = memoryview(bytes(half))
    incoming = [memoryview(bytearray(half)) for _ in range(2)]
    served: asyncio.Queue[None] = asyncio.Queue()

    async def both_ways(stream: Stream, into: memoryview) -> None:
        sending: Coroutine[Any, Any, None] = stream.write(outgoing, _STREAM_SECONDS)
        await asyncio.gather(sending, stream.read_into(into, _STREAM_SECONDS))

    async def serve(stream: Stream) -> None:
        await both_ways(stream, incoming[0])
        await served.put(None)

    async def refuse(_peer: str, _data: bytes) -> bytes:
        raise NotImplementedError

    key = Path(settings.folder) / "streams.key"
    transport = await P2pdTransport.create(key, protocol_of("streams"), ListenConfig(host="127.0.0.1"))
    try:
        await transport.serve(refuse, serve)
        if first is not None:
            await transport.connect(*first, _STREAM_SECONDS)
        pipe.send((True, (transport.peer, await transport.addresses())))
        other_peer = await asyncio.to_thread(pipe.recv)
        while await asyncio.to_thread(pipe.recv) is not None:
            pipe.send((True, "ready"))
            await asyncio.to_thread(pipe.recv)
            started = time.monotonic()
            stream = await transport.open_stream(other_peer, _STREAM_SECONDS)
            async with asyncio.timeout(_STREAM_SECONDS):
                await asyncio.gather(both_ways(stream, incoming[1]), served.get())
            stream.close()
            pipe.send((True, Exchange(time.monotonic() - started, 2 * half)))
        pipe.send((True, None))
    finally:
        await transport.close()


# Rounds as they come


@dataclass(frozen=True)
class Joined:
    """How a worker joined; times are from its first line of code on."""

    worker: int
    sequence: int
    """The first round that it can be in."""
    member_seconds: float
    state_seconds: float


def train_freely(settings: Settings, pipe: Connection, numel: int, sync: SyncConfig, step_seconds: float) -> None:
    """Train until a command comes. Sends Joined first, and at the end its rounds: sequence, time of the end, and
    whether the worker's work is in the mean."""
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

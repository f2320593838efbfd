"""The global state on its way to whoever needs it: a joiner, or a worker that missed rounds.

A source serves a snapshot that its trainer makes beside training; nobody waits for the transfer. Rounds that end
meanwhile are made up for with their means, which all members keep for a while (kept.py): so a slow line catches up,
and a worker that missed a round or two needs no snapshot at all. If a source dies, another is asked. What arrives is
counted and bounded; nothing is unpickled (safetensors and numbers).
"""

import asyncio
import logging
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.engines.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.engines.swarm.node import clock
from diloco.engines.swarm.node.membership import Membership
from diloco.engines.swarm.node.participant import TakingPart
from diloco.engines.swarm.node.peer import Peer
from diloco.engines.swarm.node.plan import Plan
from diloco.engines.swarm.node.recent_rounds import KeptRounds
from diloco.engines.swarm.node.trainer import FetchedState, RoundMean, Snapshot, Trainer
from diloco.engines.swarm.node.wire import Malformed, Message, pack, read_frame, write_frame
from diloco.engines.swarm.shared_memory import SharedMemory
from diloco.errors import EngineError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_LARGEST_STATE = 1 << 42
_AT_ONCE = 2
_POLL_SECONDS = 0.25
_NOBODY_SECONDS = 60.0


@dataclass(frozen=True)
class _Base:
    """What the worker will hold before the means: a snapshot, or what its trainer has already."""

    snapshot: Snapshot | None
    sequence: int


class States:
    def __init__(self, membership: Membership, taking_part: TakingPart, trainer: Trainer) -> None:
        self.membership, self.taking_part, self._trainer = membership, taking_part, trainer
        self.kept: KeptRounds = taking_part.kept
        self._serving = asyncio.Semaphore(_AT_ONCE)
        self._snapshot: asyncio.Task[Snapshot | None] | None = None
        self._random = random.Random(membership.me)  # each node asks in an order of its own

    @property
    def _stall(self) -> float:
        return self.taking_part.stall_seconds

    # Giving

    async def serve(self, stream: Stream) -> None:
        async with self._serving:
            snapshot = await self._shared_snapshot()
            if snapshot is None:
                await write_frame(stream, pack("none"), self._stall)
                return
            head = pack(
                "state",
                numbers=dict(snapshot.numbers),
                layout=snapshot.layout_digest,
                note=snapshot.note,
                size=snapshot.data.num_bytes,
            )
            await write_frame(stream, head, self._stall)
            data = snapshot.data.view
            for first in range(0, len(data), _CHUNK_BYTES):
                await stream.write(data[first : first + _CHUNK_BYTES], self._stall)
            await stream.read(1, self._stall)  # it says when it has all: closing earlier may cut what is on its way

    async def _shared_snapshot(self) -> Snapshot | None:
        """Several that ask at the same moment get the same one."""
        if self._snapshot is None:
            self._snapshot = asyncio.ensure_future(self._trainer.snapshot())
            self._snapshot.add_done_callback(lambda _: setattr(self, "_snapshot", None))
        return await asyncio.shield(self._snapshot)

    async def serve_mean(self, stream: Stream, message: Message) -> None:
        kept = self.kept.get(message.number("sequence"))
        if kept is None:
            return
        await stream.write(len(kept.mean).to_bytes(8, "little"), self._stall)
        view = memoryview(kept.mean)
        for first in range(0, len(view), _CHUNK_BYTES):
            await write_frame(stream, view[first : first + _CHUNK_BYTES], self._stall)
        await stream.read(1, self._stall)

    def outcome(self, message: Message) -> dict[str, object]:
        kept = self.kept.get(message.number("sequence"))
        return {"state": "unknown"} if kept is None else {"state": "kept", "plan": kept.plan.to_wire()}

    # Taking

    async def fetch(self) -> FetchedState | None:
        """The others' state; None if this worker has it, or nobody else has a later one. Raises EngineError."""
        status = self.membership.status
        nobody_since = clock.now()
        while not status.holds:
            sources = self._sources()
            if sources:
                nobody_since = clock.now()
            elif clock.now() - nobody_since > (4 * self._stall if self.kept.held is None else self._stall / 4):
                if self.kept.held is None:
                    raise EngineError(
                        "nobody who has the state of this run answers: the other workers have ended or cannot be "
                        "reached. Ask for a new invitation, or go on from a checkpoint where there is one"
                    )
                status.holds = True  # everyone else is gone: what this worker has is all there is
                return None
            for source in sources:
                arrived = await self._from(source)
                if arrived is not None:
                    self._arrived(arrived)
                    return arrived
            await self.membership.wait_for_change(_POLL_SECONDS)
        return None

    def _sources(self) -> list[Peer]:
        """Those who have the state, the furthest first; not always the same one among equals."""
        holders = [peer for peer in self.membership.live() if peer.status.holds]
        self._random.shuffle(holders)
        return sorted(holders, key=lambda peer: -peer.status.ended)

    async def _from(self, source: Peer) -> FetchedState | None:
        try:
            base = await self._base(source)
            if base is None:
                return None
            means, sequence = await self._means(base.sequence, source)
            return FetchedState(base.snapshot, means, sequence, self._position())
        except (Unreachable, CallRefused, Malformed) as problem:
            logger.info("no state from %s: %s", source.name, problem)
            self.kept.held = None if isinstance(problem, CallRefused) else self.kept.held
            if isinstance(problem, Unreachable):
                self.membership.suspect(source.name, problem)
            return None

    async def _base(self, source: Peer) -> _Base | None:
        if self.kept.held is not None:
            answer = await self.taking_part.tell(source.name, pack("outcome", sequence=self.kept.held))
            if self.kept.held > source.status.ended or answer.text("state") == "kept":
                return _Base(None, self.kept.held)
        snapshot = await self._download(source.name)
        return None if snapshot is None else _Base(snapshot, snapshot.numbers["sequence"])

    async def _download(self, peer: str) -> Snapshot | None:
        stream = await self.membership.transport.open_stream(peer, self._stall)
        try:
            await write_frame(stream, pack("state"), self._stall)
            head = Message.unpack(await read_frame(stream, 1 << 16, 4 * self._stall))
            if head.kind != "state":
                return None
            size = head.number("size", high=_LARGEST_STATE)
            data = SharedMemory.create(size)  # the trainer reads it there
            for first in range(0, size, _CHUNK_BYTES):
                await stream.read_into(data.view[first : first + _CHUNK_BYTES], self._stall)
            await stream.write(b"\1", self._stall)
            numbers = _numbers(head.plain("numbers"))
            return Snapshot(data, numbers, head.text("layout"), head.data("note"))
        finally:
            stream.close()

    async def _means(self, sequence: int, source: Peer) -> tuple[tuple[RoundMean, ...], int]:
        """All that has ended since, up to now; and the round after it."""
        means: list[RoundMean] = []
        while True:
            answer = await self.taking_part.tell(source.name, pack("outcome", sequence=sequence))
            if answer.text("state") != "kept":
                if sequence <= source.status.ended:  # it is gone already
                    raise CallRefused(f"round {sequence} is not kept any more")
                return tuple(means), sequence
            plan = Plan.from_wire(answer.map("plan"))
            mean = await self.taking_part.fetch_kept(sequence, source.name) if plan.has_mean else b""
            if plan.has_mean:
                means.append(RoundMean(plan.key, SharedMemory.copy_of(mean)))
            self.kept.keep(plan, mean)
            sequence += 1

    def _position(self) -> int:
        positions = [peer.status.position for peer in self.membership.live() if peer.status.holds]
        return int(statistics.median(positions)) if positions else 0

    def _arrived(self, arrived: FetchedState) -> None:
        status = self.membership.status
        status.ended, status.next, status.holds = arrived.sequence - 1, arrived.sequence, True
        status.position = max(status.position, arrived.position)
        self.kept.held = arrived.sequence
        for peer in self.membership.live():  # whoever leads must know at once
            self.membership.beat_soon(peer.name)


def _numbers(values: Mapping[str, object]) -> dict[str, int]:
    if not all(isinstance(v, int) and isinstance(k, str) for k, v in values.items()) or "sequence" not in values:
        raise Malformed("the numbers of a state are not numbers")
    return {name: int(value) for name, value in values.items() if isinstance(value, int)}

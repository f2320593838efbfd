"""The global state for a joiner, or for a worker that missed rounds.

A source serves a snapshot that its trainer makes beside training; no worker waits for the transfer. The means of rounds
that end during it follow: all members keep some, and the source keeps all since its snapshot until the reader has the
state (node/recent_rounds.py), on its disk where they are large. So a slow line catches up, and a worker that missed a
round or two needs no snapshot at all. Slow readers hold no place of others (places.py). If a source dies or is slow,
another one is asked (`fetch_first`). A state is taken over only if the audit finds that other members have the same
(audit.py), and a mean only with its certificate. Everything that arrives has a bounded size; nothing is unpickled
(safetensors and numbers).
"""

import asyncio
import logging
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from diloco.errors import EngineError, Excluded
from diloco.swarm import timing
from diloco.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.audit import AnotherState
from diloco.swarm.node.frames import read_frame, write_frame
from diloco.swarm.node.outcomes import Outcomes
from diloco.swarm.node.places import Places, ReaderPlace
from diloco.swarm.node.recent_rounds import MAX_BYTES, MAX_ROUNDS
from diloco.swarm.protocol.membership import Peer
from diloco.swarm.protocol.messages import NotHere, OpenState, StateHead, decode
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.state_search import StateSearch
from diloco.swarm.protocol.wire import Malformed, encode
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.trainer import FetchedState, RoundMean, Snapshot, Trainer

_AT_ONCE = 2
_T = TypeVar("_T")
logger = logging.getLogger(__name__)

LARGEST_STATE = 1 << 42
_CHUNK_BYTES = 1 << 20
_MAX_HEAD_BYTES = 1 << 16
_MAX_READERS = 3


@dataclass
class Attempt:
    """A source that is asked, and when a piece of the state last came from it."""

    source: Peer
    moved_at: float = field(default_factory=clock.now)

    def moved(self) -> None:
        self.moved_at = clock.now()


async def fetch_first(
    sources: Sequence[Peer], fetch: Callable[[Attempt], Awaitable[_T | None]], quiet_seconds: float
) -> tuple[_T | None, list[Peer]]:
    """Return the first state that is whole (None: no source gives one), and the slower sources that were asked before.

    They are asked in their order. While the one that is asked makes no progress the next is asked beside it: a member
    that is slow, on purpose or not, holds up a joiner no longer than that. An honest line that is as slow costs bytes,
    no time.

    `quiet_seconds`: without progress until another one is asked.
    """
    rest = list(sources)
    running = dict[asyncio.Task[_T | None], Attempt]()
    try:
        while rest or running:
            all_are_quiet = all(clock.now() - attempt.moved_at > quiet_seconds for attempt in running.values())
            if rest and all_are_quiet and len(running) < _AT_ONCE:
                attempt = Attempt(rest.pop(0))
                running[asyncio.ensure_future(fetch(attempt))] = attempt
            done, _ = await asyncio.wait(running, timeout=timing.POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = running.pop(task).source
                if (fetched := task.result()) is not None:
                    earlier = sources[: sources.index(source)]
                    return fetched, [attempt.source for attempt in running.values() if attempt.source in earlier]
        return None, []
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass(frozen=True)
class _Base:
    """The state that the means are added to: a snapshot, or the trainer's own state (None)."""

    snapshot: Snapshot | None
    sequence: int


class _NotVotedFor(Exception):
    """Most members that count have not voted for a mean that the source shows."""


class _NoLongerKept(Exception):
    """The means that the trainer lacks are too old: it needs a snapshot."""


class SharedSnapshot:
    """The trainer's state now. Several that ask for it at the same moment share one snapshot."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._snapshot: asyncio.Future[Snapshot | None] | None = None

    async def take(self) -> Snapshot | None:
        if self._snapshot is None:
            self._snapshot = asyncio.ensure_future(self._trainer.snapshot())
            self._snapshot.add_done_callback(lambda _: setattr(self, "_snapshot", None))
        return await asyncio.shield(self._snapshot)


class StateTransfer:
    def __init__(self, outcomes: Outcomes, trainer: Trainer, snapshot: SharedSnapshot) -> None:
        self.outcomes = outcomes
        self.audit = outcomes.audit
        self.snapshot = snapshot
        self.recent = outcomes.recent
        self._trainer = trainer
        self.members = outcomes.members
        self.heartbeats = outcomes.heartbeats
        self._stall_seconds = self.members.settings.stall_seconds
        self._places = Places(_MAX_READERS, timing.TURN_SHARE * self.members.settings.lost_seconds)
        self.most_bytes = LARGEST_STATE
        """A state of this run is no larger, as the trainer says."""
        self._ended: tuple[dict[int, bytes], list[Plan]] = ({}, [])
        """The ends of rounds for the source of the state that was fetched last, and the plans of later means."""
        self.search = StateSearch(self.members, MAX_ROUNDS)

    # Serving

    async def serve(self, stream: Stream) -> None:
        async with self._places.take(stream.peer) as place:
            await place.run(self._send(stream, place))

    async def _send(self, stream: Stream, place: ReaderPlace) -> None:
        snapshot = await self.snapshot.take()
        if snapshot is None:
            await write_frame(stream, encode(NotHere()), self._stall_seconds)
            return
        self.recent.hold(stream.peer, snapshot.numbers["sequence"])
        view = snapshot.data.view
        digest = await self.audit.digest_of(snapshot)
        head = StateHead(dict(snapshot.numbers), snapshot.layout_digest, snapshot.note, len(view), digest)
        await write_frame(stream, encode(head), self._stall_seconds)
        for first in range(0, len(view), _CHUNK_BYTES):
            piece = view[first : first + _CHUNK_BYTES]
            await stream.write(piece, self._stall_seconds)
            place.sent_bytes += len(piece)
            self.recent.touch(stream.peer)
        await stream.read(1, self._stall_seconds)  # the receiver confirms; closing earlier may lose bytes in transit

    def release_held(self) -> None:
        """Let go of means that were kept for members which have the state now, are lost, or ask for nothing more."""
        for peer, first in self.recent.held().items():
            known = self.members.peers.get(peer)
            caught_up = known is not None and known.status.has_state and known.status.next_round >= first
            idle = self.recent.idle_seconds(peer) > timing.IDLE_SHARE * self._stall_seconds
            if known is None or not known.live or caught_up or idle:
                self.recent.release(peer)

    # Fetching

    async def fetch(self) -> FetchedState | None:
        """Fetch the others' state; None if this worker has it, or no other worker has a later one. Raises
        EngineError."""
        status = self.members.status
        self.search.begin()
        while not status.has_state:
            if self.members.excluded is not None:
                raise Excluded(self.members.excluded)
            next_to_merge = self.recent.next_to_merge
            is_newcomer = next_to_merge is None
            sources = self.search.sources(next_to_merge)
            if self.search.is_alone(is_newcomer=is_newcomer):
                status.keep_state()
                return None
            fetched, slow = await fetch_first(sources, self._fetch_from, timing.SOURCE_SHARE * self._stall_seconds)
            for source in slow:
                self._tell_refused(source, "it is slow, or its state no other member's: another one gave it first")
            if fetched is not None:
                self._record(fetched)
                return fetched
            disagreement_seconds = self.audit.disagreement_seconds()
            if self.search.none_is_later(len(sources), disagreement_seconds, is_newcomer=is_newcomer):
                status.keep_state()
                return None
            await self.members.wait_for_change(timing.POLL_SECONDS)
        return None

    async def _fetch_from(self, attempt: Attempt) -> FetchedState | None:
        source = attempt.source
        self.search.record_asked(source.name)
        try:
            base = await self._fetch_base(attempt)
            if base is None:
                return None
            ends: dict[int, bytes] = {}
            if base.snapshot is not None:
                self.outcomes.quorum.adopt_end(await self.outcomes.ask_last(source.name, base.sequence))
                ends = await self.outcomes.ask_ends(source.name)
                ends = {number: plan for number, plan in ends.items() if number < base.sequence}
            means, plans, sequence = await self._fetch_means(base.sequence, attempt)
            self._ended = (ends, plans)
            return FetchedState(base.snapshot, means, sequence, self._position())
        except (Unreachable, CallRefused, Malformed, _NoLongerKept, AnotherState, _NotVotedFor) as problem:
            logger.info("no state from %s: %s", source.name, problem)
            if isinstance(problem, AnotherState):
                self._tell_refused(source, str(problem))
            if isinstance(problem, _NoLongerKept | _NotVotedFor):  # its state, as most have it, tells
                self.search.record_without_means(source.name)
            if isinstance(problem, Unreachable):
                self.heartbeats.suspect(source.name, problem)
            return None

    def _tell_refused(self, source: Peer, reason: str) -> None:
        self.members.emit_about("state_refused", source.name, reason=reason)

    async def _fetch_base(self, attempt: Attempt) -> _Base | None:
        """Choose the trainer's own state if the source still keeps all means that it lacks, else fetch a snapshot from
        the source; None if it gives none."""
        first = self.recent.next_to_merge
        source = attempt.source
        if first is not None and self.search.may_have_means(source.name):
            agreed = await self.outcomes.ask(source.name, first)
            if first > source.status.ended_round or agreed is not None:
                return _Base(None, first)
        snapshot = await self._fetch_snapshot(source.name, attempt.moved)
        return None if snapshot is None else _Base(snapshot, snapshot.numbers["sequence"])

    async def _fetch_snapshot(self, peer: str, moved: Callable[[], None]) -> Snapshot | None:
        stream = await self.members.transport.open_stream(peer, self._stall_seconds)
        try:
            await write_frame(stream, encode(OpenState()), self._stall_seconds)
            head = decode(await read_frame(stream, _MAX_HEAD_BYTES, timing.HEAD_SHARE * self._stall_seconds))
            if not isinstance(head, StateHead):
                return None
            if head.size > self.most_bytes:
                self.audit.record_offence(peer, "it offered a state that is larger than this run's")
                raise Malformed(f"a state of {head.size} bytes; this run's has at most {self.most_bytes}")
            data = SharedMemory.create(head.size)  # the trainer reads it there
            told_at = clock.now()
            snapshot = Snapshot(data, head.numbers, head.layout_digest, head.note)
            async with self.audit.check_state(
                peer,
                snapshot,
                head.digest,
                is_newcomer=self.recent.next_to_merge is None,
                ask_end=partial(self.outcomes.ask, peer),
            ) as audit:
                for first in range(0, head.size, _CHUNK_BYTES):
                    await stream.read_into(data.view[first : first + _CHUNK_BYTES], self._stall_seconds)
                    moved()
                    audit.check()
                    if clock.now() - told_at >= timing.STATE_TOLD_EVERY:
                        told_at = clock.now()
                        received = min(head.size, first + _CHUNK_BYTES)
                        self._trainer.emit("state_arriving", {"received_bytes": received, "all_bytes": head.size})
                await stream.write(b"\1", self._stall_seconds)
                await audit.end(snapshot)
            return snapshot
        finally:
            stream.close()

    async def _fetch_means(self, sequence: int, attempt: Attempt) -> tuple[tuple[RoundMean, ...], list[Plan], int]:
        """Fetch the means of this round and all later ones that have ended, and their plans; and the round after
        them."""
        source = attempt.source
        means: list[RoundMean] = []
        plans: list[Plan] = []
        held = 0
        while True:
            agreed = await self.outcomes.ask(source.name, sequence)
            if agreed is None:
                if sequence <= source.status.ended_round:
                    raise _NoLongerKept(f"round {sequence} is no longer kept")
                return tuple(means), plans, sequence
            if not self.outcomes.quorum.has_most_votes(agreed):
                raise _NotVotedFor(f"most members that count have not voted for the mean of round {sequence}")
            plan = agreed.plan
            mean = await self.outcomes.fetch_mean(agreed, source.name, attempt.moved) if plan.has_mean else b""
            if plan.has_mean:
                held += len(mean)
                means.append(RoundMean(plan.key, self._keep(mean, held > MAX_BYTES), plan.decision.plain))
            self.recent.add(plan, mean, agreed.certificate)
            self.outcomes.quorum.record_end(agreed)
            plans.append(plan)
            sequence += 1

    def _keep(self, mean: bytes, on_disk: bool) -> SharedMemory:
        try:
            return SharedMemory.copy_of(mean, Path(self.members.settings.folder) if on_disk else None)
        except OSError as error:
            raise EngineError(
                f"there is no room for the means of rounds that ended while the state arrived ({error}): make room in "
                f"{self.members.settings.folder}, or use a faster line"
            ) from error

    def _position(self) -> int:
        positions = [peer.status.position for peer in self.members.with_state()]
        return int(statistics.median(positions)) if positions else 0

    def _record(self, fetched: FetchedState) -> None:
        status = self.members.status
        status.take_over(fetched.sequence, fetched.position)
        self.recent.next_to_merge = fetched.sequence
        self.outcomes.quorum.forget_votes_after(status.ended_round)
        self.outcomes.take_over(*self._ended, fetched.sequence)
        self.search.forget()
        self.audit.take_over_state()
        self.outcomes.missed.forget()
        for peer in self.members.live():  # the leader must expect this worker at once
            self.heartbeats.beat_soon(peer.name)

"""Witnesses of a state: before a worker takes over a member's state, others tell the digest of theirs.

A state cannot be checked by itself. All members that have merged the same rounds have the same one, so others are asked
while it arrives. It is taken over if more than half of all members that have the state, its source included, have the
same: as many are asked as that takes, and others in place of those that do not tell or have another one. A member that
claims to be ahead of all others has no witness. If only one member has the state, there is none to ask.
"""

import asyncio
import hashlib
import json
import logging
import random
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from diloco.swarm import timing
from diloco.swarm.audit.liars import Liars
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.audit import AnotherState, StateAudit
from diloco.swarm.node.calls import Calls
from diloco.swarm.node.members import Members
from diloco.swarm.protocol.certificate import Agreed
from diloco.swarm.protocol.messages import AskStateDigest, StateDigest
from diloco.swarm.protocol.quorum import Quorum
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.trainer import Snapshot

logger = logging.getLogger(__name__)

_KEPT = 4
_MOST_TAKES = 3  # of the state between two rounds, where a digest of failed rounds is asked for
_OWN = "start."
_MAX_HEADER_BYTES = 1 << 26
_MANY = 3  # workers of a plan: the certificate of fewer shows nothing


class Witnesses:
    def __init__(
        self,
        members: Members,
        calls: Calls,
        liars: Liars,
        quorum: Quorum,
        take_snapshot: Callable[[], Awaitable[Snapshot | None]],
    ) -> None:
        """`take_snapshot`: gives this worker's state now."""
        self._members = members
        self._calls = calls
        self._liars = liars
        self._quorum = quorum
        self._take_snapshot = take_snapshot
        self._refused_since: float | None = None
        """When this worker first refused a state that other members do not have."""
        self._known: dict[int, bytes] = {}
        """The digests of this worker's last states, by the first round that is not in each."""
        self._last: tuple[weakref.ref[SharedMemory], bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._taken_at = -timing.WITNESS_PAUSE_SECONDS
        self._taken_of = (-1, -1)
        self._takes = 0
        """The snapshots that were taken for others at `_taken_of`: (the last round that had ended, the next one)."""
        self._random = random.Random(members.me)

    # As a witness

    def answer(self, request: AskStateDigest) -> StateDigest:
        """Return the digest, or that it is being computed; neither if this worker does not have that state."""
        status = self._members.status
        if request.sequence in self._known:
            return StateDigest(self._known[request.sequence])
        # Rounds that have failed are behind a state too: on the smaller side of a split all do.
        if not status.has_state or not status.ended_round < request.sequence <= status.next_round:
            return StateDigest()
        if (now := (status.ended_round, status.next_round)) != self._taken_of:
            self._taken_of = now
            self._takes = 0
        may_come = request.sequence == status.ended_round + 1 or self._takes < _MOST_TAKES
        if self._task is None and may_come and clock.now() - self._taken_at > timing.WITNESS_PAUSE_SECONDS:
            self._takes += 1
            self._task = self._members.faults.start(self._take(), "taking the digest of the state")
        return StateDigest(pending=may_come or self._task is not None)

    async def _take(self) -> None:
        try:
            snapshot = await self._take_snapshot()
            if snapshot is not None:
                await self.digest(snapshot, own=True)
        except Malformed as problem:
            logger.warning("this worker's own state: %s", problem)
        finally:
            self._task = None
            self._taken_at = clock.now()

    async def digest(self, snapshot: Snapshot, *, own: bool) -> bytes:
        """Compute the digest of a snapshot; `own`: it is this worker's, and is kept for others. Raises Malformed."""
        if own and self._last is not None and self._last[0]() is snapshot.data:  # several joiners share one
            return self._last[1]
        digest = await asyncio.get_running_loop().run_in_executor(None, state_digest, snapshot)
        if own:
            self._last = (weakref.ref(snapshot.data), digest)
            self._known[snapshot.numbers["sequence"]] = digest
            while len(self._known) > _KEPT:
                del self._known[min(self._known)]
        return digest

    def forget(self) -> None:
        """This worker takes over another state."""
        self._refused_since = None
        self._known.clear()
        self._last = None
        self._takes = 0

    # Asking witnesses

    def disagreement_seconds(self) -> float:
        """Return how long ago this worker first refused a state; 0 if it has not."""
        return 0.0 if self._refused_since is None else clock.now() - self._refused_since

    @asynccontextmanager
    async def check(
        self,
        source: str,
        snapshot: Snapshot,
        digest: bytes,
        *,
        is_newcomer: bool,
        ask_end: Callable[[int], Awaitable[Agreed | None]],
    ) -> AsyncIterator[StateAudit]:
        """Audit.check_state (node/audit.py)."""
        sequence = snapshot.numbers["sequence"]
        asked = self.of(source)
        asking: asyncio.Task[dict[str, bytes]] | None = None
        try:
            if not asked:
                await self._check_lone_source(sequence, ask_end)
            seconds = timing.WITNESS_SHARE * self._members.settings.stall_seconds
            asking = asyncio.create_task(self.ask(asked, sequence, digest, seconds))
            yield _OfferedState(self, source, digest, asked, asking, is_newcomer=is_newcomer)
        except AnotherState:
            self._refused_since = self._refused_since or clock.now()
            raise
        finally:
            if asking is not None:
                asking.cancel()

    async def _check_lone_source(self, sequence: int, ask_end: Callable[[int], Awaitable[Agreed | None]]) -> None:
        """Check a source that has no witness. A worker that was in rounds of three or more asks it for a certificate.
        Raises AnotherState."""
        last = self._quorum.last_plan
        if last is None or len(last.entries) < _MANY or sequence <= last.key.sequence + 1:
            return
        if await ask_end(sequence - 1) is None:
            raise AnotherState(f"no other member is there, and it shows no certificate of round {sequence - 1}")

    def compare(self, digest: bytes, witnesses: Mapping[str, bytes], asked: Sequence[str], is_newcomer: bool) -> None:
        """Raises AnotherState unless most members have this state. If no state has most for long, a worker that was in
        rounds takes one that half of all members have; and when a smaller side may go on as a run of its own, one that
        no other state outnumbers."""
        if most_have(digest, witnesses, asked=len(asked)):
            return
        same = sum(other == digest for other in witnesses.values())
        if not is_newcomer:
            settings = self._members.settings
            refused_seconds = self.disagreement_seconds()
            half = 2 * (1 + same) >= 1 + len(asked) and refused_seconds > settings.stall_seconds
            alone = refused_seconds > settings.minority_seconds
            if half or (alone and none_has_more(digest, witnesses)):
                return
        raise AnotherState(f"{same} of {len(asked)} other members have the same state")

    async def check_whole(self, source: str, snapshot: Snapshot, digest: bytes) -> None:
        """Raises AnotherState if the state that has come is not the one that was said to come."""
        if await self.digest(snapshot, own=False) != digest:
            self._liars.record_unproved(source, "it sent another state than it said")
            raise AnotherState("it sent another state than it said")

    def of(self, source: str) -> list[str]:
        """Return all other members that have the state, in the order in which they are asked about that of `source`."""
        others = [peer for peer in self._members.with_state() if peer.name != source]
        self._random.shuffle(others)
        known = self._members.peers.get(source)
        ended = -1 if known is None else known.status.ended_round
        # Those that have been in rounds first, and of them those that have come as far.
        others.sort(key=lambda peer: (peer.status.contributed_round < 0, peer.status.ended_round < ended))
        return [peer.name for peer in others]

    async def ask(self, names: list[str], sequence: int, digest: bytes, seconds: float) -> dict[str, bytes]:
        """Ask for the digests of those that have the state before this round, or get it within `seconds`.

        No more of them than it takes: one that never comes so far does not hold up a worker that is sure already, and
        is asked for no longer than `lost_seconds` before another one is asked beside it.
        """
        end = clock.now() + seconds
        rest = list(names)
        patience = self._members.settings.lost_seconds
        asked = dict[asyncio.Task[bytes | None], str]()
        waiting = set[asyncio.Task[bytes | None]]()
        digests = dict[str, bytes]()
        quiet = 0
        try:
            while True:
                same = 1 + sum(other == digest for other in digests.values())
                missing = (1 + len(names)) // 2 + 1 - same
                for _ in range(missing + quiet - len(waiting)):
                    if rest:
                        task = asyncio.create_task(self._ask(rest[0], sequence, end))
                        asked[task] = rest.pop(0)
                        waiting.add(task)
                if missing <= 0 or len(waiting) + len(rest) < missing:
                    return digests
                done, waiting = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                quiet += not done
                digests |= {asked[task]: told for task in done if (told := task.result()) is not None}
        finally:
            for task in waiting:
                task.cancel()

    async def _ask(self, name: str, sequence: int, end: float) -> bytes | None:
        ended = -1
        moved = clock.now()
        while clock.now() < end:
            try:
                answer = await self._calls.ask(name, AskStateDigest(sequence))
                if isinstance(answer, StateDigest) and answer.digest is not None:
                    return answer.digest
                if not (isinstance(answer, StateDigest) and answer.pending):
                    peer = self._members.peers.get(name)
                    if peer is None or not peer.live or peer.status.ended_round + 1 >= sequence:
                        return None
                    if peer.status.ended_round > ended:  # it is behind, and may come so far
                        ended = peer.status.ended_round
                        moved = clock.now()
                    if clock.now() - moved > self._members.settings.stall_seconds:
                        return None
            except (Unreachable, CallRefused, Malformed) as problem:
                logger.info("%s is no witness of a state: %s", name, problem)
                return None
            await asyncio.sleep(timing.POLL_SECONDS)
        return None


class _OfferedState(StateAudit):
    def __init__(
        self,
        witnesses: Witnesses,
        source: str,
        digest: bytes,
        asked: Sequence[str],
        asking: "asyncio.Task[dict[str, bytes]]",
        *,
        is_newcomer: bool,
    ) -> None:
        """`asking`: gives the digests of those of the `asked` that tell theirs."""
        self._witnesses = witnesses
        self._source = source
        self._digest = digest
        self._asked = asked
        self._asking = asking
        self._is_newcomer = is_newcomer

    def check(self) -> None:
        if self._asking.done():
            self._witnesses.compare(self._digest, self._asking.result(), self._asked, self._is_newcomer)

    async def end(self, snapshot: Snapshot) -> None:
        await self._witnesses.check_whole(self._source, snapshot, self._digest)
        self._witnesses.compare(self._digest, await self._asking, self._asked, self._is_newcomer)


def most_have(digest: bytes, witnesses: Mapping[str, bytes], *, asked: int) -> bool:
    """Whether a state with this digest is that of most: of its source and all others, `asked` in number."""
    same = 1 + sum(other == digest for other in witnesses.values())
    return 2 * same > 1 + asked


def none_has_more(digest: bytes, witnesses: Mapping[str, bytes]) -> bool:
    """Whether no other state has more members behind it."""
    others = Counter(other for other in witnesses.values() if other != digest)
    same = 1 + sum(other == digest for other in witnesses.values())
    return same >= max(others.values(), default=0)


def state_digest(snapshot: Snapshot) -> bytes:
    """Compute 32 bytes: what all members have alike, whichever of them serves the state.

    That is the anchors and the outer momentum, the next round and how many rounds each fragment has had. What a state
    has besides is the serving worker's own (its position, the buffers of its model). Raises Malformed if the data is
    no safetensors file.
    """
    taken = hashlib.sha256()
    agreed = {
        name: number for name, number in snapshot.numbers.items() if name == "sequence" or name.endswith(".rounds")
    }
    taken.update(json.dumps([snapshot.layout_digest, sorted(agreed.items())]).encode())
    view = snapshot.data.view
    header, start = _read_header(view)
    for name in sorted(header):
        if not name.startswith(_OWN) and name != "__metadata__":
            first, last = _place(header[name], len(view) - start)
            taken.update(json.dumps([name, header[name]["dtype"], header[name]["shape"]]).encode())
            taken.update(view[start + first : start + last])
    return taken.digest()


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(view[:8], "little")
    if not 2 <= size <= min(_MAX_HEADER_BYTES, len(view) - 8):
        raise Malformed("a state that is no safetensors file")
    try:
        header = json.loads(bytes(view[8 : 8 + size]))
    except (ValueError, RecursionError) as error:
        raise Malformed("a state that is no safetensors file") from error
    if not isinstance(header, dict):
        raise Malformed("a state that is no safetensors file")
    return header, 8 + size


def _place(tensor: object, size: int) -> tuple[int, int]:
    if isinstance(tensor, Mapping) and {"dtype", "shape", "data_offsets"} <= tensor.keys():
        offsets = tensor["data_offsets"]
        if isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(offset, int) for offset in offsets):
            first, last = offsets
            if 0 <= first <= last <= size:
                return first, last
    raise Malformed("a state whose tensors are not in it")

"""Heartbeats: every node exchanges them with every other, and a peer that is silent is left out of rounds.

A peer is lost when it is known to be dead (its machine refuses the connection) or has been silent for `lost_seconds`:
no beat, and no byte of a transfer.
It is called again for ever, less and less often, so that a cut network heals by itself. A heartbeat carries the
sender's status, new addresses, and the members and revocations that the receiver does not know.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import structs

from diloco.swarm.network.limits import PeerRateLimit
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.calls import addressed, check_process
from diloco.swarm.node.members import MAX_ADDRESSES, Members
from diloco.swarm.protocol import timing
from diloco.swarm.protocol.membership import Peer
from diloco.swarm.protocol.messages import Beat, Goodbye, Hello, expect
from diloco.swarm.protocol.refusals import OUT_OF_THE_RUN
from diloco.swarm.protocol.wire import PROTOCOL, Malformed, PeerMessage, encode
from diloco.swarm.trust.credential import PeerRefused
from diloco.swarm.trust.permissions import MAX_PEERS
from diloco.version import __version__

logger = logging.getLogger(__name__)

_MAX_SILENT = 256
"""Silent peers that are called for ever."""
_RETURNS_AT_ONCE, _RETURNS_PER_SECOND = 8.0, 1 / 60
"""The hellos that a member may say after its goodbyes. Each return and each goodbye is an event on every member's disk,
and changes what the members share out."""


class Heartbeats:
    def __init__(self, members: Members) -> None:
        self.members = members
        self.transport = members.transport
        self.settings = members.settings
        self._asking: set[str] = set()
        self._returns = PeerRateLimit(_RETURNS_AT_ONCE, _RETURNS_PER_SECOND, MAX_PEERS)
        self.ended_plan: Callable[[int], bytes] = lambda _: b""
        """The beginning of the digest of the plan that a round has ended with here (node/outcomes.py)."""
        self.on_other_end: Callable[[str, int], None] = lambda *_: None
        """Called with a peer and a round that the peer has ended with another plan."""

    # Hello: from then on both peers know each other

    def hello(self) -> Hello:
        members = self.members
        return Hello(
            PROTOCOL, __version__, "worker", members.permissions.credential, members.addresses[:MAX_ADDRESSES],
            members.status,
        )  # fmt: skip

    async def say_hello(self, name: str) -> None:
        """Raises Unreachable, CallRefused, Malformed or PeerRefused."""
        answer = expect(await self._call(name, self.hello(), self.settings.lost_seconds), Hello)
        try:
            self._add(name, answer)
        except CallRefused as another:
            await self.transport.disconnect(name)  # the next connection may reach the one that is held
            raise Unreachable(f"another process with its identity answers: {another}") from None

    def answer_hello(self, name: str, hello: Hello) -> Hello:
        """Raises PeerRefused before anything else is looked at, and CallRefused."""
        permissions = self.members.permissions
        permissions.admit(name, hello.credential, worker=hello.role == "worker")
        self.members.add_revocations(hello.revocations)
        permissions.check(name)
        if hello.role == "worker":
            self._add(name, hello)
        elif hello.role == "joiner":
            permissions.check_seat(name)
        known = self._known()
        return structs.replace(
            self.hello(),
            roster=tuple(peer.roster_entry() for peer in known),
            revocations=tuple(permissions.revocations()),
            seats=tuple(permissions.seats_taken({peer.name for peer in known})),
        )

    def _add(self, name: str, hello: Hello) -> None:
        if name in self.members.peers:
            if self.members.peers[name].left and not self._returns.take(name, clock.now()):
                raise CallRefused("this worker has left and come back too often; asking again in a minute", "busy")
            check_process(self.members.peers[name], hello.status.process, self.settings.beat_seconds)
        self.members.add_revocations(hello.revocations)
        peer = self.members.add(name, hello.credential, hello.addresses)
        peer.left = False
        self.members.record_heard(peer, hello.status)
        if hello.roster:
            peer.knows = frozenset(entry.peer[-8:] for entry in hello.roster)
        self.members.add_roster(name, hello.roster)
        self.members.take_seats(name, hello.seats)

    def _known(self) -> list[Peer]:
        """The peers to name to others: only those that this node has heard itself, since others may be invented."""
        now = clock.now()
        return [
            peer
            for peer in self.members.peers.values()
            if peer.heard_at and not peer.left and (peer.live or now - peer.lost_at < timing.FORGET_SECONDS)
        ]

    # Beats

    async def run(self) -> None:
        """Exchange heartbeats, until cancelled."""
        last = clock.now()
        while True:
            now = clock.now()
            if now - last > timing.FROZEN_SECONDS:  # this process was frozen; the others were not silent
                for peer in self.members.peers.values():
                    peer.heard_at += now - last if peer.heard_at else 0.0
            last = now
            for peer in list(self.members.peers.values()):
                self._look_after(peer, now)
            self._forget_some()
            await asyncio.sleep(timing.TICK_SECONDS)

    def _forget_some(self) -> None:
        """Forget the peers that have been silent for longest, if there are too many."""
        silent = [peer for peer in self.members.peers.values() if not peer.live and peer.lost_at]
        for peer in sorted(silent, key=lambda peer: peer.lost_at)[: max(0, len(silent) - _MAX_SILENT)]:
            del self.members.peers[peer.name]

    def _look_after(self, peer: Peer, now: float) -> None:
        if peer.left:
            if now - max(peer.heard_at, peer.lost_at) > timing.FORGET_SECONDS:
                self.members.peers.pop(peer.name, None)
            return
        # The peer with the lower name begins; the other one begins only if it hears nothing.
        due = self.settings.beat_seconds * (1.0 if self.members.me < peer.name else timing.SECOND_CALLER_SHARE)
        heard_at = max(peer.heard_at, self.transport.heard_at(peer.name))  # beats may wait behind a transfer
        if peer.live and now - heard_at > self.settings.lost_seconds:
            self.members.record_lost(peer, f"silent for {self.settings.lost_seconds:g} s")
            # Its connection may be to a frozen process, while another one has taken that one's place.
            self._start(self.transport.disconnect(peer.name))
        if not peer.live:
            redial = min(timing.LONGEST_REDIAL_SECONDS, (now - peer.lost_at) / timing.REDIAL_DIVISOR)
            due = max(self.settings.lost_seconds, redial) if peer.lost_at else 0.0
        if not peer.heard_at and peer.lost_at and now - peer.lost_at > timing.FORGET_SECONDS:
            del self.members.peers[peer.name]  # named by others, and never heard
        elif now - max(peer.heard_at, peer.asked_at) >= due:
            self.beat_soon(peer.name)

    async def dial(self, peer: Peer) -> None:
        """Connect to a peer that is not live, and say hello. Raises what `say_hello` raises."""
        addresses, tellers = self.members.dialled_addresses(peer)
        if not addresses:
            raise Unreachable("members have named it, and too many others that do not answer: later")
        await self.transport.connect(peer.name, addresses, self.settings.lost_seconds)
        await self.say_hello(peer.name)
        self.members.record_dialled(peer, tellers)

    def beat_soon(self, name: str) -> None:
        """Ask the peer now whether it is still live."""
        if name in self._asking or name not in self.members.peers:
            return
        self._asking.add(name)
        self._start(self._beat(self.members.peers[name]))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self.members.faults.start(work, "keeping up with the members")

    def suspect(self, name: str, problem: Unreachable) -> None:
        """A call or stream to the peer broke: ask at once whether it is still live."""
        logger.info("%s: %s", name, problem)
        self.beat_soon(name)

    async def _beat(self, peer: Peer) -> None:
        peer.asked_at = clock.now()
        try:
            if not peer.live:
                await self.dial(peer)
                return
            try:
                data = await self._call(peer.name, self._beat_for(peer), self.settings.lost_seconds)
            except CallRefused as refused:
                if refused.code in OUT_OF_THE_RUN:
                    raise
                await self.say_hello(peer.name)  # it has restarted, or this worker slept until it was forgotten
                return
            if peer.name not in self.members.peers:
                return  # it was expelled meanwhile
            peer.latency_seconds = clock.now() - peer.asked_at
            answer = expect(data, Beat)
            if answer.status.process != peer.status.process:
                await self.transport.disconnect(peer.name)
                raise Unreachable("another process with its identity answers")
            news = self.answer_beat(peer.name, answer)
            if news.roster or news.revocations:
                await self._call(peer.name, news, self.settings.lost_seconds)
        except (Unreachable, CallRefused, Malformed, PeerRefused) as problem:
            await self._no_answer(peer, problem)
        finally:
            self._asking.discard(peer.name)

    async def _no_answer(self, peer: Peer, problem: Exception) -> None:
        if isinstance(problem, CallRefused) and problem.code in OUT_OF_THE_RUN:
            self.members.record_rejected(peer, str(problem), problem.code)
        elif not peer.live:
            peer.lost_at = peer.lost_at or clock.now()
            peer.gone = peer.gone or (isinstance(problem, Unreachable) and problem.gone)  # silent first, and dead now
        elif isinstance(problem, Unreachable) and (problem.gone or problem.broken):
            try:
                await self._call(peer.name, self._beat_for(peer), self.settings.beat_seconds)
            except (Unreachable, CallRefused) as again:
                if isinstance(again, Unreachable) and again.gone:
                    self.members.record_lost(peer, str(again), gone=True)
            else:
                peer.heard_at = clock.now()

    def _beat_for(self, peer: Peer) -> Beat:
        """This node's heartbeat for a peer, with the live members that the peer does not know, once it has reported
        any."""
        members = self.members
        live = [other for other in self._known() if other.live]
        unknown = [
            other
            for other in live
            if other is not peer and peer.knows is not None and other.name[-8:] not in peer.knows
        ]
        return Beat(
            status=members.status,
            addresses=members.addresses[:MAX_ADDRESSES],
            known=tuple(sorted(name[-8:] for name in [members.me, *(other.name for other in live)])),
            revocations_digest=members.permissions.revocations_digest(),
            ended=self.ended_plan(members.status.ended_round),
            roster=tuple(other.roster_entry() for other in unknown),
        )

    def answer_beat(self, name: str, beat: Beat) -> Beat:
        """Take in a beat, or the answer to one; returns this node's beat with what the sender does not know."""
        members = self.members
        peer = members.peers[name]
        members.record_heard(peer, beat.status)
        peer.knows = frozenset(beat.known)
        members.add_roster(name, beat.roster)
        members.add_revocations(beat.revocations)
        own = self.ended_plan(beat.status.ended_round)
        if own and beat.ended not in (b"", own):
            self.on_other_end(name, beat.status.ended_round)
        peer.addresses = beat.addresses or peer.addresses  # they change when a relay is lost and another one found
        answer = self._beat_for(peer)
        if beat.revocations_digest != answer.revocations_digest:
            answer = structs.replace(answer, revocations=tuple(members.permissions.revocations()))
        return answer

    async def say_goodbye(self, seconds: float) -> None:
        async def tell(peer: Peer) -> None:
            try:
                await self._call(peer.name, Goodbye(), seconds)
            except (Unreachable, CallRefused) as problem:
                logger.debug("%s was not told goodbye: %s", peer.name, problem)

        await asyncio.gather(*(tell(peer) for peer in self.members.peers.values() if peer.live))

    async def _call(self, name: str, request: PeerMessage, seconds: float) -> bytes:
        data = encode(request) if isinstance(request, Hello) else addressed(self.members, name, request)
        return await self.transport.call(name, data, seconds)

"""Heartbeats: every node exchanges them with every other, and a peer that is silent is left out of rounds.

A peer is lost when it is known to be dead (its machine refuses the connection) or has been silent for `lost_seconds`:
no beat, and no byte of a transfer. When a peer is called, and what follows if it does not answer, is decided in
protocol/heartbeats.py.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import structs

from diloco.swarm import timing
from diloco.swarm.network.limits import PeerRateLimit
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.calls import addressed, check_process
from diloco.swarm.node.members import Members
from diloco.swarm.protocol.heartbeats import (
    NoAnswer,
    beat_for,
    differs,
    is_gone,
    judge_no_answer,
    look_at,
    peers_to_name,
    too_many_silent,
)
from diloco.swarm.protocol.membership import MAX_ADDRESSES, Peer
from diloco.swarm.protocol.messages import Beat, Goodbye, Hello, expect
from diloco.swarm.protocol.refusals import OUT_OF_THE_RUN
from diloco.swarm.protocol.wire import PROTOCOL, Malformed, PeerMessage, encode
from diloco.swarm.trust.credential import PeerRefused
from diloco.swarm.trust.permissions import MAX_PEERS
from diloco.version import __version__

logger = logging.getLogger(__name__)

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
        named = peers_to_name(self.members)
        return structs.replace(
            self.hello(),
            roster=tuple(peer.roster_entry() for peer in named),
            revocations=tuple(permissions.revocations()),
            seats=tuple(permissions.seats_taken({peer.name for peer in named})),
        )

    def _add(self, name: str, hello: Hello) -> None:
        if name in self.members.peers:
            if self.members.peers[name].left and not self._returns.take(name, clock.now()):
                raise CallRefused("this worker has left and come back too often; asking again in a minute", "busy")
            check_process(self.members.peers[name], hello.status.process, self.settings.beat_seconds)
        self.members.add_revocations(hello.revocations)
        peer = self.members.add(name, hello.credential, hello.addresses)
        self.members.record_heard(peer, hello.status, hello=True)
        if hello.roster:
            peer.take_known(entry.peer[-8:] for entry in hello.roster)
        self.members.add_roster(name, hello.roster)
        self.members.take_seats(name, hello.seats)

    # Beats

    async def run(self) -> None:
        """Exchange heartbeats, until cancelled."""
        last = clock.now()
        while True:
            now = clock.now()
            if now - last > timing.FROZEN_SECONDS:  # this process was frozen; the others were not silent
                for peer in self.members.peers.values():
                    peer.excuse(now - last)
            last = now
            for peer in list(self.members.peers.values()):
                self._look_after(peer, now)
            for peer in too_many_silent(self.members.peers.values()):
                del self.members.peers[peer.name]
            await asyncio.sleep(timing.TICK_SECONDS)

    def _look_after(self, peer: Peer, now: float) -> None:
        look = look_at(peer, self.members.me, self.settings, self.transport.heard_at(peer.name), now)
        if look.lost:
            self.members.record_lost(peer, f"silent for {self.settings.lost_seconds:g} s")
            self._start(self.transport.disconnect(peer.name))
        if look.forget:
            self.members.peers.pop(peer.name, None)
        if look.call:
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
        peer.ask(clock.now())
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
            peer.measure(clock.now())
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
        match judge_no_answer(peer, problem):
            case NoAnswer.REJECTED:
                self.members.record_rejected(peer, str(problem), getattr(problem, "code", ""))
            case NoAnswer.STAYS_AWAY:
                peer.stay_away(clock.now(), gone=is_gone(problem))
            case NoAnswer.ASK_AGAIN:
                try:
                    await self._call(peer.name, self._beat_for(peer), self.settings.beat_seconds)
                except (Unreachable, CallRefused) as again:
                    if is_gone(again):
                        self.members.record_lost(peer, str(again), gone=True)
                else:
                    peer.touch(clock.now())

    def _beat_for(self, peer: Peer) -> Beat:
        members = self.members
        revocations = members.permissions.revocations_digest()
        return beat_for(peer, members, members.addresses, revocations, self.ended_plan(members.status.ended_round))

    def answer_beat(self, name: str, beat: Beat) -> Beat:
        """Take in a beat, or the answer to one; returns this node's beat with what the sender does not know."""
        members = self.members
        peer = members.peers[name]
        members.record_heard(peer, beat.status)
        peer.take_known(beat.known)
        members.add_roster(name, beat.roster)
        members.add_revocations(beat.revocations)
        if differs(self.ended_plan(beat.status.ended_round), beat):
            self.on_other_end(name, beat.status.ended_round)
        peer.take_addresses(beat.addresses)  # they change when a relay is lost and another one found
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

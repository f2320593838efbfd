"""Requests between two members, each from one process to one other.

One identity, several processes: a worker that was restarted, or a run folder that was copied to a second machine.

A process is named by `Status.process`: when it started, and a random number. Of two the later is the higher. Members
hold one process of each identity:

    a later one     is told to ask again while the held one is live, and is refused ("twice") once that one has been
                    heard of; it takes the place of one that is lost
    an earlier one  is refused ("replaced"): it was frozen, asleep or cut off, and another took its place

Requests between members name both processes (Addressed). So a process that was replaced can neither post, vote, lead
nor say goodbye, and does nothing that was asked of the one in its place.
"""

import secrets
import time
from collections.abc import Awaitable, Callable

from diloco.own_command import command
from diloco.swarm.network.transport import CallRefused
from diloco.swarm.node import clock
from diloco.swarm.node.members import Members
from diloco.swarm.protocol.membership import Peer
from diloco.swarm.protocol.messages import Addressed, decode
from diloco.swarm.protocol.wire import PeerMessage, encode


def name_process() -> str:
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


def check_process(peer: Peer, process: str, beat_seconds: float) -> None:
    """Whether this process of the peer may take the place of the one that is held. Raises CallRefused."""
    held = peer.status.process
    if not held or process == held:
        return
    if process < held:
        raise CallRefused(
            "another process with the identity of this worker has taken its place while this one was frozen, asleep "
            "or cut off: one of them must end. A copy of a run folder must not be used twice; a new worker joins with "
            f"{command('join', '-')}",
            "replaced",
        )
    if not peer.live:
        return
    peer.meet_rival(process, clock.now())
    if peer.heard_at > peer.rival[1] + beat_seconds:
        raise CallRefused(
            "another process with the identity of this worker takes part in the run: stop one of them. A copy of "
            f"a run folder must not be used twice; a new worker joins with {command('join', '-')}",
            "twice",
        )
    raise CallRefused("this worker's identity was in use a moment ago; asking again", "again")


def addressed(members: Members, name: str, request: PeerMessage) -> bytes:
    """Make a request from this process to the one that is held of a peer."""
    held = members.peers[name].status.process if name in members.peers else ""
    return encode(Addressed(members.status.process, held, encode(request)))


def open_addressed(members: Members, name: str, message: Addressed) -> PeerMessage:
    """Return the request, if it is from the process that is held of this peer, and for this process. Raises
    CallRefused."""
    peer = members.peers.get(name)
    if peer is None:
        raise CallRefused("say hello first", "hello")
    own = members.status.process
    if message.receiver > own:
        members.record_rejected(
            peer, "another process with the identity of this worker has taken its place", "replaced"
        )
        raise CallRefused("this is an earlier process with the identity of the worker that is meant", "process")
    if message.sender != peer.status.process:
        check_process(peer, message.sender, members.settings.beat_seconds)
        raise CallRefused("say hello first", "hello")
    if message.receiver not in ("", own):
        raise CallRefused("this worker was restarted: say hello first", "hello")
    return decode(message.request)


class Calls:
    def __init__(self, members: Members, answer_own: Callable[[str, PeerMessage], Awaitable[PeerMessage]]) -> None:
        """`answer_own`: how the node answers a message of its own."""
        self.transport = members.transport
        self._members = members
        self._answer_own = answer_own

    async def ask(self, peer: str, request: PeerMessage) -> PeerMessage:
        """Raises Unreachable, CallRefused or Malformed."""
        if peer == self.transport.peer:
            return await self._answer_own(peer, request)
        seconds = self._members.settings.lost_seconds
        return decode(await self.transport.call(peer, addressed(self._members, peer, request), seconds))

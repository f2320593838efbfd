"""Requests from this node to another, or to itself where this node leads the round."""

from collections.abc import Awaitable, Callable

from diloco.engines.swarm.node.members import Members
from diloco.engines.swarm.node.messages import decode
from diloco.engines.swarm.node.processes import addressed
from diloco.engines.swarm.node.wire import Malformed, PeerMessage


class Calls:
    def __init__(self, members: Members) -> None:
        self.transport, self._members = members.transport, members
        self.answer_own: Callable[[str, PeerMessage], Awaitable[PeerMessage]] = _no_answer
        """Set by the node: how it answers a message of its own."""

    async def ask(self, peer: str, request: PeerMessage) -> PeerMessage:
        """Raises Unreachable, CallRefused or Malformed."""
        if peer == self.transport.peer:
            return await self.answer_own(peer, request)
        seconds = self._members.settings.lost_seconds
        return decode(await self.transport.call(peer, addressed(self._members, peer, request), seconds))


async def _no_answer(peer: str, request: PeerMessage) -> PeerMessage:
    raise Malformed(f"{peer} answers no {type(request).__name__} yet")

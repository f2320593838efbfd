"""Requests from this node to another, or to itself where this node leads the round."""

from collections.abc import Awaitable, Callable

from diloco.swarm.node.members import Members
from diloco.swarm.node.processes import addressed
from diloco.swarm.protocol.messages import decode
from diloco.swarm.protocol.wire import PeerMessage


class Calls:
    def __init__(self, members: Members, answer_own: Callable[[str, PeerMessage], Awaitable[PeerMessage]]) -> None:
        """`answer_own`: how the node answers a message of its own."""
        self.transport, self._members, self._answer_own = members.transport, members, answer_own

    async def ask(self, peer: str, request: PeerMessage) -> PeerMessage:
        """Raises Unreachable, CallRefused or Malformed."""
        if peer == self.transport.peer:
            return await self._answer_own(peer, request)
        seconds = self._members.settings.lost_seconds
        return decode(await self.transport.call(peer, addressed(self._members, peer, request), seconds))

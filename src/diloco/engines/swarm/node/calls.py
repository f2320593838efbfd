"""Requests from this node to another, or to itself where this node leads the round."""

from collections.abc import Awaitable, Callable

from diloco.engines.swarm.network.transport import Transport
from diloco.engines.swarm.node.messages import decode
from diloco.engines.swarm.node.wire import Malformed, PeerMessage, encode


class Calls:
    def __init__(self, transport: Transport, seconds: float) -> None:
        self.transport, self._seconds = transport, seconds
        self.answer_own: Callable[[str, PeerMessage], Awaitable[PeerMessage]] = _no_answer
        """Set by the node: how it answers a message of its own."""

    async def ask(self, peer: str, request: PeerMessage) -> PeerMessage:
        """Raises Unreachable, CallRefused or Malformed."""
        if peer == self.transport.peer:
            return await self.answer_own(peer, request)
        return decode(await self.transport.call(peer, encode(request), self._seconds))


async def _no_answer(peer: str, request: PeerMessage) -> PeerMessage:
    raise Malformed(f"{peer} answers no {type(request).__name__} yet")

"""What follows from a proof that a member has lied: it is banned here, and the others are told.

A proof can be checked by every member, so a worker that is told of one need not trust the teller. Each passes a new
proof on once; so all that are connected have it within some calls.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from diloco.engines.swarm.network.transport import CallRefused, Unreachable
from diloco.engines.swarm.node.calls import Calls
from diloco.engines.swarm.node.members import Members
from diloco.engines.swarm.node.messages import Done, Proof
from diloco.engines.swarm.node.plan import Plan
from diloco.engines.swarm.node.proofs.certificate import Certificate, TwoRanges, Vote, find_two_ranges
from diloco.engines.swarm.node.proofs.notary import Notary
from diloco.engines.swarm.node.wire import Malformed, PeerMessage

logger = logging.getLogger(__name__)


class Liars:
    def __init__(self, members: Members, calls: Calls, notary: Notary) -> None:
        self._members, self._calls, self._notary = members, calls, notary
        self.on_ban: Callable[[], None] = lambda: None
        self._tasks: set[asyncio.Task[None]] = set()

    def compare(self, plan: Plan, some: Sequence[Vote | Certificate]) -> None:
        """Of several means of one plan: which worker has signed two."""
        proof = find_two_ranges(plan, some)
        if proof is not None:
            self.record(proof)

    def answer(self, message: Proof) -> PeerMessage:
        """Raises Malformed if it proves nothing."""
        if not self._notary.is_proof(message.lie):
            raise Malformed(f"a proof against {message.lie.peer} that proves nothing")
        self.record(message.lie)
        return Done()

    def record(self, proof: TwoRanges) -> None:
        """Ban the liar, and tell the others, if that is news."""
        reason = f"it gave workers different means in round {proof.key.sequence}, and has signed both"
        if self._ban(proof.peer, reason):
            for peer in self._members.live():
                task = asyncio.create_task(self._tell(peer.name, Proof(proof)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def record_unproved(self, peer: str, reason: str) -> None:
        """This worker has seen a lie that it cannot prove to others: it counts here alone, and bans when repeated."""
        logger.warning("%s: %s", peer, reason)
        if peer in self._members.peers and self._members.permissions.record_offence(peer, reason):
            self._expel(peer, reason)

    def _ban(self, peer: str, reason: str) -> bool:
        """Whether it was not banned before."""
        permissions = self._members.permissions
        if peer in permissions.bans() or peer == self._members.me:
            return False
        permissions.ban(peer, reason)
        self._expel(peer, reason)
        return True

    def _expel(self, peer: str, reason: str) -> None:
        number = self._members.number_of(peer)
        self._members.on_event("member_banned", {"peer": peer, "number": number, "label": "", "reason": reason})
        self._members.expel()
        self.on_ban()

    async def _tell(self, peer: str, proof: Proof) -> None:
        try:
            await self._calls.ask(peer, proof)
        except (Unreachable, CallRefused, Malformed) as problem:
            logger.info("%s was not told that %s lies: %s", peer, proof.lie.peer, problem)

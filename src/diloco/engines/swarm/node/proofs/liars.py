"""What follows from a proof that a member has lied: it is banned here, and the others are told.

A proof can be checked by every member, so a worker that is told of one need not trust the teller. Each passes a new
proof on once; so all that are connected have it within some calls.
"""

import logging
from collections.abc import Callable, Sequence

from diloco.engines.swarm.network.transport import CallRefused, Unreachable
from diloco.engines.swarm.node.calls import Calls
from diloco.engines.swarm.node.membership.members import Members
from diloco.engines.swarm.node.messages import Done
from diloco.engines.swarm.node.plan import Plan
from diloco.engines.swarm.node.proofs.certificate import Agreed, Certificate, TwoRanges, Vote, find_two_ranges
from diloco.engines.swarm.node.proofs.messages import Proof
from diloco.engines.swarm.node.proofs.notary import Notary
from diloco.engines.swarm.node.wire import Malformed, PeerMessage

logger = logging.getLogger(__name__)

ACCUSERS = 2
"""So many members must accuse a worker of the same lie."""


class Liars:
    def __init__(self, members: Members, calls: Calls, notary: Notary) -> None:
        self._members, self._calls, self._notary = members, calls, notary
        self.on_ban: Callable[[], None] = lambda: None

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
        if self.ban(proof.peer, reason):
            for peer in self._members.live():
                self._members.faults.start(self._tell(peer.name, Proof(proof)), "telling a proof")

    def count_offences(self, agreed: Agreed) -> None:
        """Every member counts offences from the same plans, and so bans the same peers.

        What a header says counts against its sender only if that one has voted for the plan with it: a leader may have
        changed it. An accusation counts with two accusers.
        """
        plan, permissions = agreed.plan, self._members.permissions
        offences = plan.offences()
        for offence in offences:
            own = not offence.plan and offence.peer in agreed.certificate.signatures
            if own or len(self._notary.accusers(plan.key, offence)) >= ACCUSERS:
                self.record_unproved(offence.peer, offence.reason)
        for entry in plan.contributors:
            if entry.peer not in {offence.peer for offence in offences}:
                permissions.record_accepted(entry.peer)

    def record_unproved(self, peer: str, reason: str) -> None:
        """A lie that is no proof by itself counts as an offence; the third one bans."""
        logger.info("an offence of %s: %s", peer, reason)
        if peer in self._members.peers and self._members.permissions.record_offence(peer, reason):
            self._expel(peer, reason)

    def ban(self, peer: str, reason: str) -> bool:
        """A lie that this worker has proof of. Whether it was not banned before."""
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

"""What follows from a proof that a member has lied: it is banned here, and the others are told.

A proof can be checked by every member, so a worker that is told of one need not trust the teller. Each passes a new
proof on once; so all that are connected have it within some calls. No member is banned by another's word, whatever
number of members say the same.
"""

import logging
from collections.abc import Callable, Sequence

from diloco.engines.swarm.network.transport import CallRefused, Unreachable
from diloco.engines.swarm.node.calls import Calls
from diloco.engines.swarm.node.membership.members import Members
from diloco.engines.swarm.node.messages import Done
from diloco.engines.swarm.node.plan import Plan, parse_header
from diloco.engines.swarm.node.proofs.certificate import (
    Agreed,
    Certificate,
    LongParts,
    TwoRanges,
    Vote,
    find_two_ranges,
)
from diloco.engines.swarm.node.proofs.messages import Proof
from diloco.engines.swarm.node.proofs.norms import Encoding, are_long
from diloco.engines.swarm.node.proofs.notary import Notary
from diloco.engines.swarm.node.wire import Malformed, PeerMessage

logger = logging.getLogger(__name__)


class Liars:
    def __init__(self, members: Members, calls: Calls, notary: Notary) -> None:
        self._members, self._calls, self._notary = members, calls, notary
        self.on_ban: Callable[[], None] = lambda: None
        self.encodings: dict[int, Encoding] = {}
        """Of the rounds that this worker has posted, by fragment."""

    def compare(self, plan: Plan, some: Sequence[Vote | Certificate]) -> None:
        """Of several means of one plan: which worker has signed two."""
        proof = find_two_ranges(plan, some)
        if proof is not None:
            self.record(proof, self._two_ranges(proof))

    def answer(self, message: Proof) -> PeerMessage:
        """Raises Malformed if it proves nothing."""
        lie = message.lie
        reason = self._two_ranges(lie) if isinstance(lie, TwoRanges) else self._long_parts(lie)
        if reason is not None:
            self.record(lie, reason)
        return Done()

    def _two_ranges(self, lie: TwoRanges) -> str:
        if not self._notary.is_proof(lie):
            raise Malformed(f"a proof against {lie.peer} that proves nothing")
        return f"it gave workers different means in round {lie.key.sequence}, and has signed both"

    def _long_parts(self, lie: LongParts) -> str | None:
        """None: this worker does not know how such a contribution is encoded."""
        header = parse_header(0, lie.contribution.header)
        if not self._notary.has_signed_contribution(lie.peer, header.key, lie.contribution, lie.signature):
            raise Malformed(f"a proof against {lie.peer} that proves nothing")
        encoding = self.encodings.get(header.key.fragment)
        if encoding is None or encoding.layout_digest != header.layout_digest:
            return None
        if not are_long(lie, encoding):
            raise Malformed(f"a proof against {lie.peer} that proves nothing")
        return f"its parts in round {header.key.sequence} are longer than its header claims ({header.claim.norm:.3g})"

    def record(self, proof: TwoRanges | LongParts, reason: str) -> None:
        """Ban the liar, and tell the others, if that is news. The proof is checked, or this worker's own."""
        if self.ban(proof.peer, reason):
            for peer in self._members.live():
                self._members.faults.start(self._tell(peer.name, Proof(proof)), "telling a proof")

    def count_offences(self, agreed: Agreed) -> None:
        """Every member counts offences from the same plans, and so bans the same peers.

        What a header says counts against its sender only if that one has voted for the plan with it: a leader may have
        changed it.
        """
        plan, permissions = agreed.plan, self._members.permissions
        offences = plan.offences()
        for offence in offences:
            if offence.peer in agreed.certificate.signatures:
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

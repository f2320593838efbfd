"""Bans the member that a proof shows to have lied, and passes the proof on to the others.

A proof can be checked by every member, so a worker that is told of one need not trust the teller. Each passes a new
proof on once; so all that are connected have it within some calls. No member is banned by another's word, whatever
number of members say the same.
"""

import logging
from collections import deque
from collections.abc import Sequence
from itertools import combinations

from diloco.swarm import timing
from diloco.swarm.audit.long_parts import Encoding, are_long, has_signed_contribution
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node.calls import Calls
from diloco.swarm.node.joining import save
from diloco.swarm.node.members import Members
from diloco.swarm.protocol.certificate import Agreed, Certificate, Notary, Vote, reducers
from diloco.swarm.protocol.messages import Done, Proof
from diloco.swarm.protocol.plan import Plan, parse_header
from diloco.swarm.protocol.proofs import CertifiedPlan, LongParts, TwoPlans, TwoRanges
from diloco.swarm.protocol.quorum import Quorum
from diloco.swarm.protocol.wire import Malformed, PeerMessage

logger = logging.getLogger(__name__)


class Liars:
    def __init__(self, members: Members, calls: Calls, notary: Notary, quorum: Quorum) -> None:
        self._members = members
        self._calls = calls
        self._notary = notary
        self._quorum = quorum
        self._compared_ends: deque[tuple[int, bytes]] = deque(maxlen=64)
        """The ends of rounds elsewhere that were compared with those here: rounds, and digests of plans."""
        self.encodings: dict[int, Encoding] = {}
        """Fragment -> the encoding of contributions to the rounds that this worker has posted."""

    def compare(self, plan: Plan, means: Sequence[Vote | Certificate]) -> None:
        """Find and ban the worker that has signed two of several means of one plan."""
        proof = find_two_ranges(plan, means)
        if proof is not None:
            self.record(proof, self._two_ranges(proof))

    def compare_ends(self, one: Agreed, other: Agreed) -> None:
        """A round has ended in two ways, here (`one`) and elsewhere: ban the workers that have made that possible.

        If it is not proved, the leaders of both are passed over: another one brings the workers of both together.
        """
        end = (other.plan.key.sequence, other.plan.digest)
        if end in self._compared_ends:
            return
        self._compared_ends.append(end)
        if one.plan.digest == other.plan.digest:
            self.compare(one.plan, [one.certificate, other.certificate])
            return
        if not (one.plan.majority and other.plan.majority):
            return  # two runs that went on by themselves, as they may
        sequence = one.plan.key.sequence
        leaders = sorted({one.plan.leader, other.plan.leader})
        numbers = sorted({-one.plan.authority.minus_number, -other.plan.authority.minus_number})
        known = {*one.certificate.signatures, *other.certificate.signatures}
        credentials = {peer: self._members.permissions.credential_of(peer) for peer in sorted(known)}
        shown = {peer: data for peer, data in credentials.items() if data is not None}
        proof = TwoPlans(CertifiedPlan(*one), CertifiedPlan(*other), shown)
        self._members.on_event("two_means", {"round": sequence, "leaders": numbers})
        if guilty := self._two_plans(proof):
            self._ban_all(proof, guilty)
            return
        for leader in leaders:
            self._members.attendance.pass_over(leader, self._members.now(), timing.TWO_ENDS_SECONDS)

    def answer(self, message: Proof) -> PeerMessage:
        """Raises Malformed if it proves nothing."""
        lie = message.lie
        if isinstance(lie, TwoPlans):
            for peer, credential in lie.credentials.items():
                self._members.permissions.remember(peer, credential)
            self._ban_all(lie, self._two_plans(lie))
            return Done()
        reason = self._two_ranges(lie) if isinstance(lie, TwoRanges) else self._long_parts(lie)
        if reason is not None:
            self._ban_all(lie, {lie.peer: reason})
        return Done()

    def _two_plans(self, lie: TwoPlans) -> dict[str, str]:
        """Liar -> why the proof holds against it. Raises Malformed."""
        one = lie.one
        other = lie.other
        if one.plan.key != other.plan.key or one.plan.digest == other.plan.digest:
            raise Malformed("two plans of different rounds, or the same plan twice")
        self._notary.check(one.plan, one.certificate)
        self._notary.check(other.plan, other.certificate)
        sequence = one.plan.key.sequence
        reason = f"it voted for two plans of round {sequence} and one authority"
        guilty = {
            voter: reason
            for voter in lie.voters()
            if all(self._notary.has_voted(end.plan, voter, end.certificate) for end in (one, other))
        }
        leader = lie.leader()
        # Its own votes say that it has made both plans: some that lie together could make one in its name. Of the votes
        # of most members that count, one at least is honest, and went to this leader only.
        if leader is not None and all(
            leader in end.certificate.signatures
            and self._notary.has_voted(end.plan, leader, end.certificate)
            and self._quorum.was_majority_in(sequence, end.certificate.signatures)
            for end in (one, other)
        ):
            guilty[leader] = f"it led round {sequence} to two ends"
        return guilty

    def _two_ranges(self, lie: TwoRanges) -> str:
        if not has_signed_both(self._notary, lie):
            raise Malformed(f"a proof against {lie.peer} that proves nothing")
        return f"it gave workers different means in round {lie.key.sequence}, and has signed both"

    def _long_parts(self, lie: LongParts) -> str | None:
        """Say why the proof holds; None if this worker does not know how such a contribution is encoded. Raises
        Malformed."""
        header = parse_header(0, lie.contribution.header)
        if not has_signed_contribution(self._notary, lie.peer, header.key, lie.contribution, lie.signature):
            raise Malformed(f"a proof against {lie.peer} that proves nothing")
        encoding = self.encodings.get(header.key.fragment)
        if encoding is None or encoding.layout_digest != header.layout_digest:
            return None
        if not are_long(lie, encoding):
            raise Malformed(f"a proof against {lie.peer} that proves nothing")
        return f"its parts in round {header.key.sequence} are longer than its header claims ({header.claim.norm:.3g})"

    def record(self, proof: TwoRanges | LongParts, reason: str) -> None:
        """Act on a proof that has been checked, or is this worker's own."""
        self._ban_all(proof, {proof.peer: reason})

    def _ban_all(self, proof: TwoRanges | LongParts | TwoPlans, guilty: dict[str, str]) -> None:
        """Ban the liars, and tell the others, if that is news."""
        news = [peer for peer, reason in guilty.items() if self.ban(peer, reason)]
        if news:
            for peer in self._members.live():
                self._members.faults.start(self._tell(peer.name, Proof(proof)), "telling a proof")

    def count_offences(self, agreed: Agreed) -> None:
        """Every member counts offences from the same plans, and so bans the same peers.

        What a header says counts against its sender only if that one has voted for the plan with it: a leader may have
        changed it.
        """
        plan = agreed.plan
        permissions = self._members.permissions
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
        """Ban a worker for a lie that this worker has proof of; return whether it was not banned before."""
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
        save(self._members)

    async def _tell(self, peer: str, proof: Proof) -> None:
        try:
            await self._calls.ask(peer, proof)
        except (Unreachable, CallRefused, Malformed) as problem:
            logger.info("%s was not told of a lie: %s", peer, problem)


def has_signed_both(notary: Notary, lie: TwoRanges) -> bool:
    """Whether these are two different ranges that the accused has signed."""
    ranges = (lie.one, lie.other)
    statements = [signed.digest + signed.directions for signed in ranges]
    return statements[0] != statements[1] and all(
        notary.has_signed(lie.peer, signed.signature, "range", lie.key, lie.plan, statement)
        for signed, statement in zip(ranges, statements, strict=True)
    )


def find_two_ranges(plan: Plan, means: Sequence[Vote | Certificate]) -> TwoRanges | None:
    """Find proof against a reducer that has signed two digests of its range in `means`, whose signatures have been
    checked."""
    for mean, other in combinations(means, 2):
        if mean.num_parts == other.num_parts:
            names = reducers(plan, mean.num_parts)
            for peer, first, second in zip(names, mean.ranges, other.ranges, strict=True):
                if (first.digest, first.directions) != (second.digest, second.directions):
                    return TwoRanges(plan.key, plan.digest, peer, first, second)
    return None

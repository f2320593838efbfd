"""What a run's workers do against liars: `Auditor` is the audit of a node (node/audit.py), made of the parts here.

a contribution   its worker is bound to its parts before it sees any other's                         merkle.py
a transfer       parts are those, and no longer than their header claims; no mean is longer          transfer.py
directions       a contribution that points against most others is not voted for                     directions.py
a mean           is checked beside training, and added up again where it does not fit                mean_check.py
proofs           ban a liar wherever they arrive; offences without proof are counted                 liars.py
a state          is taken over only if other members have the same                                   witnesses.py
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager

from diloco.swarm.audit import merkle
from diloco.swarm.audit.directions import find_opposed
from diloco.swarm.audit.liars import Liars
from diloco.swarm.audit.long_parts import Encoding
from diloco.swarm.audit.mean_check import MeanCheck
from diloco.swarm.audit.own_contributions import hash_parts
from diloco.swarm.audit.transfer import AuditedTransfer
from diloco.swarm.audit.witnesses import Witnesses
from diloco.swarm.node.audit import Audit, AuditedNode, Lie, RoundAudit, StateAudit
from diloco.swarm.protocol.certificate import Agreed, Bytes, Certificate, SignedRange, Vote
from diloco.swarm.protocol.messages import AskPart, AskStateDigest, Projections, Proof
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.wire import PeerMessage
from diloco.swarm.trainer import PostedRound, Snapshot

logger = logging.getLogger(__name__)


class Auditor(Audit):
    def __init__(self, node: AuditedNode) -> None:
        self.notary = node.notary
        self.me = node.members.me
        self.liars = Liars(node.members, node.calls, node.notary, node.quorum)
        self.mean_check = MeanCheck(node.members, node.calls, self.liars)
        self.witnesses = Witnesses(node.members, node.calls, self.liars, node.quorum, node.take_snapshot)

    # A round

    async def post(self, posted: PostedRound) -> "AuditedRound":
        leaves = await hash_parts(posted)
        self.liars.encodings[posted.key.fragment] = Encoding.of(posted)
        return AuditedRound(self, posted, leaves)

    async def copied(self) -> None:
        await self.mean_check.own.copied()

    def find_opposed(self, plan: Plan, num_parts: int, ranges: Sequence[SignedRange]) -> AbstractSet[str]:
        return find_opposed(plan, num_parts, ranges).keys()

    def compare_means(self, plan: Plan, means: Sequence[Vote | Certificate]) -> None:
        self.liars.compare(plan, means)

    def compare_ends(self, one: Agreed, other: Agreed) -> None:
        self.liars.compare_ends(one, other)

    def record_lie(self, lie: Lie, sequence: int) -> None:
        """Ban a worker whose own signature proves its lie: with a proof for the others, or for this worker alone."""
        reason = f"round {sequence}: {lie}"
        if lie.proof is not None:
            self.liars.record(lie.proof, reason)
        elif lie.signed:
            self.liars.ban(lie.peer, reason)

    def record_offence(self, peer: str, reason: str) -> None:
        self.liars.record_unproved(peer, reason)

    # A state

    async def digest_of(self, snapshot: Snapshot) -> bytes:
        return await self.witnesses.digest(snapshot, own=True)

    def check_state(
        self,
        source: str,
        snapshot: Snapshot,
        digest: bytes,
        *,
        is_newcomer: bool,
        ask_end: Callable[[int], Awaitable[Agreed | None]],
    ) -> AbstractAsyncContextManager[StateAudit]:
        return self.witnesses.check(source, snapshot, digest, is_newcomer=is_newcomer, ask_end=ask_end)

    def disagreement_seconds(self) -> float:
        return self.witnesses.disagreement_seconds()

    def take_over_state(self) -> None:
        self.witnesses.forget()

    # Messages of its own

    async def answer(self, peer: str, request: PeerMessage) -> PeerMessage:
        match request:
            case Projections():
                return self.mean_check.record(peer, request)
            case AskPart():
                return await self.mean_check.show(peer, request)
            case Proof():
                return self.liars.answer(request)
            case AskStateDigest():
                return self.witnesses.answer(request)
        return await super().answer(peer, request)


class AuditedRound(RoundAudit):
    def __init__(self, auditor: Auditor, posted: PostedRound, leaves: merkle.Tree) -> None:
        self._auditor = auditor
        self._posted = posted
        self.leaves = leaves
        """The tree over the posted parts."""
        self.root = merkle.root(leaves)

    def follow(self, plan: Plan) -> AuditedTransfer:
        self._auditor.mean_check.own.keep(plan, self._posted, self.leaves)
        return AuditedTransfer(plan, self._posted, self.leaves, self._auditor.notary, self._auditor.me)

    def find_opposed(self, plan: Plan, ranges: tuple[SignedRange, ...]) -> AbstractSet[str]:
        opposed = find_opposed(plan, self._posted.num_parts, ranges)
        for peer, cosine in opposed.items():
            logger.info("round %d: the contribution of %s has the cosine %.2f", plan.key.sequence, peer, cosine)
        if opposed:
            self._auditor.mean_check.begin_opposed(plan, self._posted, ranges, opposed)
        return opposed.keys()

    def end(self, agreed: Agreed, mean: Bytes | None, copied: Callable[[], Awaitable[None]]) -> None:
        self._auditor.liars.count_offences(agreed)
        if mean is not None:
            self._auditor.mean_check.begin(agreed, self._posted, self.leaves, mean, copied)
